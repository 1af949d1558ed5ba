"""An error of memlab's own never ends the loop: the rescue is off from then on, and says so once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit
from memlab.rescue import calls, differentiation, evidence, guard, loop_code, outputs, rescuer, start

STEPS = 3
# how many of the functions the loop calls at least so often
LEAST_CALLED = {1: 50, 9: 10}
WANTED = (
    "memlab's rescue failed and is off from here on: memory that runs out ends the cell "
    "(AssertionError: this was not expected)"
)
# what calls all others, and what autograd calls
OUTERMOST = {
    *(
        "Rescuer.__init__",
        "Rescuer.attach",
        "Rescuer.detach",
        "Rescuer.update",
        "Calls.__init__",
        "Calls.run",
        "Calls.drop_aliases",
    ),
    *(
        "Calls._call_guarded",
        "Rescuer.stepping_aside",
        "Rescuer.step_begins",
        "Rescuer.step_ended",
        "Rescuer.leave_loop_code",
    ),
    *("LoopCode.__init__", "LoopCode.__torch_function__", "Called.__init__"),
    *("GuardedCall.gradients", "_sum", "_Held.get", "_unpack"),
}


def functions() -> Iterator[tuple[Any, str]]:
    """Owner and name of the functions by which calls are guarded."""
    modules: tuple[ModuleType, ...] = (calls, differentiation, evidence, guard, loop_code, outputs, rescuer, start)
    for module in modules:
        own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
        found = (each.__name__ for each in own if inspect.isfunction(each))
        yield from ((module, name) for name in found if name not in OUTERMOST)
        for kind in filter(inspect.isclass, own):
            found = (name for name, each in vars(kind).items() if inspect.isfunction(each))
            yield from ((kind, name) for name in found if f"{kind.__name__}.{name}" not in OUTERMOST)


@functools.cache
def untouched() -> tuple[list[float], torch.Tensor]:
    return trained(rescue=False)[:2]


def trained(*, rescue: bool) -> tuple[list[float], torch.Tensor, list[str]]:
    """A loop with noise, a penalty past the model, clipping, and gradients of its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with fit(Workload(model, optimizer), rescue=rescue) as session:
        for _ in range(STEPS):
            rows, target = torch.randn(8, 6, requires_grad=True), torch.randint(0, 3, (8,))
            loss = F.cross_entropy(model(rows), target) + 0.01 * model[0].weight.square().sum()
            loss.backward()
            assert rows.grad is not None
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item() + rows.grad.sum().item())
        notes = [str(entry) for entry in session.log if "rescue failed" in entry.text]
    return losses, torch.cat([each.detach().flatten() for each in model.parameters()]), notes


@pytest.mark.parametrize("nth", [1, pytest.param(9, marks=pytest.mark.full)])
def test_the_loop_goes_on_as_it_would(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = []
    for owner, name in functions():
        calls = 0
        function = getattr(owner, name)

        def fails(*args: Any, _function: Callable[..., Any] = function, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise AssertionError("this was not expected")
            return _function(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            losses, found, notes = trained(rescue=True)
        expected, weights = untouched()
        assert losses == expected, name
        assert torch.equal(found, weights), name
        if calls < nth:  # no part of this loop
            assert not notes
            continue
        failed.append(name)
        assert [note.partition(": ")[2] for note in notes] == [WANTED], name
    assert len(failed) >= LEAST_CALLED[nth]
