"""The code of the loop that runs, as far as it can be read: its functions, and those that these call.

Known limitations: code of libraries is not read, nor is what is called by an attribute other than one of ``self``.
"""

from __future__ import annotations

import sys
import types
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_OPTIMIZED, getattr_static, getclosurevars
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from memlab.runtime.callers import is_installed
from memlab.runtime.containers import content_of

_MOST_FUNCTIONS = 500
_REFERENCES_OF_OURS = 3  # the frame's, that of the variable here, and the argument


@dataclass
class Function:
    """A function of the user's, or the code of a cell."""

    code: CodeType
    names: Any  # what it sees, by name
    owner: Any  # the object it is a method of

    def inner(self) -> Iterator[CodeType]:
        """Yield its code and the comprehensions within it; functions within are read where they are called."""
        yield from _with_comprehensions(self.code)

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield what it names, as far as that is there."""
        for code in self.inner():
            for name in (*code.co_names, *code.co_varnames, *code.co_freevars):
                yield name, self.names.get(name)
            for name in code.co_names if self.owner is not None else ():
                yield name, _attribute(self.owner, name)


def functions_of_loop(frame: FrameType) -> Iterator[Function]:
    """Yield the functions that run, from the newest frame on, and those that they call."""
    waiting: list[Function] = []
    for each, _ in walk_stack(frame):
        if not is_installed(each.f_code.co_filename):
            variables = variables_of(each)
            waiting.append(Function(each.f_code, ChainMap(variables, each.f_globals), variables.get("self")))
    seen: set[CodeType] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = waiting.pop()
        if function.code not in seen:
            seen.add(function.code)
            yield function
            waiting += (called for _, value in function.values() if (called := _read(value)) is not None)


def made_one_graph(frame: FrameType, model: nn.Module, *, calls_it: bool) -> str:
    """Return the name of what the loop calls, of which torch.compile makes one graph (``fullgraph=True``); empty for none.

    Args:
        frame: the newest of those that run.
        model: the model that trains.
        calls_it: look for functions that name the model, or a part of it; else for the others.
    """
    if "torch._dynamo.convert_frame" not in sys.modules:  # nothing was compiled
        return ""
    parts = {id(part) for part in model.modules()}
    for function in functions_of_loop(frame):
        for name, value in function.values():
            original = _original_of_one_graph(value)
            if original is not None and _names_one_of(original, parts) is calls_it:
                return name
    return ""


def of_one_graph(name: str, model: str) -> tuple[str, str]:
    """Return why a setting cannot work within calls of the model that are part of one graph, and what to do."""
    reason = (
        f"the loop calls {name}, of which torch.compile makes one graph (fullgraph=True) with calls of {model} in it"
    )
    return reason, "compile it without fullgraph, or leave the setting out"


def _original_of_one_graph(value: Any) -> Any:
    """Return what was compiled as one graph; None for all else."""
    original = getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, FunctionType) else None
    context = None if original is None else getclosurevars(value).nonlocals.get("self")
    if isinstance(value, nn.Module):  # an `OptimizedModule`; looked up without code of the user's
        context, original = vars(value).get("dynamo_ctx"), value._modules.get("_orig_mod")
    return original if getattr(context, "fullgraph", False) else None


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return what is in a frame's variables, and leave no copy of them there, which would keep what the loop drops."""
    shown = frame.f_locals
    found = dict(shown)
    # before Python 3.13 a dict, which `locals()` of the user's returns as well: one that they hold stays
    is_copy = isinstance(shown, dict) and frame.f_code.co_flags & CO_OPTIMIZED
    if is_copy and sys.getrefcount(shown) <= _REFERENCES_OF_OURS:
        shown.clear()
    return found


def _names_one_of(original: Any, parts: set[int]) -> bool:
    if isinstance(original, nn.Module):
        return any(id(part) in parts for part in original.modules())
    function = _read(original)
    if function is None:
        return False
    named = (value for _, value in function.values() if isinstance(value, nn.Module))
    return any(id(part) in parts for value in named for part in value.modules())


def _read(value: Any) -> Function | None:
    """Return what can be read of a function of the user's, with the names it sees and the object it is a method of."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(function, FunctionType) or is_installed(function.__code__.co_filename):
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    within = {name: content_of(cell) for name, cell in cells}
    return Function(function.__code__, ChainMap(within, function.__globals__), getattr(value, "__self__", None))


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute without running code of the user's, as a property would."""
    places = (getattr(owner, "__dict__", {}), owner._modules if isinstance(owner, nn.Module) else {})
    for place in places:
        if name in place:
            return place[name]
    value = getattr_static(type(owner), name, None)
    return types.MethodType(value, owner) if isinstance(value, FunctionType) else getattr(value, "__func__", None)


def _with_comprehensions(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType) and not each.co_name.isidentifier():
            yield from _with_comprehensions(each)
