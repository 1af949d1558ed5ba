"""Running a stack in a real shell, untouched and under flags, and saying how the two compare."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from memlab.jupyter.magic import unload
from memlab.session import sessions
from tests.stacks.loops import TORCH, Stack

_LOSSY = "--bf16 --adam8bit"
# each with how far losses and weights may be from the untouched run, relative
SETTINGS: dict[str, float] = {
    "": 0.0,
    "--accumulate 2": 1e-5,
    "--checkpoint": 1e-5,
    "--offload optimizer,activations": 1e-5,
    "--release-grads": 1e-5,
    _LOSSY: 0.2,
}


_REFUSED = re.compile(r"step \d+: refused [^:]*: (.*?); as written is back")  # by what a later step shows


class Verdict(StrEnum):
    """How a stack came out under a setting."""

    SAME = "same"
    REFUSED = "refused"
    NO_EFFECT = "no effect, said so"
    DIFFERS = "DIFFERS"
    CRASHED = "CRASHED"
    RESIDUE = "LEFT SOMETHING"


@dataclass(frozen=True)
class Outcome:
    """What one run under a setting gave.

    Args:
        verdict: how it compares.
        detail: the distance, the refusal or the error, in one line.
    """

    verdict: Verdict
    detail: str

    @property
    def is_good(self) -> bool:
        return self.verdict in (Verdict.SAME, Verdict.REFUSED, Verdict.NO_EFFECT)


Numbers = dict[str, torch.Tensor]


@contextlib.contextmanager
def shell() -> Iterator[InteractiveShell]:
    """A shell with memlab loaded, which predicts nothing."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    main = sys.modules["__main__"]
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance(config=config)
    made.run_line_magic("load_ext", "memlab")
    made.run_line_magic("config", "MemLab.predict = False")
    try:
        yield made
    finally:
        unload(made)
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main


def outcomes(shell: InteractiveShell, stack: Stack) -> dict[str, Outcome]:
    """The loop under every setting, compared with the untouched one."""
    untouched = _untouched(shell, stack, stack.cell)
    by_hand = {flags: _untouched(shell, stack, cell) for flags, cell in stack.by_hand.items()}
    return {flags: _under(shell, stack, flags, by_hand.get(flags, untouched)) for flags in SETTINGS}


def _untouched(shell: InteractiveShell, stack: Stack, cell: str) -> Numbers:
    """Losses and weights of a loop without memlab."""
    result, said = _run(shell, stack, cell)
    if result.error_in_exec is not None or result.error_before_exec is not None:
        raise AssertionError(said)
    return _numbers(shell, stack)


def _under(shell: InteractiveShell, stack: Stack, flags: str, expected: Numbers) -> Outcome:
    """The loop in a `%%memfit` cell with some flags, compared with the untouched one."""
    attributes = None
    try:
        result, said = _run(shell, stack, f"%%memfit {flags} {stack.beside.get(flags, '')} --quiet\n{stack.cell}")
        error = result.error_in_exec or result.error_before_exec
        if error is not None:
            refused = type(error).__name__ == "UsageError"
            return Outcome(Verdict.REFUSED if refused else Verdict.CRASHED, _line(str(error) or repr(error)))
        found = _numbers(shell, stack)
        attributes = _attributes(shell, stack)
    finally:
        for session in sessions():
            session.undo()
    # Bits that bf16 loses depend on the processor, and Adam's first steps make a whole step of a gradient near zero: one value
    # of a bias says nothing there, the tensor as a whole does.
    order = 2.0 if flags == _LOSSY else math.inf
    distance = max((_distance(found[name], value, order) for name, value in expected.items()), default=0.0)
    if not distance <= SETTINGS[flags]:
        return Outcome(Verdict.DIFFERS, f"{distance:.1e}")
    left = [name for name in _attributes(shell, stack) if "memlab" in name]
    if left or not attributes:
        return Outcome(Verdict.RESIDUE, ", ".join(left))
    if (refused := _REFUSED.search(" ".join(said.split()))) is not None:
        return Outcome(Verdict.REFUSED, _line(refused[1]))
    verdict = Verdict.NO_EFFECT if "no effect" in said else Verdict.SAME
    return Outcome(verdict, f"{distance:.0e}" if distance else "0")


def _run(shell: InteractiveShell, stack: Stack, cell: str) -> tuple[Any, str]:
    shell.user_ns.pop("losses", None)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        made = shell.run_cell(TORCH + stack.make)
        if made.error_in_exec is not None or made.error_before_exec is not None:
            return made, said.getvalue()
        torch.manual_seed(1)
        result = shell.run_cell(cell)
    return result, said.getvalue()


def _numbers(shell: InteractiveShell, stack: Stack) -> Numbers:
    space = shell.user_ns
    numbers = {"losses": torch.tensor(space["losses"], dtype=torch.float64)}
    for part in stack.parts:
        for name, tensor in eval(part, space).state_dict().items():
            if tensor.is_floating_point():
                numbers[f"{part}.{name}"] = tensor.detach().double().clone()
    return numbers


def _attributes(shell: InteractiveShell, stack: Stack) -> list[str]:
    """Attributes, hooks and their makers on every module."""
    return [
        f"{name}: {type(value).__module__}"
        for part in stack.parts
        for module in eval(part, shell.user_ns).modules()
        for name, value in vars(module).items()
    ]


def _distance(found: torch.Tensor, expected: torch.Tensor, order: float) -> float:
    """Norm of the difference over the norm of what is expected, both of `order`."""
    if found.shape != expected.shape:
        return float("inf")
    norm = torch.linalg.vector_norm
    scale = float(norm(expected, order)) if expected.numel() else 0.0
    return float(norm(found - expected, order)) / (scale or 1.0) if expected.numel() else 0.0


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
