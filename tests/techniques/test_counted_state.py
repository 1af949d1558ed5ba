"""Forward passes that count their calls, in every kind of object: as without memlab, or what cannot be put back is named and left alone."""

from __future__ import annotations

import array
import contextvars
import ctypes
import io
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.rescue.rescuer import Rescuer
from tests.rescue.faults import Faults

Count = Callable[[Any], float]


def _of_list(counter: Any) -> float:
    counter[0] += 1
    return float(counter[0])


def _of_value(counter: Any) -> float:
    counter.value += 1
    return float(counter.value)


def _of_variable(counter: contextvars.ContextVar[int]) -> float:
    counter.set(counter.get(0) + 1)
    return counter.get()


def _of_text(counter: io.StringIO) -> float:
    counter.write("a")
    return len(counter.getvalue())


def _of_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler) -> float:
    scheduler.optimizer.step()  # else it warns
    scheduler.step()
    return 10 * scheduler.optimizer.param_groups[0]["lr"]


def _of_frozen(counter: list[nn.Parameter]) -> float:
    counter[0].data += 1
    return counter[0].item()


def _of_statistics(optimizer: Any) -> float:
    optimizer.seen.append(1)
    optimizer.state["all"]["calls"] = optimizer.state["all"].get("calls", 0) + 1
    return float(len(optimizer.seen) + optimizer.state["all"]["calls"])


def _of_update(trained: Any) -> float:
    with torch.enable_grad():
        (trained.memory(torch.ones(1)) - 1).square().sum().backward()
    trained.optimizer.step()  # its gradient is kept, and so is its momentum
    return float(trained.memory.bias.item())


def _of_distribution(counter: torch.distributions.Normal) -> float:
    counter.loc = counter.loc + 1
    return counter.loc.item()


class Statistics(torch.optim.SGD):
    """An optimizer that gathers something for itself, as K-FAC does."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], 0.1)
        self.seen: list[int] = []


def _scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _momentum() -> Any:
    memory = nn.Linear(1, 1)
    return SimpleNamespace(memory=memory, optimizer=torch.optim.SGD(memory.parameters(), 0.1, momentum=0.9))


UNREADABLE: dict[str, tuple[Callable[[], Any], Count]] = {
    "count": (itertools.count, next),
    "generator": (lambda: (each for each in range(99)), next),
    "list_iterator": (lambda: iter([*range(99)]), next),
    "_SingleProcessDataLoaderIter": (lambda: iter(DataLoader([*range(99)])), next),
    "bytearray": (lambda: bytearray(1), _of_list),
    "array": (lambda: array.array("i", [0]), _of_list),
    "c_int": (ctypes.c_int, _of_value),
    "StringIO": (io.StringIO, _of_text),
}
READABLE: dict[str, tuple[Callable[[], Any], Count]] = {
    "variable with a value": (lambda: contextvars.ContextVar("calls", default=0), _of_variable),
    "object": (lambda: SimpleNamespace(value=0), _of_value),
    "scheduler": (_scheduler, _of_scheduler),
    "optimizer's statistics": (Statistics, _of_statistics),
    "optimizer's momentum": (_momentum, _of_update),
    "frozen parameter in a list": (lambda: [nn.Parameter(torch.zeros(1), requires_grad=False)], _of_frozen),
    "distribution": (lambda: torch.distributions.Normal(torch.zeros(1), torch.ones(1)), _of_distribution),
}


# a part's second run has other tensors in place of those that the first has written to, and an optimizer has its own
_TRAINS = ("optimizer's momentum", "--checkpoint")


class Scaled(nn.Module):
    """A block whose output depends on how often it has run."""

    def __init__(self, counter: Any, count: Count) -> None:
        super().__init__()
        self.counter, self.count = [counter], count
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs) * (1 + 0.1 * float(self.count(self.counter[0])))


def _losses(setting: str | None, make: Callable[[], Any], count: Count) -> tuple[list[float], list[str]]:
    """Losses of three steps, and what was said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Scaled(make(), count), Scaled(make(), count), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses: list[float] = []
    is_rescued = setting == "rescue"
    with (
        nullcontext()
        if setting is None
        else fit(Workload(model, optimizer), "" if is_rescued else setting, rescue=Rescuer() if is_rescued else False)
    ) as session:
        for step in range(3):
            inputs = torch.randn(4, 16)
            with Faults((4,)) if is_rescued and step == 1 else nullcontext():
                loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        said = (
            []
            if session is None
            else [*map(str, session.log), *(note for technique in session.techniques for note in technique.notes)]
        )
    return losses, said


