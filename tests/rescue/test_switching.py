"""Random sequences of plan switches with training between them, some of which fail half-way.

``MEMLAB_LONG=1`` runs 1,000 sequences of exact plans in place of 10.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from memlab import Workload, fit
from memlab.session import Session
from memlab.session.snapshot import Snapshot
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.snapshots import changed_between
from tests.helpers.switch_faults import NoMemory, happening
from tests.loops.cases import CASES, Case
from tests.loops.running import deviation, plain_loop, untouched
from tests.loops.tolerances import LOSS, LOSSY

IS_LONG = bool(os.environ.get("MEMLAB_LONG"))
MOST_SWITCHES, STEPS_BETWEEN = 6, 2
STEPS = MOST_SWITCHES * STEPS_BETWEEN

# of most plans a test can be sure only that they train; of these, by how much they may deviate
_STATED = ("--bf16", "--precision pure-bf16", "--adam8bit")
_LOSSY_CASES = ("gpt2", "tied-criterion")


class InjectedError(Exception):
    pass


def injected() -> None:
    raise InjectedError


@dataclass(frozen=True)
class Move:
    """One switch: to which plan, at which moment of a step, and what goes wrong at which point of it."""

    plan: str
    moment: str
    fault: str
    nth: int

    def going_wrong(self) -> AbstractContextManager[Any]:
        match self.fault:
            case "memory":
                return NoMemory(self.nth, lasting=True)
            case "memory once":
                return NoMemory(self.nth, lasting=False)
            case "error":
                return happening(injected, self.nth, ("techniques/",))
            case "interrupt":
                return happening(lambda: signal.raise_signal(signal.SIGINT), self.nth)
        return nullcontext()


def plans(
    lossy: tuple[str, ...] = ("",),
    offloads: tuple[str, ...] = ("", "optimizer", "activations", "activations,optimizer"),
) -> st.SearchStrategy[str]:
    parts = st.tuples(
        st.sampled_from(["", "--accumulate 2", "--accumulate 4"]),
        st.sampled_from(["", "--checkpoint", "--checkpoint every:2", "--checkpoint selective"]),
        st.sampled_from([f"--offload {what}" if what else "" for what in offloads]),
        st.sampled_from(["", "--chunk-loss"]),
        st.sampled_from(lossy),
    )
    return parts.map(lambda flags: " ".join(filter(None, flags)))


def moves(plan: st.SearchStrategy[str], most: int = MOST_SWITCHES) -> st.SearchStrategy[list[Move]]:
    one = st.builds(
        Move,
        plan,
        st.sampled_from(["before", "between", "waiting"]),
        st.sampled_from(["none", "none", "memory", "memory once", "error", "interrupt"]),
        st.integers(1, 60),
    )
    return st.lists(one, min_size=1, max_size=most)


def sequences(short: int, long: int) -> settings:
    slow = [HealthCheck.too_slow]
    return settings(max_examples=long if IS_LONG else short, suppress_health_check=slow)


pytestmark = pytest.mark.timeout(7200 if IS_LONG else 300)


def switched(session: Session, move: Move, **now: bool) -> None:
    """Switch; what was injected may come out, and then the old plan is in force."""
    before, in_force = session.plan, list(session.techniques)
    try:
        with move.going_wrong():
            session.switch(move.plan, **now)
    except (torch.OutOfMemoryError, InjectedError):
        assert session.plan == before
        assert all(a is b for a, b in zip(session.techniques, in_force, strict=True))
        event(f"taken back: {move.fault}")
    except KeyboardInterrupt:
        event(f"interrupted, {'taken back' if session.plan == before else 'went through'}")


@contextmanager
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(case: Case, sequence: list[Move]) -> tuple[list[float], Session]:
    """Train through a sequence of switches; afterwards everything structural is as before."""
    model = case.model()
    optimizer = case.optimizer(model)
    workload = Workload(model, optimizer)
    structure, threads = fingerprint(model, [optimizer]), threading.active_count()
    losses: list[float] = []
    with pythons_own_handler(), pytest.MonkeyPatch.context() as patched:
        # a collection after each injected error would take most of the time
        patched.setattr("memlab.session.in_force.gc", SimpleNamespace(collect=lambda: None))
        session = fit(workload)
        try:
            for step in range(STEPS_BETWEEN * len(sequence)):
                move = sequence[step // STEPS_BETWEEN] if step % STEPS_BETWEEN == 0 else None
                if move is not None and move.moment == "before":
                    switched(session, move)
                loss = case.loss(model, case.batch(step))
                loss.backward()
                if move is not None and move.moment != "before":
                    switched(session, move, now=move.moment == "between")
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            values = Snapshot(workload)
        finally:
            session.undo()
    assert differing(structure, fingerprint(model, [optimizer])) == []
    assert threading.active_count() == threads
    # SGD leaves no moments behind
    assert {len(state) for state in optimizer.state.values()} <= {3}
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} <= {torch.float32}
    if all(lossless(move.plan) for move in sequence):
        assert changed_between(values, Snapshot(workload)) == []
    return losses, session


def lossless(plan: str) -> bool:
    return not any(flag in plan for flag in ("16", "8bit", "--optim"))


@sequences(10, 1000)
@given(moves(plans()), st.sampled_from(["gpt2", "tied", "tied-criterion"]))
def test_exact_plans_change_nothing(sequence: list[Move], name: str) -> None:
    losses, _ = run(CASES[name], sequence)
    assert deviation(losses, untouched(name, plain_loop, STEPS)[: len(losses)]) <= LOSS


@pytest.mark.full
@sequences(5, 300)
@given(moves(plans(("", *_STATED))), st.sampled_from(_LOSSY_CASES))
def test_lossy_plans_stay_within_their_tolerance(sequence: list[Move], name: str) -> None:
    losses, _ = run(CASES[name], sequence)
    reference = untouched(name, plain_loop, STEPS)[: len(losses)]
    largest = max(LOSSY[plan][name] for plan in _STATED)
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) <= largest * reference[0]


@pytest.mark.full
@sequences(8, 300)
@given(moves(plans(("", "--fp16", "--optim sgd", "--optim adafactor", "--adam8bit --fp16"))), st.just("gpt2"))
def test_any_plans_train_and_come_off(sequence: list[Move], name: str) -> None:
    losses, _ = run(
        CASES[name], [move for move in sequence if not _excluded(move.plan)] or [Move("", "before", "none", 1)]
    )
    assert all(map(math.isfinite, losses))


def _excluded(plan: str) -> bool:
    """SGD has no state that could be offloaded; such a plan is refused when it is read."""
    return "sgd" in plan and "optimizer" in plan
