"""Weights and gradients whose memory others have as well: tied by ``.data``, views of one tensor, one buffer of all gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import RefusalError, Workload, fit
from memlab.measuring.runs import rehearsal
from memlab.plan import Plan

Make = Callable[["Tower"], object]
WIDTH, STEPS = 64, 3
PLANS = [
    *("--accumulate 2", "--checkpoint", "--offload optimizer,activations", "--offload params", "--release-grads"),
    *("--adam8bit", "--precision pure-bf16", "--precision pure-bf16 --offload params"),
]
LOSSY = ("bf16", "8bit")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = rows + block(rows)
        return self.last(rows)


def apart(model: Tower) -> None:
    pass


def tied(model: Tower) -> None:
    model.last.weight.data = model.first.weight.data.t()
    model.blocks[2][0].weight.data = model.blocks[1][0].weight.data


def views(model: Tower) -> torch.Tensor:
    """Weights of the blocks as views of one tensor, which the loop reads."""
    everything = torch.stack([block[0].weight.detach() for block in model.blocks])
    for block, weight in zip(model.blocks, everything, strict=True):
        block[0].weight.data = weight
    return everything


class Loop:
    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model = Tower()
        self.held = make(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-4)

    def steps(self) -> list[float]:
        losses = []
        for _ in range(STEPS):
            rows = torch.randn(6, 8)
            loss = (self.model(rows) - rows).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            seen = self.held[0, 0, 0] if isinstance(self.held, torch.Tensor) else 0.0
            losses.append(float(loss) + float(seen))
        return losses

    def storages(self) -> list[int]:
        """For each parameter the first one that shares its storage."""
        found = [parameter.untyped_storage()._cdata for parameter in self.model.parameters()]
        return [found.index(each) for each in found]


@pytest.mark.parametrize("make", [tied, views])
@pytest.mark.parametrize("plan", PLANS)
def test_shared_weights_train_as_without_it_and_are_shared_afterwards(plan: str, make: Make) -> None:
    plain, loop = Loop(make), Loop(make)
    torch.manual_seed(1)
    expected, others = plain.steps(), plain.steps()
    torch.manual_seed(1)
    try:
        with fit(Workload(loop.model, loop.optimizer), plan):
            found = loop.steps()
    except RefusalError as refusal:
        words = (
            "params: no parameter in the blocks" if make is views else "have their values in one place (tied by .data)"
        )
        assert words in str(refusal)  # noqa: PT017
        return
    tolerance = 5e-2 if any(each in plan for each in LOSSY) else 1e-5
    assert found == pytest.approx(expected, rel=tolerance)
    assert loop.steps() == pytest.approx(others, rel=tolerance)
    assert loop.storages() == plain.storages()
    if make is views:
        assert torch.equal(loop.held[0], loop.model.blocks[0][0].weight)  # type: ignore[index]


def test_pure_bf16_keeps_whole_what_others_hold_and_nothing_else() -> None:
    loop = Loop(apart)
    held = loop.model.first.weight.data
    with fit(Workload(loop.model, loop.optimizer), "--precision pure-bf16") as session:
        kept = {tuple(each.shape) for each in session.in_force.held_tensors if each.dtype is torch.float32}
        loop.steps()
        assert kept == {(WIDTH, 8)}
        assert torch.equal(held, loop.model.first.weight.data)
    assert held.data_ptr() == loop.model.first.weight.data_ptr()


@pytest.mark.filterwarnings("ignore:memlab")
@pytest.mark.parametrize("form", ["one buffer", "list"])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_the_loop_holds(plan: str, when: int, form: str) -> None:
    """Made before the plan comes or in the middle, zeroed and clipped there."""

    def losses(flags: str, *, steps: int = 4) -> list[float]:
        loop = Loop(apart)
        parameters, gradients = [*loop.model.parameters()], list[torch.Tensor]()
        flat = torch.zeros(sum(p.numel() for p in parameters))

        def make() -> None:
            for at, parameter in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True):
                parameter.grad = at.view_as(parameter) if form == "one buffer" else torch.zeros_like(parameter)
            gradients[:] = [flat] if form == "one buffer" else [p.grad for p in parameters if p.grad is not None]

        if not when:
            make()
        found = []
        with fit(Workload(loop.model, loop.optimizer), flags) as session:
            for step in range(steps):
                rows = torch.randn(6, 8)
                if step == when and when:
                    make()
                for gradient in gradients:
                    gradient.zero_()
                if step < when:
                    loop.optimizer.zero_grad()
                loss = F.mse_loss(loop.model(rows), rows)
                loss.backward()
                norm = torch.stack([each.float().norm() for each in gradients]).norm() if gradients else torch.ones(())
                for gradient in gradients:
                    gradient.mul_(float(0.1 / norm.clamp(min=0.1)))
                loop.optimizer.step()
                found.append(float(loss + norm))
            notes.extend(str(entry) for entry in session.log)
        return found

    notes: list[str] = []
    torch.manual_seed(1)
    expected = losses("")
    torch.manual_seed(1)
    try:
        found = losses(plan)
    except RefusalError as refusal:
        assert "gradients" in str(refusal)  # noqa: PT017
        assert not when or "--release-grads" in plan
        return
    tolerance = 5e-2 if any(each in plan for each in LOSSY) else 1e-5
    assert found == pytest.approx(expected, rel=tolerance), notes


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (
            "--precision pure-bf16",
            "precision: the loop holds gradients beside its weights (in a list, or as views), which would be others in bf16; "
            "use --bf16, or drop them first (optimizer.zero_grad())",
        ),
        (
            "--offload params",
            "offload: params: the loop holds gradients beside its weights (in a list, or as views), which would be others off "
            "the device; use --offload optimizer,activations, or drop them first (optimizer.zero_grad())",
        ),
    ],
)
def test_held_gradients_are_named(plan: str, line: str) -> None:
    loop = Loop(apart)
    loop.steps()
    held = [parameter.grad for parameter in loop.model.parameters()]
    with pytest.raises(RefusalError) as refused:
        fit(Workload(loop.model, loop.optimizer), plan)
    assert str(refused.value) == line
    loop.optimizer.zero_grad()
    fit(Workload(loop.model, loop.optimizer), plan).undo()
    assert all(each is not None for each in held)


def test_steps_that_are_put_back_leave_masters_as_they_were() -> None:
    loop = Loop(tied)
    rows = torch.randn(6, 8)
    workload = Workload(
        loop.model, loop.optimizer, batch=(rows,), loss_fn=lambda output, _batch: output.square().mean()
    )
    with fit(workload, "--precision pure-bf16"):
        loop.steps()
        before = {name: value.clone() for name, value in loop.model.state_dict().items()}
        with rehearsal(workload, Plan.parse("--checkpoint")):
            loop.steps()
        after = loop.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
