"""Hooks of modules within a part, and of every module: those that only look on run once, as they would without recomputation.

A hook takes part in the computation when it returns something, or changes its module or the tensors it is given (weight
norm, spectral norm); running the part again runs it again. Any other looks on: it collects features, counts or prints.

What a hook will do is told from what it did last, and until then it is taken for one that looks on. What such a hook computes
with a graph (a penalty on activations) keeps what it saves, as running the part again would not give it. Where
it takes part all the same, it runs again in this way; where one that took part only looks on, it runs again as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memlab.runtime.graphs import CHANGED, hooks_on_saved_tensors
from memlab.runtime.reach import GLOBAL_FORWARD_HOOKS
from memlab.runtime.stand_ins import is_ours
from memlab.techniques.checkpointing.selective import Products

_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
# where the engines are at home that memlab itself puts on models: their hooks bring parameters
_OF_ENGINES = ("deepspeed", "torch.distributed")


class PartHooks:
    """The hooks of modules in one run of a part."""

    def __init__(self, modules: Iterable[nn.Module], take_part: set[int]) -> None:
        tables: list[tuple[Any, str]] = [(module, kind) for module in modules for kind in (_BEFORE, _AFTER)]
        tables += [(nn.modules.module, kind) for kind in GLOBAL_FORWARD_HOOKS]
        found = [hooks for holder, kind in tables if (hooks := vars(holder)[kind])]
        self._tables = [each for each in found if not all(map(is_ours, each.values()))]
        self._took_part = take_part  # numbers of hooks that took part in their last run; kept up to date here
        self._saving = 0  # `id` of the hook on saved tensors around the part, which would hold this
        self._run_again: dict[int, bool] = {}  # by number, whether it keeps what it saves

    @property
    def are_there(self) -> bool:
        return bool(self._tables)

    @contextmanager
    def watched(self, products: Products | None = None) -> Iterator[None]:
        """Context of the first run, in which it is seen what hooks do; products of those that look on are not kept."""
        with self._replaced(functools.partial(self._watching, products)):
            yield

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which hooks that only look on are not there."""
        with self._replaced(self._needed):
            yield

    @contextmanager
    def _replaced(self, made: Callable[[Any], dict[int, Any]]) -> Iterator[None]:
        # in place: who registers or removes a hook meanwhile has this very table
        self._saving = _id_of_saving()
        before = [(table, dict(table), made(table)) for table in self._tables]
        try:
            for table, _, others in before:
                _fill(table, others)
            yield
        finally:
            for table, hooks, others in before:
                removed = others.keys() - table.keys()
                added = {key: hook for key, hook in table.items() if key not in others}
                _fill(table, {key: hook for key, hook in hooks.items() if key not in removed} | added)

    def _watching(self, products: Products | None, hooks: Any) -> dict[int, Any]:
        return {number: self._watched(hook, number, products) for number, hook in hooks.items()}

    def _needed(self, hooks: Any) -> dict[int, Any]:
        again = self._run_again
        return {n: self._keeping(hook) if again[n] else hook for n, hook in hooks.items() if n in again}

    def _keeping(self, hook: Any) -> Any:
        """Return a hook whose graph keeps what it saves, where the model does not see to that itself, as within a checkpoint of its own."""

        @functools.wraps(hook)
        def kept(*args: Any) -> Any:
            if _id_of_saving() != self._saving:
                return hook(*args)
            with torch.autograd.graph.saved_tensors_hooks(_saved, _unchanged):
                return hook(*args)

        return kept

    def _watched(self, hook: Any, number: int, products: Products | None) -> Any:
        if _is_of_an_engine(hook):
            self._run_again[number] = False
            return hook
        keeps = number not in self._took_part
        run = self._keeping(hook) if keeps else hook

        @functools.wraps(hook)  # it stays the user's for who looks at the table meanwhile
        def watched(module: nn.Module, *given: Any) -> Any:
            before, place = _Looks(module, given), len(products or ())
            result = run(module, *given)
            takes_part = result is not None or before.are_changed()
            (self._took_part.add if takes_part else self._took_part.discard)(number)
            if takes_part or not keeps:
                self._run_again[number] = keeps
            elif products is not None and number not in self._run_again:
                products.drop_from(place)
            return result

        return watched


def _id_of_saving() -> int:
    packing, *_ = hooks_on_saved_tensors() or (None,)
    return id(packing)


def _saved(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor.detach(), tensor._version


def _unchanged(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(CHANGED)
    return tensor


def _fill(table: Any, hooks: dict[int, Any]) -> None:
    table.clear()
    table.update(hooks)


def _is_of_an_engine(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return hasattr(hook, "in_use") or is_ours(hook) or str(home).startswith(_OF_ENGINES)


class _Looks:
    """Layout of a module and of the tensors it is given."""

    def __init__(self, module: nn.Module, given: Any) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        leaves = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and not leaf.is_inference())
        self._tensors = [(tensor, tensor._version, tensor.requires_grad) for tensor in leaves]

    def are_changed(self) -> bool:
        now, before = vars(self._module), self._attributes
        return (
            now.keys() != before.keys()
            or any(value is not before[name] for name, value in now.items())
            or any(each._version != version or each.requires_grad != had for each, version, had in self._tensors)
        )
