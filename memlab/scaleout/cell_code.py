"""`CellCode`: the text of a cell with the variables it uses, to be run elsewhere, and what of them comes back."""

from __future__ import annotations

import ast
import linecache
import symtable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.errors import ScaleError
from memlab.scaleout import serialization

_FILE = "<cell>"
_CONTAINERS = (list, dict, set)


@dataclass(frozen=True)
class CellChanges:
    """Changes that a cell made to its variables."""

    assigned: Mapping[str, Any]  # values of names it assigned
    contained: Mapping[str, Any]  # what lists, dicts and sets it was given hold now, by name
    left: Mapping[str, str]  # names of assigned variables that cannot be sent, each with the reason


class CellCode:
    r"""A cell that can be called anywhere.

    Raises:
        ScaleError: the text calls IPython (a magic, a shell command) or awaits.

    Example:
        >>> losses = []
        >>> brought = CellCode("losses.append(x)\ny = 2 * x", {"losses": losses, "x": 3, "other": 0})()
        >>> brought.assigned, brought.contained
        ({'y': 6}, {'losses': [3]})
    """

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        tree = ast.parse(text)
        if any(isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)) for node in ast.walk(tree)):
            raise ScaleError("the cell awaits, which ranks cannot: put what it awaits into a cell before")
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if "get_ipython" in read:
            raise ScaleError("the cell uses ! or %, which ranks do not know: put that into a cell of its own")
        self._text = text
        self.names = sorted(name for name in read if name in variables)
        self.variables = {name: variables[name] for name in self.names}

    def __call__(self) -> CellChanges:
        """Run the cell where this object is."""
        linecache.cache[_FILE] = (len(self._text), None, self._text.splitlines(keepends=True), _FILE)
        given = dict(self.variables)
        namespace = {"__name__": "__main__", **given}
        exec(compile(self._text, _FILE, "exec"), namespace)  # noqa: S102 - the user's own cell
        kept: dict[str, Any] = {}
        left: dict[str, str] = {}
        for name in sorted(_assigned_in(self._text) & namespace.keys()):
            reason = _why_not(namespace[name])
            if reason:
                left[name] = reason
            elif namespace[name] is not given.get(name, _FILE):
                kept[name] = namespace[name]
        contained = {
            name: value
            for name, value in given.items()
            if type(value) in _CONTAINERS and name not in kept and not _why_not(value)
        }
        return CellChanges(kept, contained, left)


def _assigned_in(text: str) -> set[str]:
    """Names that statements outside of functions and classes assign, define or import."""
    symbols = symtable.symtable(text, _FILE, "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _why_not(value: Any) -> str:
    """Return why a value stays in the other process; empty where it can come back."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return "models and optimizers other than those that were sent stay on the ranks"
    try:
        serialization.pack({"value": value})
    except ScaleError as error:
        return str(error.__cause__ or error)
    return ""
