"""An undo, or another plan, between a call and its backward pass: the loop goes on as without memlab, or is told why it cannot."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.rescue.rescuer import Rescuer
from memlab.techniques.tiling import tiling
from tests.loops.cases import Tower
from tests.rescue.faults import Faults

EXACT = (
    "--checkpoint", "--checkpoint selective", "--offload activations", "--offload params", "--offload optimizer", "--tile 2",
    "--release-grads", "--checkpoint --offload activations", "--tile 2 --offload activations",
)  # fmt: skip
OTHERS = ["", "--bf16", "--fp16", "--checkpoint", "--accumulate 2", "--offload activations", "--release-grads"]
SETTINGS = ["--accumulate 2", *EXACT, *(f"--accumulate 2 {setting}" for setting in EXACT), "out of memory"]


class Counting(Tower):
    """A model that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(classes=8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(inputs)


def run(setting: str | None) -> list[torch.Tensor]:
    """Weights, buffers and losses after a loop whose plan goes within its third step."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows, losses = torch.randn(4, 8, 16), []
    is_rescued = setting == "out of memory"
    plan = "" if is_rescued or setting is None else setting
    session = fit(Workload(model, optimizer), plan, rescue=Rescuer() if is_rescued else False) if setting else None
    for step in range(4):
        with Faults((10,)) if is_rescued and step == 2 else nullcontext():
            loss = F.cross_entropy(model(rows[step]), torch.arange(8))
        if session is not None and step == 2:
            assert session.rescuer is None or session.rescuer.rescues
            session.undo()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*losses, *(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))]


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "LARGE_BYTES", 0)


@pytest.mark.few(8)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_loop_goes_on(setting: str) -> None:
    for found, expected in zip(run(setting), run(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("setting", ["--precision pure-bf16", "--accumulate 2 --precision pure-bf16"])
def test_what_was_computed_in_pure_bf16_says_that_it_is_over(setting: str) -> None:
    with pytest.raises(RefusalError) as caught:
        run(setting)
    assert str(caught.value) == (
        "precision: this was computed with weights in pure bf16, which was taken off before its backward pass; "
        "compute it again, or take pure bf16 off after backward()"
    )


def gradient_in_between(before: str, after: str, *, is_guarded: bool = False) -> torch.Tensor:
    """The gradient of a loss that was computed under a plan, when another is there; weights are the loop's afterwards."""
    torch.manual_seed(0)
    model = Tower(classes=8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    session = fit(Workload(model, optimizer), before, rescue=Rescuer() if is_guarded else False)
    try:
        loss = F.cross_entropy(model(torch.randn(8, 16)), torch.arange(8))
        session.switch(after, now=True)
        loss.backward()
    finally:
        session.undo()
    assert all(map(torch.equal, model.parameters(), weights))
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.few(12)
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize(("before", "after"), [*(pair for pair in product(OTHERS, OTHERS) if pair[0] != pair[1])])
def test_another_plan_takes_over(before: str, after: str, is_guarded: bool) -> None:
    expected = gradient_in_between("", "")
    found = gradient_in_between(before, after, is_guarded=is_guarded)
    assert (found - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize(("before", "after"), [("--fp16", ""), ("--fp16", "--bf16"), ("--accumulate 2", "--fp16")])
def test_loss_scaling_is_of_what_was_computed_under_it(before: str, after: str) -> None:
    test_another_plan_takes_over(before, after, is_guarded=False)


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("before", ["", "--bf16", "--fp16", "--checkpoint", "--accumulate 2", "--offload optimizer"])
def test_what_was_computed_before_pure_bf16_is_refused(before: str, is_guarded: bool) -> None:
    with pytest.raises(RefusalError) as caught:
        gradient_in_between(before, "--precision pure-bf16", is_guarded=is_guarded)
    assert str(caught.value) == (
        "precision: this was computed before pure bf16 came, with weights in fp32; compute it again, or have pure bf16 come "
        "after backward()"
    )


def test_what_was_computed_in_pure_bf16_says_so_when_its_rescuer_has_gone() -> None:
    torch.manual_seed(0)
    model = Tower(classes=8)
    session = fit(Workload(model, torch.optim.SGD(model.parameters(), 1e-2)), "--precision pure-bf16", rescue=Rescuer())
    loss = F.cross_entropy(model(torch.randn(8, 16)), torch.arange(8))
    session.undo()
    with pytest.raises(RefusalError, match="which was taken off before its backward pass"):
        loss.backward()