@pytest.mark.parametrize(
    ("kind", "setting"),
    [pair for pair in itertools.product(READABLE, ["--accumulate 2", "--checkpoint", "rescue"]) if pair != _TRAINS],
)
def test_what_can_be_put_back_is(kind: str, setting: str) -> None:
    assert _losses(setting, *READABLE[kind])[0] == pytest.approx(_losses(None, *READABLE[kind])[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:memlab. refused")
def test_a_part_that_trains_something_itself_is_refused_when_it_computes_something_else() -> None:
    with pytest.raises(RefusalError, match="computed something else when it ran again in the backward pass"):
        _losses("--checkpoint", *READABLE["optimizer's momentum"])


@pytest.mark.filterwarnings("ignore:memlab. refused")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_put_back_is_not_read_twice(kind: str) -> None:
    losses, said = _losses("--checkpoint", *UNREADABLE[kind])

    assert losses == pytest.approx(_losses(None, *UNREADABLE[kind])[0], rel=1e-6)
    assert any(f"reads counter[0] ({kind}), which cannot be put back, and is not recomputed" in line for line in said)
    with pytest.raises(RefusalError) as refused:
        _losses("--accumulate 2", *UNREADABLE[kind])
    assert f"counter[0] ({kind}), which cannot be put back before the next micro-batch" in str(refused.value)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_call_that_cannot_be_repeated_is_not_rescued(kind: str) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        _losses("rescue", *UNREADABLE[kind])


@pytest.mark.filterwarnings("ignore:memlab. refused")
def test_a_variable_that_gets_its_first_value_cannot_lose_it() -> None:
    with pytest.raises(RefusalError, match=r"counter\[0\] \(ContextVar\), which cannot be put back"):
        _losses("--accumulate 2", lambda: contextvars.ContextVar("calls"), _of_variable)


@pytest.mark.filterwarnings("ignore:memlab. refused")
def test_a_refused_plan_leaves_an_iterator_where_it_was() -> None:
    counter = itertools.count()
    model = nn.Sequential(Scaled(counter, next), nn.Linear(16, 1))

    with fit(Workload(model, torch.optim.SGD(model.parameters(), 0.1)), "--accumulate 2"), pytest.raises(RefusalError):
        model(torch.randn(4, 16))

    assert next(counter) == 0


class _Particular(nn.Module):
    """Counts its calls in three places, and raises for a batch of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()
        self.register_buffer("count", torch.zeros(()))
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(inputs))
        self.count += 1
        if inputs.shape[1] != 16:
            raise ValueError("another width")
        return self.layers(inputs)


@pytest.mark.parametrize("setting", ["--bf16", "--fp16", "--precision pure-bf16", "--accumulate 2", "--checkpoint"])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_call_that_fails_counts_once(setting: str, bad: int) -> None:
    model = _Particular()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with fit(Workload(model, optimizer), setting):
        for step in range(4):
            try:
                model(torch.randn(4, 15 if step == bad else 16)).square().mean().backward()
            except ValueError:
                continue
            optimizer.step()
            optimizer.zero_grad()

    assert (model.calls, model.seen, model.count.item()) == (4, [4] * 4, 4)
