"""What a running loop's code will do with gradients, read from the code before it is done.

Known limitations: code of libraries is not read, nor is what is called by an attribute other than one of ``self``. What is called
like torch's functions that read gradients is taken for one.
"""

from __future__ import annotations

import dis
import types
from collections import ChainMap
from collections.abc import Iterator
from itertools import pairwise
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any

from memlab.runtime.callers import is_installed
from memlab.runtime.containers import content_of

_MOST_FUNCTIONS = 500
# what a loop may do with a gradient that is gone: drop it, zero it, ask whether it is there
_HARMLESS = frozenset({"zero_", "detach_"})


def use_of_gradients(frame: FrameType) -> str | None:
    """Return where functions that run use gradients, or functions of the user's that these call; None for nowhere.

    Args:
        frame: the newest of those that run.

    Example:
        >>> def show(model):
        ...     return [weight.grad.norm() for weight in model.parameters()]
        >>> def train(model, steps):
        ...     for step in steps:
        ...         if step % 100 == 0:
        ...             show(model)
        ...         return use_of_gradients(sys._getframe())
        >>> import sys
        >>> train(None, [1])
        'show, line 2'
    """
    waiting: list[tuple[CodeType, Any, Any]] = []
    for each, _ in walk_stack(frame):
        if not is_installed(each.f_code.co_filename):
            waiting.append((each.f_code, ChainMap(each.f_locals, each.f_globals), each.f_locals.get("self")))
    seen: set[CodeType] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        code, names, owner = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        for inner in _with_inner(code):
            if (line := _line_of_use(inner)) is not None:
                where = code.co_name if code.co_name.isidentifier() else "the cell"
                return f"{where}, line {line}"
            for name in inner.co_names:
                waiting += _called(names.get(name)) or _called(
                    getattr(owner, name, None) if owner is not None else None
                )
    return None


def _called(value: Any) -> list[tuple[CodeType, Any, Any]]:
    """Code of a function of the user's, with the names it sees and the object it is a method of."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(function, FunctionType) or is_installed(function.__code__.co_filename):
        return []
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    within = {name: content_of(cell) for name, cell in cells}
    owner = getattr(value, "__self__", None)
    return [(function.__code__, ChainMap(within, function.__globals__), owner)]


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Code and the comprehensions within it; functions within are read where they are called."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType) and not each.co_name.isidentifier():
            yield from _with_inner(each)


def _line_of_use(code: CodeType) -> int | None:
    line = None
    for step, following in pairwise(dis.get_instructions(code)):
        line = step.starts_line or line
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"):
            continue
        name = step.argval
        is_called = step.opname == "LOAD_METHOD" or "NULL|self" in step.argrepr  # `torch.autograd.grad` is, no gradient
        is_asked_for = "NONE" in following.opname or (following.opname == "LOAD_CONST" and following.argval is None)
        if (
            name == "grad"
            and step.opname == "LOAD_ATTR"
            and not (is_called or is_asked_for)
            and following.argval not in _HARMLESS
        ):
            return line
        if name == "unscale_" or str(name).startswith("clip_grad"):
            return line
    return None
