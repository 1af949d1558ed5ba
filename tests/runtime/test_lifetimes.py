"""What is known of objects goes with them, and no code of Python's runs then: a Ctrl-C would be lost in it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memlab.measuring.ledger import Ledger
from memlab.plan import Plan
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.lifetimes import Departures, WhileAlive
from memlab.runtime.workload import Workload
from memlab.session import fit
from memlab.techniques.offload.pool import Pool, file_slab

# what Python calls when an object goes: those of the standard library's weak collections, and finalizers of classes
_IN_WEAKREF = ("finalize.__call__", "remove", "_remove")


def finalizers_during(work: Callable[[], Any]) -> list[str]:
    """Return the Python functions that ran because an object had gone."""
    seen: list[str] = []

    def watch(frame: Any, event: str, _arg: Any) -> None:
        code = frame.f_code
        is_weak = code.co_filename == weakref.__file__ and code.co_qualname.endswith(_IN_WEAKREF)
        if event == "call" and (is_weak or code.co_name == "__del__"):
            seen.append(code.co_qualname)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what other tests left would go in the middle of this
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return seen


class Thing:
    pass


def test_a_value_goes_with_its_object_and_may_be_replaced() -> None:
    values: WhileAlive[int] = WhileAlive()
    one, other = Thing(), Thing()
    values.keep(one, 1)
    values.keep(one, 2)
    values.keep(other, 3)
    assert (values.of(one), values.of(other), values.alive) == (2, 3, [one, other])
    values.forget(other)
    values.forget(other)
    assert values.of(other) is None
    held = [one]
    del one
    assert finalizers_during(held.clear) == []
    assert (len(values), values.alive) == (0, [])


def test_departures_are_told_once() -> None:
    departures: Departures[str] = Departures()
    held = [Thing(), Thing()]
    for name, thing in zip("ab", held, strict=True):
        departures.watch(thing, name)
    del thing
    assert finalizers_during(held.clear) == []
    assert sorted(departures.new()) == ["a", "b"]
    assert list(departures.new()) == []


def test_a_region_returns_to_its_pool() -> None:
    pool = Pool(file_slab)
    held = [pool.take(1000)]
    assert finalizers_during(held.clear) == []
    assert pool.used_bytes == 0


def test_no_code_runs_where_a_tensor_of_a_watched_step_goes() -> None:
    model, inputs = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(8, 8)
    called: list[str] = []

    def watch(frame: Any, event: str, _arg: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    with Ledger() as ledger:
        ledger.begin([])
        held = [model(inputs)]
        live_bytes = ledger.live_bytes
        before = sys.getprofile()
        sys.setprofile(watch)
        held.clear()
        sys.setprofile(before)
        assert called == []
        assert ledger.live_bytes < live_bytes


@pytest.mark.parametrize(
    "flags", ["--offload activations", "--offload params", "--offload optimizer", "--bf16 --adam8bit"]
)
@pytest.mark.parametrize("is_rescued", [False, True])
def test_no_finalizer_runs_in_a_step(flags: str, is_rescued: bool) -> None:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(64, 64)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    rescuer = Rescuer(capacity_bytes=2**30) if is_rescued else False
    with fit(Workload(model, optimizer), Plan.parse(flags), rescue=rescuer):
        step()
        step()
        assert finalizers_during(step) == []


@pytest.mark.parametrize("flags", ["--offload activations", "--offload params"])
def test_a_graph_that_is_dropped_without_a_backward_pass_goes_at_once(flags: str) -> None:
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])
    model = nn.Sequential(blocks, nn.Linear(64, 1), nn.Sigmoid())  # whose output is saved, and small
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), flags):
        inputs = torch.randn(2, 64)
        left = weakref.ref(inputs)
        assert model(inputs).requires_grad
        del inputs
        assert left() is None
