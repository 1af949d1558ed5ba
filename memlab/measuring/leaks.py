"""`Leaks`: what a loop holds more of after each step, by the variable that holds it and the line that adds to it.

Rules:

1. Variables are looked at after a few steps (`LOOKS`; twice where nothing grows), on the thread that trains: those of the
   functions that run and of the notebook, and what modules, hooks, closures and errors hold. Tensors on the model's device are
   counted, those of modules among them.
2. A place leaks where each look finds more than the one before, at a steady rate: tensors with a graph, a graph that reaches
   further back, or tensors of so many bytes that it matters beside the peak. What was found before is there still.
3. What only results (``Out``) and the error of earlier cells hold is told as well.
4. Nothing of the user's is kept between looks: numbers, by the names that lead to a place.

Known limitations: what only C code holds (a cycle of gradients made by ``create_graph=True``) has no variable, and is not found; nor is
what grows less often than every five steps, or beyond a list that says how long it may become (``deque(maxlen=...)``).
"""

from __future__ import annotations

import ast
import linecache
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch

from memlab.measuring.held import WITHIN, Held, Walk, bytes_in_graph
from memlab.runtime.callers import is_installed
from memlab.runtime.loop_reading import variables_of
from memlab.units import KIB, MIB, format_bytes

# steps after which variables are looked at: ten between the first and the third, and a further one against what is given up in turns
LOOKS = (3, 8, 13, 23)
_LOOKS_TO_SAY = 3
_LOOKS_TO_SAY_OF_A_FAILURE = 2
_SHARE_OF_PART = 0.9  # of what a place holds more, within one part of it
_STEADY = 3.0  # the highest rate between two looks by the lowest
_LEAST_BYTES = 4 * KIB  # a step, of tensors without a graph
_LEAST_SHARE = 0.002  # likewise, of the peak
_LEAST_BYTES_FROM_BEFORE = 1 * MIB
_LEAST_SHARE_FROM_BEFORE = 0.01  # of the peak
_ERROR = "the error of an earlier cell"
_ADDS = frozenset({"append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put"})


@dataclass(frozen=True)
class Leak:
    """A place that holds more after each step."""

    place: str  # as one writes it
    line: str  # that adds to it, with its number; empty where it is not found
    has_graph: bool
    is_single: bool  # one tensor, which is larger or whose graph is each time
    is_of_errors: bool  # by the tracebacks of errors
    bytes_per_step: float

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        if self.is_of_errors:
            return f"{self.place} keeps the variables of functions that raised errors{where}: keep str(error) of each"
        if self.is_single and self.has_graph:
            return f"{self.place} reaches the graphs of all steps{where}: add .item() or .detach() of what is added"
        if self.has_graph:
            size = f", {format_bytes(round(self.bytes_per_step))} more after each" if self.bytes_per_step >= KIB else ""
            return (
                f"{self.place} keeps the graphs of all steps{size}{where}: keep .item() or .detach() of what goes there"
            )
        size = format_bytes(round(self.bytes_per_step))
        return f"{self.place} holds {size} more after each step{where}: keep less, or on the host (.cpu())"


class Leaks:
    """Looks at what a loop holds, and says what grows."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, dict[str, Held]]] = []
        self._found: list[Leak] = []
        self._from_before: dict[str, int] = {}  # bytes of what only results and errors of earlier cells hold

    @property
    def next_look(self) -> float:
        """Number of steps after which to look; infinite where nothing grew between two looks, and after the last one."""
        is_over = len(self._looks) == len(LOOKS) or (len(self._looks) > 1 and not self._found)
        return math.inf if is_over else LOOKS[len(self._looks)]

    @property
    def is_sure(self) -> bool:
        return len(self._looks) == len(LOOKS)

    def look(self, steps: int, frame: FrameType, variables: Mapping[str, Any], device: torch.device) -> None:
        """Look, after so many steps.

        Args:
            steps: that are over.
            frame: the newest one of the thread that trains.
            variables: those of the notebook.
            device: of the tensors that count.
        """
        walk = Walk(device)
        with torch._C.DisableTorchFunctionSubclass():
            walk.run([*_of_frames(frame), *_of_notebook(variables)])
            if not self._looks:
                self._from_before = _held_from_before(walk, variables)
        self._looks.append((steps, walk.held))
        if len(self._looks) >= _LOOKS_TO_SAY_OF_A_FAILURE:
            # those of the loop first: others may have variables of the same name
            files = [*(each.f_code.co_filename for each in _frames_of_loop(frame)), *walk.files]
            self._found = [*_growing(self._looks, list(dict.fromkeys(files)))]

    def lines(self, peak_bytes: int, *, has_failed: bool = False) -> Iterator[str]:
        """Yield in words what matters beside the peak; less is asked of a loop that has run out of memory."""
        if len(self._looks) >= (_LOOKS_TO_SAY_OF_A_FAILURE if has_failed else _LOOKS_TO_SAY):
            least_bytes = max(_LEAST_BYTES, _LEAST_SHARE * peak_bytes)
            yield from (str(each) for each in self._found if each.has_graph or each.bytes_per_step >= least_bytes)
        for name, size_bytes in self._from_before.items():
            if size_bytes >= max(_LEAST_BYTES_FROM_BEFORE, _LEAST_SHARE_FROM_BEFORE * peak_bytes):
                what, way_out = (name, "%reset -f out") if name != _ERROR else (name, "the next cell that fails")
                yield f"{what} holds {format_bytes(size_bytes)} from before: {way_out} frees it"


def _held_from_before(walk: Walk, variables: Mapping[str, Any]) -> dict[str, int]:
    """Return bytes that results of the notebook, and its last error, hold beside what the walk has met."""
    results = variables.get("Out")
    roots = [(f"Out[{number}]", each) for number, each in results.items()] if isinstance(results, dict) else []
    walk.run([*roots, (_ERROR, getattr(sys, "last_value", None))])
    graphs = {name: bytes_in_graph(each) for name, each in roots}
    found = {name: round(walk.held.get(name, Held()).size_bytes) + graphs.get(name, 0) for name in (*graphs, _ERROR)}
    return {name: size_bytes for name, size_bytes in found.items() if size_bytes}


def _of_frames(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of functions that run, the newest first."""
    for each in _frames_of_loop(frame):
        yield from _of_notebook(variables_of(each))


