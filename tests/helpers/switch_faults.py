"""A small training run that can stand in the middle of a step, and faults for the moment its plan changes."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import bitsandbytes  # noqa: F401 - so that no fault comes into the middle of its import
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab import Workload, fit
from memlab.measuring.operator_effects import OperatorEffect, effect_of
from memlab.session import Session
from tests.helpers.fingerprint import Fingerprint, differing, fingerprint

_CODE = str(Path(memlab.__file__).parent)

# what is in force, and what it is to become
PLAN_PAIRS = (
    ("", "--adam8bit"),
    ("--adam8bit", ""),
    ("", "--offload optimizer"),
    ("--offload optimizer", ""),
    ("", "--precision pure-bf16"),
    ("--precision pure-bf16", ""),
    ("--checkpoint", "--chunk-loss"),
    ("--accumulate 2 --checkpoint", "--accumulate 4 --chunk-loss --offload activations,optimizer"),
    ("--fp16", "--bf16 --adam8bit"),
    ("--precision fp32", "--fp16 --checkpoint"),
    ("--adam8bit --offload optimizer", "--precision pure-bf16"),
    ("--precision pure-bf16 --offload optimizer", "--precision pure-bf16 --adam8bit --offload optimizer"),
    ("--optim adafactor --offload optimizer", "--adam8bit"),
    ("--optim sgd", "--optim adafactor --offload optimizer"),
    (
        "--accumulate 2 --checkpoint --precision pure-bf16 --adam8bit --offload activations,optimizer --chunk-loss",
        "--checkpoint every:2",
    ),
    ("--checkpoint --offload optimizer", "--checkpoint --offload optimizer,params"),
    ("--accumulate 2 --offload params", "--precision pure-bf16 --offload params"),
    ("", "--lora r=2"),
    ("--lora r=2", ""),
    ("--lora r=2", "--lora off:merge"),
    ("--adam8bit --checkpoint", "--lora dora,r=2,targets=head --adam8bit --offload optimizer"),
    ("--lora r=2 --precision pure-bf16", "--lora off:drop --offload params"),
)


class Small(nn.Module):
    """Repeats a block and has a large head, so every technique applies; few parameters, so faults are soon counted."""

    width = 32  # the least at which parameters leave the device

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(self.width, self.width, bias=False), nn.Tanh()) for _ in range(2))
        self.blocks = nn.Sequential(*blocks)
        self.bias = nn.Parameter(torch.zeros(self.width))
        self.head = nn.Linear(self.width, 2048, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(inputs) + self.bias), targets)


class Run:
    """A session that has trained, and now stands between a backward pass and its step."""

    def __init__(self, plan: str) -> None:
        torch.manual_seed(0)
        self.model = Small().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._drawn = torch.Generator().manual_seed(1)
        self.backward()
        self.step()
        self.untouched = self.structure()
        self.session: Session = fit(Workload(self.model, self.optimizer), plan)
        self.backward()
        self.step()
        self.backward()

    def backward(self) -> float:
        inputs = torch.randn(4, Small.width, generator=self._drawn)
        targets = torch.randint(0, 2048, (4,), generator=self._drawn)
        loss = self.model(inputs, targets)
        loss.backward()
        return float(loss.item())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def go_on(self) -> dict[str, Any]:
        """The step that was waiting and one more: the losses on the way, and what all values are then."""
        losses = []
        for _ in range(2):
            self.step()
            losses.append(self.backward())
        return {"losses": losses, **self.contents()}

    def structure(self) -> Fingerprint:
        return fingerprint(self.model, [self.optimizer])

    def contents(self) -> dict[str, Any]:
        """Copies of every value, state in the form it is kept in."""
        found: dict[str, Any] = {"random": torch.get_rng_state(), "plan": self.session.plan}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().clone()
            found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
            found[f"state of {name}"] = copy.deepcopy(dict(self.optimizer.state[parameter]))
        return found


@contextmanager
def running(plan: str) -> Iterator[Run]:
    run = Run(plan)
    try:
        yield run
    finally:
        run.session.undo()
    assert differing(run.untouched, run.structure()) == []


def differences(found: Any, expected: Any, name: str = "") -> list[str]:
    """Names of what is not bit for bit the same."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [*expected, *(key for key in found if key not in expected)]
        return [line for key in names for line in differences(found.get(key), expected.get(key), f"{name} {key}")]
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        same = found.dtype is expected.dtype and found.stride() == expected.stride() and torch.equal(found, expected)
        return [] if same else [name]
    return [] if type(found) is type(expected) and found == expected else [f"{name}: {found!r}, not {expected!r}"]


class NoMemory(TorchDispatchMode):
    """Raises out of memory at the n-th operation that makes a tensor, and if so wished at all after it."""

    def __init__(self, nth: int, *, lasting: bool) -> None:
        super().__init__()
        self.left, self.lasting = nth, lasting
        self.has_failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if effect_of(func) == OperatorEffect.BIRTH:
            self.left -= 1
            if self.left == 0 or (self.lasting and self.left < 0):
                self.has_failed = True
                raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


@dataclass
class Moment:
    """How many calls, lines or opcodes there were, and which of them something happened at."""

    seen: int = 0
    place: str = ""


@contextmanager
def happening(act: Callable[[], Any], nth: int, where: tuple[str, ...] = (), event: str = "call") -> Iterator[Moment]:
    """Do something at the n-th call, line or opcode within some of memlab's files.

    Args:
        act: what happens; it may raise.
        nth: counted from 1.
        where: files or folders of the package, as in "techniques"; empty for all.
        event: "call", "line" or "opcode".
    """
    folders = tuple(f"{_CODE}/{part}" for part in where or ("",))
    moment, before = Moment(), sys.gettrace()

    def trace(frame: FrameType, happened: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folders) or (event == "call" and _cannot_raise(frame)):
            return None
        frame.f_trace_opcodes = event == "opcode"
        if happened == event:
            moment.seen += 1
            if moment.seen == nth:
                moment.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                act()
        return trace

    sys.settrace(trace)
    try:
        yield moment
    finally:
        sys.settrace(before)


def _cannot_raise(frame: FrameType) -> bool:
    """Whether what this raises goes nowhere: a generator that is closed, a finalizer."""
    caller = frame.f_back
    is_finalizer = caller is not None and caller.f_code.co_filename == weakref.__file__
    return is_finalizer or bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
