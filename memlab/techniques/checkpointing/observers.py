"""Hooks of modules within a part, and of every module: those that only look on run once, as they would without recomputation.

A hook takes part in the computation when it returns something, or changes its module or the tensors it is given (weight
norm, spectral norm); running the part again runs it again. Any other looks on: it collects features, counts or prints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memlab.runtime.reach import GLOBAL_FORWARD_HOOKS
from memlab.runtime.stand_ins import is_ours

_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
# where the engines are at home that memlab itself puts on models: their hooks bring parameters
_OF_ENGINES = ("deepspeed", "torch.distributed")


class Observers:
    """The hooks of modules in one run of a part."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables: list[tuple[Any, str]] = [(module, kind) for module in modules for kind in (_BEFORE, _AFTER)]
        tables += [(nn.modules.module, kind) for kind in GLOBAL_FORWARD_HOOKS]
        found = [(id(holder), kind, hooks) for holder, kind in tables if (hooks := vars(holder)[kind])]
        self._tables = [each for each in found if not all(map(is_ours, each[2].values()))]
        self._take_part: set[tuple[int, str, int]] = set()

    @property
    def are_there(self) -> bool:
        return bool(self._tables)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of the first run, in which it is seen what hooks do."""
        with self._replaced(self._watching):
            yield

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which hooks that only look on are not there."""
        with self._replaced(self._needed):
            yield

    @contextmanager
    def _replaced(self, made: Callable[[Any, str, Any], dict[int, Any]]) -> Iterator[None]:
        # in place: who registers or removes a hook meanwhile has this very table
        before = [(table, dict(table), made(holder, kind, table)) for holder, kind, table in self._tables]
        try:
            for table, _, others in before:
                _fill(table, others)
            yield
        finally:
            for table, hooks, others in before:
                removed = others.keys() - table.keys()
                added = {key: hook for key, hook in table.items() if key not in others}
                _fill(table, {key: hook for key, hook in hooks.items() if key not in removed} | added)

    def _watching(self, holder: int, kind: str, hooks: Any) -> dict[int, Any]:
        return {key: self._watched(hook, (holder, kind, key)) for key, hook in hooks.items()}

    def _needed(self, holder: int, kind: str, hooks: Any) -> dict[int, Any]:
        return {key: hook for key, hook in hooks.items() if (holder, kind, key) in self._take_part}

    def _watched(self, hook: Any, name: tuple[int, str, int]) -> Any:
        if _is_of_an_engine(hook):
            self._take_part.add(name)
            return hook

        @functools.wraps(hook)  # it stays the user's for who looks at the table meanwhile
        def watched(module: nn.Module, *given: Any) -> Any:
            before = _looks_of(module, given)
            result = hook(module, *given)
            if result is not None or _looks_of(module, given) != before:
                self._take_part.add(name)
            return result

        return watched


def _fill(table: Any, hooks: dict[int, Any]) -> None:
    table.clear()
    table.update(hooks)


def _is_of_an_engine(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return hasattr(hook, "in_use") or is_ours(hook) or str(home).startswith(_OF_ENGINES)


def _looks_of(module: nn.Module, given: Any) -> tuple[Any, ...]:
    tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and not leaf.is_inference())
    return (
        [(name, id(value)) for name, value in vars(module).items()],
        [(id(tensor), tensor._version, tensor.requires_grad) for tensor in tensors],
    )
