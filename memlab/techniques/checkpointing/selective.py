"""Results of one run that are kept for running it again: products of matrices, convolutions and attention.

Beside torch's own contexts for this, a result that something writes to after it was made (an activation in place) is
computed again instead of refused, and a graph can be used twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memlab.plan.settings.checkpointing import SELECTIVE_KEEPS
from memlab.runtime.dispatch import WatchingMode, written_by
from memlab.runtime.lifetimes import storage_of
from memlab.techniques.checkpointing.kept import storages

KEPT_OPERATIONS = frozenset(
    getattr(packet, name)
    for packet in (getattr(torch.ops.aten, name) for name in SELECTIVE_KEEPS)
    for name in packet.overloads()
)


_By = tuple[Any, list[Any]]  # an operator, and the shapes it was given


class Products:
    """The results of one run, in order."""

    def __init__(self) -> None:
        # each with what it was made by, and the versions its tensors had; None when used
        self._results: list[tuple[Any, _By, list[int]] | None] = []

    def __len__(self) -> int:
        return len(self._results)

    def add(self, result: Any, by: _By) -> None:
        """Keep the next result."""
        self._results.append((result, by, _versions(result)))

    def drop_from(self, place: int) -> None:
        """Forget the results from a place on: of what will not run again."""
        del self._results[place:]

    def drop_written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget results that an operator writes to; versions of what is chunked unsafely, as in recurrent layers, do not tell."""
        written = {storage_of(tensor) for tensor in tensors}
        for place, kept in enumerate(self._results) if written else ():
            if kept is not None and not written.isdisjoint(storages(tree_leaves(kept[0]))):
                self._results[place] = None

    def take(self, place: int, by: _By) -> Any:
        """The result of a place; None when it is another operator's, has been used, or written to since."""
        if place >= len(self._results):
            return None
        # let go of as it is used, so that memory falls while the backward pass goes through the part
        kept, self._results[place] = self._results[place], None
        return None if kept is None or kept[1] != by or _versions(kept[0]) != kept[2] else kept[0]

    def keeping(self) -> AbstractContextManager[Any]:
        """Return the context of the run."""
        return _Keeping(self)

    def giving(self) -> AbstractContextManager[Any]:
        """Return the context of running it again."""
        return _Giving(self)


class _Keeping(WatchingMode):
    def __init__(self, products: Products) -> None:
        super().__init__()
        self._products = products

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._products.drop_written(written_by(func, args, kwargs))
        result = func(*args, **kwargs)
        if func in KEPT_OPERATIONS:
            # a result itself gets a graph, which would hold what holds it
            kept = tree_map(_without_graph, result)
            self._products.add(kept, _made_by(func, args))
        return result


class _Giving(WatchingMode):
    def __init__(self, products: Products) -> None:
        super().__init__()
        self._products = products
        self._place = 0

    def __enter__(self) -> Any:
        self._place = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in KEPT_OPERATIONS:
            kept = self._products.take(self._place, _made_by(func, args))
            self._place += 1
            if kept is not None:
                return kept
        return func(*args, **kwargs)


def _made_by(func: Any, args: tuple[Any, ...]) -> _By:
    return func, [arg.shape if isinstance(arg, torch.Tensor) else None for arg in args]


def _without_graph(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # beneath autograd an alias has a count of writes of its own, unless told to share it
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(kept: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)]
