"""Hundreds of rescues in one process leave nothing behind."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit
from memlab.rescue import recovery
from memlab.session import Session
from tests.helpers.fingerprint import differing, fingerprint
from tests.rescue.faults import Faults

_RESCUES = 500
_ROWS = 4


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.leave = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.leave(self.blocks(inputs))


class _Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = _Net().double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs, self.targets = torch.randn(_ROWS, 8, dtype=torch.float64), torch.randint(0, 3, (_ROWS,))

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        return float(loss)


def allocations_of_a_step(loop: _Loop) -> int:
    with Faults() as faults:
        loop.step()
    return faults.count


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.full
def test_five_hundred_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in every step, at another allocation each time; the plan goes back to the first one now and then."""
    collect, calls = recovery.collect, [0]

    def rarely() -> None:
        calls[0] += 1
        if calls[0] % 10 == 0:
            collect()

    monkeypatch.setattr(recovery, "collect", rarely)
    undisturbed = _Loop()
    loop = _Loop()
    with fit(Workload(loop.model, loop.optimizer), rescue=True) as session:
        loop.step()  # creates the optimizer's state, with allocations of its own
        count = allocations_of_a_step(loop)
        undisturbed.step()
        undisturbed.step()
        seen = [_seen(loop, session)]
        for index in range(_RESCUES):
            session.switch("", now=True)
            with Faults([1 + 7 * index % (count - 1)]) as faults:
                loss = loop.step()
            assert faults.failed
            assert loss == pytest.approx(undisturbed.step(), rel=1e-9)
            if index % 100 == 99:
                seen.append(_seen(loop, session))
        assert session.rescuer is not None
        assert len(session.rescuer.rescues) == _RESCUES
        # the first hundred fill torch's and memlab's caches
        warm, last = seen[1], seen[-1]
        assert differing(warm["structure"], last["structure"]) == []
        assert last["tensors"] <= warm["tensors"]
        assert last["threads"] == warm["threads"]
        # 400 rescues: their records and lines of the log, a few objects each
        assert last["objects"] - warm["objects"] <= 400 * 8
    for found, expected in zip(loop.model.parameters(), undisturbed.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _seen(loop: _Loop, session: Session) -> dict[str, Any]:
    loop.optimizer.zero_grad()
    gc.collect()
    return {
        "structure": fingerprint(loop.model, [loop.optimizer]),
        "tensors": live_tensors(),
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
    }


def test_a_session_that_has_rescued_leaves_as_it_came() -> None:
    loop = _Loop()
    loop.step()
    loop.optimizer.zero_grad()
    before = fingerprint(loop.model, [loop.optimizer])
    tensors = live_tensors()
    with fit(Workload(loop.model, loop.optimizer), rescue=True) as session:
        count = allocations_of_a_step(loop)
        for nth in range(1, count, count // 8):
            with Faults([nth]):
                loop.step()
        assert session.rescuer is not None
        assert len(session.rescuer.rescues) >= 8
    loop.optimizer.zero_grad()
    del session
    gc.collect()
    assert differing(before, fingerprint(loop.model, [loop.optimizer])) == []
    assert live_tensors() <= tensors
