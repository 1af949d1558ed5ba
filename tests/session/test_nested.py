"""A model that is wrapped after memlab has worked on it, or taken out again: one session, and the plan goes along."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab import Plan, RefusalError, Workload, fit
from memlab.session import Session, sessions
from memlab.session.nested import fit_in_place_of

CHECKPOINT = Plan.parse("--checkpoint")


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(rows)  # type: ignore[no-any-return]


def nested() -> tuple[Workload, Workload]:
    """A model in a wrapper, and the wrapper, with one optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Workload(model, optimizer), Workload(Twice(model), optimizer)


def losses(workload: Workload) -> list[float]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        loss = workload.model(torch.randn(4, 8)).square().mean()
        loss.backward()
        workload.optimizers[0].step()
        workload.optimizers[0].zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_the_plan_goes_along_and_the_loop_is_the_same(is_wrapped: bool) -> None:
    earlier, later = nested() if is_wrapped else reversed(nested())
    plain_earlier, plain_later = nested() if is_wrapped else reversed(nested())
    before = fit(earlier, CHECKPOINT)
    assert losses(earlier) == losses(plain_earlier)
    with fit_in_place_of(later, None, ()) as session:
        assert not before.attached
        assert session.plan == CHECKPOINT
        assert sessions() == (session,)
        assert losses(later) == losses(plain_later)
        whose = "part of Twice" if is_wrapped else "trained as its Sequential alone"
        assert f"in place of {earlier.name}, which is {whose}" in session.log[-1].text
    assert losses(later) == losses(plain_later)


def test_a_plan_that_does_not_apply_leaves_everything_as_it_was() -> None:
    inner, outer = nested()
    with fit(inner, CHECKPOINT) as before:
        with pytest.raises(RefusalError, match="--batchnorm micro changes nothing"):
            fit_in_place_of(outer, Plan.parse("--batchnorm micro"), ())
        assert sessions() == (before,)
        assert before.plan == CHECKPOINT


def test_a_plan_that_applies_to_the_part_alone_is_left_out_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, outer = nested()
    before = fit(inner, "--precision pure-bf16")
    switch = Session.switch

    def refusing(session: Session, plan: Plan, **how: bool) -> None:
        if session.workload.model is outer.model and plan != Plan():
            raise RefusalError("precision", "Twice cannot")
        switch(session, plan, **how)

    monkeypatch.setattr(Session, "switch", refusing)
    with fit_in_place_of(outer, None, ()) as session:
        assert session.plan == Plan()
        assert session.log[-1].text == "without --precision pure-bf16, the plan of Sequential: precision: Twice cannot"
    assert not before.attached
    assert next(inner.model.parameters()).dtype is torch.float32


def test_models_that_train_beside_stay() -> None:
    inner, outer = nested()
    with fit(inner, CHECKPOINT) as before, fit_in_place_of(outer, None, [before]) as session:
        assert session.plan == Plan()
        assert before.plan == CHECKPOINT


@pytest.mark.parametrize("has_own", [False, True], ids=["the same optimizer", "another one"])
@pytest.mark.parametrize(
    "flags", ["--adam8bit", "--offload optimizer", "--precision pure-bf16", "--release-grads", "--bf16"]
)
def test_plans_of_optimizers_go_along(flags: str, has_own: bool) -> None:
    inner, outer = nested()
    fit(inner, flags)
    losses(inner)
    if has_own:
        outer = Workload(outer.model, torch.optim.AdamW(outer.model.parameters(), lr=1e-2))
    with fit_in_place_of(outer, None, ()) as session:
        assert [technique.plan for technique in session.techniques] == [Plan.parse(flags)]
        losses(outer)
        assert [*session.workload.optimizers] == [*outer.optimizers]
        assert "found optimizer AdamW" not in [entry.text for entry in session.log]
    assert sessions() == ()
    assert all(type(state) is dict for state in outer.optimizers[0].state.values())
