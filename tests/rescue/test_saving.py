"""Memory runs out while a run is saved or resumed: what is saved is what it would be, and nothing is lost."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.measuring.ledger import Ledger
from memlab.session import Session
from tests.loops.cases import gpt2
from tests.rescue.faults import LONG, Faults

_SAMPLE = 4  # allocations of each case
_IDS = torch.randint(0, 2048, (4, 8), generator=torch.Generator().manual_seed(0))


class _Loop:
    """A run that has trained for three steps, with a checkpoint after the second."""

    def __init__(self, plan: str) -> None:
        torch.manual_seed(0)
        self.model: Any = gpt2().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session: Session = fit(Workload(self.model, self.optimizer), plan, rescue=True)
        self.step(), self.step()
        self.checkpoint = self.state()
        self.step()

    def step(self) -> float:
        loss = self.model(input_ids=_IDS, labels=_IDS).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def _saved(loop: _Loop) -> Any:
    buffer = io.BytesIO()
    torch.save({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def _pickled(loop: _Loop) -> Any:
    buffer = io.BytesIO()
    torch.save(loop.model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False).state_dict()


def _loaded(loop: _Loop) -> Any:
    loop.model.load_state_dict(loop.checkpoint["model"])
    loop.optimizer.load_state_dict(loop.checkpoint["optimizer"])


_ACTIONS: dict[str, Callable[[_Loop], Any]] = {"torch.save": _saved, "of the model": _pickled, "resume": _loaded}
_PLANS = (
    "--adam8bit", "--offload optimizer", "--precision pure-bf16", "--optim adafactor", "--optim adamw4bit", "--offload params,optimizer",
    "--precision pure-bf16 --adam8bit --offload optimizer",
)  # fmt: skip
_IN_FILES = ("--offload optimizer", "--offload params,optimizer")  # a load writes to files, and allocates nothing


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(_differs(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) != len(other) or any(map(_differs, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype is not other.dtype or one.device != other.device or not torch.equal(one, other)
    return bool(one != other)


def _run(plan: str, action: str, at: tuple[int, ...]) -> tuple[Any, Any, float, Faults]:
    loop, faults = _Loop(plan), Faults(at)
    with faults:
        result = _ACTIONS[action](loop)
    state, loss = loop.state(), loop.step()
    loop.session.undo()
    return result, state, loss, faults


@pytest.mark.few(4)
@pytest.mark.timeout(900 if LONG else 120)
@pytest.mark.parametrize("action", _ACTIONS)
@pytest.mark.parametrize("plan", _PLANS)
def test_memory_that_runs_out_once_is_not_noticed(plan: str, action: str) -> None:
    *expected, counted = _run(plan, action, ())
    assert (
        counted.count or (action == "of the model" and "bf16" not in plan) or (action == "resume" and plan in _IN_FILES)
    )
    assert not (counted.count and action == "resume" and plan in _IN_FILES)
    for nth in range(1, counted.count + 1, 1 if LONG else max(1, counted.count // _SAMPLE)):
        *found, faults = _run(plan, action, (nth,))
        assert faults.failed, nth
        assert not _differs(expected, found), (nth, faults.failed)


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", [plan for plan in _PLANS if plan not in _IN_FILES])
def test_a_load_that_memory_does_not_suffice_for_can_be_done_again(plan: str) -> None:
    loop = _Loop(plan)
    with Faults(lasting_from=20) as faults, pytest.raises(torch.OutOfMemoryError):
        _loaded(loop)
    assert faults.failed
    _loaded(loop)
    assert not _differs(loop.state(), loop.checkpoint)
    assert loop.step() == _resumed(plan)
    loop.session.undo()


def _resumed(plan: str) -> float:
    loop = _Loop(plan)
    _loaded(loop)
    loss = loop.step()
    loop.session.undo()
    return loss


# --- moments that are copied to be loaded, here to another dtype, as from the host to a GPU


def _moments(plan: str, hook: Any = None) -> tuple[Session, torch.optim.Optimizer, dict[str, Any], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    if hook is not None:
        optimizer.register_load_state_dict_pre_hook(hook)
    session = fit(Workload(model, optimizer), plan)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    entries = {key: {n: v.double() for n, v in entry.items()} for key, entry in saved["state"].items()}
    return session, optimizer, {**saved, "state": entries}, 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("plan", ["--adam8bit", "--offload optimizer", "--optim adafactor"])
def test_moments_are_loaded_one_parameter_at_a_time(plan: str) -> None:
    session, optimizer, checkpoint, whole_bytes = _moments(plan)
    ledger = Ledger()
    ledger.begin([])
    with ledger:
        optimizer.load_state_dict(checkpoint)
    peak_bytes = ledger.peak_bytes
    ledger.close()
    kept = sum(v.nbytes for entry in checkpoint["state"].values() for v in entry.values()) // 2
    assert kept > 2 * whole_bytes
    assert peak_bytes < 0.75 * 2 * whole_bytes
    if plan == "--offload optimizer":  # else they are rounded
        assert not _differs(_single(checkpoint), _single(optimizer.state_dict()))
    session.undo()


def _single(saved: dict[str, Any]) -> Any:
    return {key: {n: v.float() for n, v in entry.items()} for key, entry in saved["state"].items()}


def test_hooks_of_the_loop_see_the_moments_themselves() -> None:
    seen: list[Any] = []

    def hook(_optimizer: Any, state_dict: dict[str, Any]) -> None:
        seen.extend(value for entry in state_dict["state"].values() for value in entry.values())

    session, optimizer, checkpoint, _ = _moments("--adam8bit", hook)
    optimizer.load_state_dict(checkpoint)
    assert seen
    assert all(isinstance(value, torch.Tensor) for value in seen)
    session.undo()


def test_a_state_dict_of_other_groups_is_refused_as_by_torch() -> None:
    session, optimizer, checkpoint, _ = _moments("--adam8bit")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**checkpoint, "param_groups": []})
    assert not _differs(optimizer.state_dict(), before)
    session.undo()
