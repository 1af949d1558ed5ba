"""Forward passes that write to state in every way, small and large: as without memlab, or refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.rescue.rescuer import Rescuer
from tests.rescue.faults import Faults

Write = Callable[[torch.Tensor, torch.Tensor], None]


def _copies(state: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        state.copy_(values)


def _copies_data(state: torch.Tensor, values: torch.Tensor) -> None:
    state.data.copy_(values)


def _replaces_data(state: torch.Tensor, values: torch.Tensor) -> None:
    state.data = values


def _replaces_and_writes(state: torch.Tensor, values: torch.Tensor) -> None:
    state.data = values
    state.data.mul_(1.5)


def _sets(state: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        state.set_(values)  # type: ignore[call-overload] # unannotated


WRITES: tuple[Write, ...] = (_copies, _copies_data, _replaces_data, _replaces_and_writes, _sets)
# the last ones are modules that the block reaches and does not hold
HOLDERS = ("buffer", "attribute", "frozen", "embedding", "in a list", "in an object", "training, in a list", "global")
SIZES = (40, 136)  # 136 x 136 numbers are more than memlab copies without having seen them written to
SETTINGS = (
    "", "--checkpoint", "--checkpoint selective", "--accumulate 2", "--offload params", "--checkpoint --offload params",
    "--checkpoint --accumulate 2", "--precision pure-bf16", "out of memory",
)  # fmt: skip


TEACHERS: dict[int, nn.Module] = {}


class Averaging(nn.Module):
    """A block that averages its weights, in state that it holds in one place or another."""

    def __init__(self, holder: str, write: Write, size: int, place: int, *, is_last: bool) -> None:
        super().__init__()
        self.holder, self.place = holder, place
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.write, self.is_last = write, is_last
        values = torch.zeros(size, size)
        if holder == "buffer":
            self.register_buffer("average", values)
        elif holder == "embedding":
            self.table = nn.Embedding.from_pretrained(values)
        elif holder == "global":
            TEACHERS[self.place] = nn.Embedding.from_pretrained(values)
        elif "in a" in holder:
            teacher = nn.Embedding.from_pretrained(values, freeze="training" not in holder)
            self.others = [teacher] if "list" in holder else SimpleNamespace(teacher=teacher)
        else:
            self.average = values if holder == "attribute" else nn.Parameter(values, requires_grad=False)

    @property
    def state(self) -> torch.Tensor:
        if self.holder == "global":
            return TEACHERS[self.place].weight
        if "in a" in self.holder:
            return (self.others[0] if isinstance(self.others, list) else self.others.teacher).weight
        return self.table.weight if self.holder == "embedding" else self.average

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.write(self.state, 0.9 * self.state.detach() + 0.1 * self.first.weight.detach())
        hidden = torch.tanh(self.first(inputs))
        moved = hidden @ self.state.detach()
        return inputs + self.second(hidden) + (moved if self.is_last else moved.tanh())


def run(setting: str | None, holder: str, write: Write, size: int, *, is_last: bool) -> list[torch.Tensor]:
    """Losses and states of three steps."""
    torch.manual_seed(0)
    TEACHERS.clear()
    blocks = nn.Sequential(*(Averaging(holder, write, size, place, is_last=is_last) for place in range(2)))
    model = nn.Sequential(blocks, nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    is_rescued = setting == "out of memory"
    plan = "" if is_rescued or setting is None else setting
    with (
        nullcontext()
        if setting is None
        else fit(Workload(model, optimizer), plan, rescue=Rescuer() if is_rescued else False)
    ):
        for step in range(3):
            with Faults((20,)) if is_rescued and step == 1 else nullcontext():
                loss = model(torch.randn(4, size)).square().mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [torch.stack(losses), *(block.state.detach().clone() for block in blocks)]  # type: ignore[operator] # a method, says nn.Module


@pytest.mark.few(40)
@pytest.mark.parametrize(
    ("setting", "holder", "write", "size", "is_last"),
    itertools.product(SETTINGS, HOLDERS, WRITES, SIZES, (True, False)),
)
def test_state_is_written_once(setting: str, holder: str, write: Write, size: int, is_last: bool) -> None:
    try:
        found = run(setting, holder, write, size, is_last=is_last)
    except RefusalError:
        assert "bf16" in setting  # the state stays in fp32, and products of it with bf16 are the model's error
        return
    tolerance = 3e-2 if "bf16" in setting else 1e-4
    for one, other in zip(found, run(None, holder, write, size, is_last=is_last), strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


class Normed(nn.Module):
    """A layer whose weight is normed in its forward pass, in place, as it trains."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 8), factor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.copy_(self.factor * nn.functional.normalize(self.layer.weight))
        return inputs + torch.tanh(self.layer(inputs))


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize(
    ("setting", "reason"),
    {
        "--accumulate 2": "accumulation: the forward pass of Sequential writes to its parameters",
        "--checkpoint": "checkpointing: the forward pass of 0.0 changes its weights, and would once more in the backward pass",
        "--precision pure-bf16": "the forward pass of Sequential changes the weight 0.0.layer.weight, and bf16 would lose small changes",
        "--offload activations": "",
    }.items(),
)
def test_weights_that_a_forward_writes_to(setting: str, reason: str, factor: float) -> None:
    def steps(plan: str) -> list[torch.Tensor]:
        losses = []
        with fit(Workload(model, optimizer), plan):
            for step in range(3):
                loss = model(inputs[step]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return losses

    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Normed(factor) for _ in range(2))), nn.Linear(8, 1))
    before, inputs = copy.deepcopy(model.state_dict()), torch.randn(3, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    if reason:
        with pytest.raises(RefusalError, match=reason):
            steps(setting)
        assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
        return
    losses = steps(setting)
    model.load_state_dict(before)
    assert torch.equal(torch.stack(losses), torch.stack(steps("")))


class Renormed(nn.Module):
    """Embeddings that are renormed where they are looked up, before the layers that are recomputed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(500, 64, max_norm=1.0)
        self.bags = nn.EmbeddingBag(500, 64, mode="sum", max_norm=0.5)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.rows(ids[:, 0]) + self.bags(ids))


def test_a_part_that_is_chosen_later_and_writes_to_its_weights_is_not_recomputed() -> None:
    def steps(plan: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Renormed()
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
        with fit(Workload(model, optimizer), plan):
            for _ in range(4):
                loss = model(torch.randint(0, 500, (8, 3))).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return losses

    torch.testing.assert_close(steps("--checkpoint"), steps(""), rtol=1e-6, atol=0)


class Momentum(nn.Module):
    """A layer that keeps an average in attributes, a dict and a hook's list, of any size, and reads it."""

    def __init__(self, size: int, how: str) -> None:
        super().__init__()
        self.layer, self.head, self.how = nn.Linear(size, size), nn.Linear(size, 1), how
        self.slow, self.kept = torch.zeros(size, size), {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(inputs) + inputs @ self.slow)
        if self.how == "in place, then anew":
            self.slow.mul_(0.5)
        self.slow = self.slow + 0.5 * self.layer.weight.detach()
        self.kept["hidden"] = hidden.detach()
        return self.head(hidden)


@pytest.mark.parametrize("how", ["anew", "in place, then anew"])
@pytest.mark.parametrize("size", SIZES)
def test_tensors_that_a_forward_makes_anew_are_those_of_the_last_call(size: int, how: str) -> None:
    """After the backward pass, which runs the micro-batches again, they were those of an earlier one."""

    def steps(setting: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Momentum(size, how)
        optimizer, found = torch.optim.SGD(model.parameters(), 0.05), []
        with fit(Workload(model, optimizer), setting):
            for _ in range(4):
                loss = model(torch.randn(512, size)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found += [loss.detach(), model.slow.clone(), model.kept["hidden"].clone()]
        return found

    for one, other in zip(steps("--accumulate 2"), steps(""), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