def _frames_of_loop(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames of the user's code, from the newest to that of the cell or the script; below is what runs it."""
    for each, _ in walk_stack(frame):
        if not is_installed(each.f_code.co_filename):
            yield each
            if each.f_code.co_name == "<module>":
                return


def _of_notebook(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    hidden = ("In", "Out", "exit", "quit", "get_ipython")
    yield from ((name, v) for name, v in list(variables.items()) if name not in hidden and not name.startswith("_"))


def _growing(looks: list[tuple[int, dict[str, Held]]], files: list[str]) -> Iterator[Leak]:
    """Yield places that hold more each time, the innermost that accounts for what those around it hold more."""
    steps = [at for at, _ in looks]
    found: dict[str, tuple[float, Leak]] = {}
    for place in looks[-1][1]:
        seen = [held.get(place, Held()) for _, held in looks]
        size, more, length = (
            _rate(steps, [getattr(e, what) for e in seen]) for what in ("size_bytes", "tensors", "length")
        )
        is_single = not more and (bool(size) or (bool(length) and len({each.oldest for each in seen}) == 1))
        # what is dropped and filled again may be longer each time by chance
        if is_single or (more and all(ref() is not None for each in seen for ref in each.first)):
            has_graph = bool(_rate(steps, [each.graphs for each in seen])) or (is_single and bool(length))
            name = place.partition(WITHIN)[0]
            of_errors = ".__traceback__" in place
            leak = Leak(
                name,
                "",
                has_graph,
                is_single,
                of_errors,
                (seen[-1].size_bytes - seen[0].size_bytes) / (steps[-1] - steps[0]),
            )
            if name not in found or more >= found[name][0]:
                found[name] = more, leak
    said: list[str] = []
    for name in sorted(found, key=len):
        more, leak = found[name]
        parts = [found[other][0] for other in found if other.startswith((f"{name}.", f"{name}["))]
        if any(part >= _SHARE_OF_PART * more for part in parts) or name.startswith(tuple(said)):
            continue
        line = _line_adding_to(name, files)
        if leak.has_graph or more or line:  # a batch may be larger each time
            said += (f"{name}.", f"{name}[")
            yield replace(leak, line=line)


def _rate(steps: list[int], counts: list[float]) -> float:
    """Return by how much a count grows a step; 0 where it does not, or not steadily."""
    rates = [
        (b - a) / (until - since) for (since, until), (a, b) in zip(pairwise(steps), pairwise(counts), strict=True)
    ]
    return sum(rates) / len(rates) if min(rates) > 0 and max(rates) <= _STEADY * min(rates) else 0.0


def _line_adding_to(place: str, files: Iterable[str]) -> str:
    """Return the line of the user's code that adds to a place, with its number; empty where none is found."""
    name = re.findall(r"[^\W\d]\w*", re.sub(r"\[.*?\]", "", place))[-1]
    for file in files:
        if is_installed(file):
            continue
        lines = linecache.getlines(file)
        try:
            tree = ast.parse("".join(lines))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.stmt, ast.Call)) and _adds(node, name):
                return f"line {node.lineno}: {lines[node.lineno - 1].strip()}"
    return ""


def _adds(node: ast.AST, name: str) -> bool:
    """Return whether code adds to what a name stands for, or makes it anew of what it was."""
    if isinstance(node, ast.AugAssign):
        return _is_of(node.target, name)
    if isinstance(node, ast.FunctionDef):  # that keeps what it has returned
        return node.name == name and bool(node.decorator_list)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS and _is_of(node.func.value, name)
    if not isinstance(node, ast.Assign):
        return False
    targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
    is_item = any(isinstance(target, ast.Subscript) and _is_of(target, name) for target in targets)
    is_again = any(_is_of(target, name) for target in targets) and any(
        _is_of(each, name) for each in ast.walk(node.value)
    )
    return is_item or is_again


def _is_of(node: ast.AST, name: str) -> bool:
    while isinstance(node, (ast.Subscript, ast.Call)):
        node = node.value if isinstance(node, ast.Subscript) else getattr(node.func, "value", node.func)
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
