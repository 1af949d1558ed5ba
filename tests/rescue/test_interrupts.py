"""Ctrl-C at any moment of a plan change: it arrives, and the old plan is in force or the new one, nothing between."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import Workload, fit
from memlab.session import sessions
from tests.helpers.ctrl_c import interrupt, pythons_own_handler  # noqa: F401 - a fixture
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.switch_faults import PLAN_PAIRS, Run, Small, differences, happening, running

pytestmark = pytest.mark.usefixtures("pythons_own_handler")


class InterruptAt(TorchDispatchMode):
    """Ctrl-C at the n-th tensor operation."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.left = nth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            interrupt()
        return func(*args, **(kwargs or {}))


class Switches:
    """One pair of plans, switched again and again; after each, everything is old or everything is new."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new
        with running(old) as run:
            self.contents, self.after_old = {"old": run.contents()}, run.go_on()
        with running(old) as run:
            run.session.switch(new, now=True)
            self.contents["new"] = run.contents()
        self.run = Run(old)
        self.structure = self.run.structure()
        self.went_through = 0

    def interrupted(self, fault: AbstractContextManager[Any], where: object) -> None:
        with pytest.raises(KeyboardInterrupt), fault:
            self.run.session.switch(self.new, now=True)
        is_old = self.run.session.plan == self.contents["old"]["plan"]
        assert differences(self.run.contents(), self.contents["old" if is_old else "new"]) == [], where
        if is_old:
            assert differing(self.structure, self.run.structure()) == [], where
        else:
            self.went_through += 1
            self.run.session.undo()
            self.run = Run(self.old)
            self.structure = self.run.structure()

    def end(self) -> None:
        """The last change that was taken back left nothing that shows later."""
        assert differences(self.run.go_on(), self.after_old) == []
        self.run.session.undo()
        assert differing(self.run.untouched, self.run.structure()) == []


def seen(old: str, new: str, where: tuple[str, ...], event: str) -> int:
    """How many calls, lines or opcodes a change takes."""
    with running(old) as run:
        with happening(interrupt, 0, where, event) as moment:
            run.session.switch(new, now=True)
    return moment.seen


@pytest.mark.few(3)
@pytest.mark.parametrize(("old", "new"), PLAN_PAIRS, ids=lambda plan: plan or "nothing")
def test_at_calls_anywhere(old: str, new: str) -> None:
    switches = Switches(old, new)
    # a change that is tried again looks up less than one that is made once
    total = seen(old, new, (), "call") * 80 // 100
    for nth in range(1, total, 1 + total // 40):
        switches.interrupted(happening(interrupt, nth), nth)
    switches.end()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "file",
    [
        "session/in_force.py",
        "session/session.py",
        "session/switching.py",
        "runtime/interrupts.py",
    ],
)
def test_at_any_opcode_of_what_holds_it_back(file: str) -> None:
    old, new = "--accumulate 2 --fp16", "--checkpoint"
    switches = Switches(old, new)
    total = seen(old, new, (file,), "opcode")
    for nth in range(1, total + 1, 1 + total // 120):
        switches.interrupted(happening(interrupt, nth, (file,), "opcode"), nth)
    assert total > 50
    switches.end()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("old", "new"), [("--fp16", "--adam8bit"), ("--precision pure-bf16 --offload optimizer", "--optim adafactor")]
)
def test_at_any_operation(old: str, new: str) -> None:
    switches = Switches(old, new)
    with running(old) as run, InterruptAt(0) as counting:
        run.session.switch(new, now=True)
    assert counting.left < -10
    for nth in range(1, 1 - counting.left, 2):
        switches.interrupted(InterruptAt(nth), nth)
    switches.end()


def test_while_a_session_begins() -> None:
    """Nobody would get the session, so there must be none."""
    nth, reached = 0, True
    while reached:
        nth += 23
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        structure = fingerprint(model, [optimizer])
        values = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        copies = [value.detach().clone() for value in values]
        try:
            with happening(interrupt, nth) as moment:
                session = fit(Workload(model, optimizer), "--accumulate 2 --fp16 --offload optimizer --chunk-loss")
            session.undo()
        except KeyboardInterrupt:
            assert sessions() == (), moment.place
        reached = bool(moment.place)
        assert differing(structure, fingerprint(model, [optimizer])) == [], moment.place
        values = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
        assert all(map(torch.equal, values, copies)), moment.place
    assert nth > 200


def test_an_undo_is_completed() -> None:
    plan = "--accumulate 2 --checkpoint --precision pure-bf16 --adam8bit --offload optimizer"
    with running(plan) as run:
        run.session.undo()
        expected = {**run.contents(), "plan": None}
    nth, reached = 0, True
    while reached:
        nth += 71
        run = Run(plan)
        try:
            with happening(interrupt, nth) as moment:
                run.session.undo()
        except KeyboardInterrupt:
            if run.session.attached:  # it came before the first change
                assert "undo" in moment.place or "attached" in moment.place
                run.session.undo()
        else:
            assert not moment.place
        reached = bool(moment.place)
        assert differences({**run.contents(), "plan": None}, expected) == [], moment.place
        assert differing(run.untouched, run.structure()) == [], moment.place
    assert nth > 200


def test_from_outside_at_random_times() -> None:
    switches = Switches("--fp16 --offload optimizer", "--adam8bit --checkpoint")
    came, moments = 0, random.Random(0)
    for _ in range(40):
        timer = threading.Timer(moments.uniform(0, 0.006), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            switches.run.session.switch(switches.new, now=True)
            timer.join()
        except KeyboardInterrupt:
            came += 1
        timer.join()
        name = "old" if switches.run.session.plan == switches.contents["old"]["plan"] else "new"
        assert differences(switches.run.contents(), switches.contents[name]) == []
        if name == "new":
            switches.run.session.undo()
            switches.run = Run(switches.old)
    assert came == 40
    switches.run.session.undo()
