"""`Sharing`: which tensors of a split call are one and the same, were there before it, or are views of one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Sharing:
    """Identity of tensors that a call returns and leaves, and memory that they share. What held in every micro-batch holds for the batch.

    Views are told of a contiguous tensor among them, of which they take the same part in each row.
    """

    def __init__(self) -> None:
        self._twins: dict[int, int] = {}  # by position, that of the first leaf that is the same tensor
        self._known: dict[int, torch.Tensor] = {}  # by position, what was there before the call
        self._views: dict[int, _View] = {}
        self._is_first = True

    @property
    def positions(self) -> set[int]:
        """Positions of the tensors that are others."""
        return {*self._twins, *self._known}

    def note(self, leaves: Sequence[Any], before: Mapping[int, torch.Tensor]) -> None:
        """Note what one micro-batch gave, before it is changed; `before` has what tensors from before the call are for the batch, by `id`."""
        tensors = {position: id(leaf) for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        first: dict[int, int] = {}
        twins = {i: first[key] for i, key in tensors.items() if first.setdefault(key, i) != i and key not in before}
        known = {i: before[key] for i, key in tensors.items() if key in before}
        views = _views({i: leaves[i] for i in tensors if i not in twins and i not in known})
        if self._is_first:
            self._twins, self._known, self._views, self._is_first = twins, known, views, False
        self._twins = {i: of for i, of in self._twins.items() if twins.get(i) == of}
        self._known = {i: tensor for i, tensor in self._known.items() if known.get(i) is tensor}
        self._views = {i: view for i, view in self._views.items() if views.get(i) == view}

    def apply(self, leaves: list[Any]) -> None:
        """Put what they are in place of the leaves of the batch."""
        for position, (of, dim, stride, start) in self._views.items():
            leaf, base = leaves[position], leaves[of]
            covers = leaf.size(dim) * stride[dim] == base.numel() and base.is_contiguous()
            if covers and type(base) is type(leaf) is torch.Tensor and base.requires_grad >= leaf.requires_grad:
                base = base if leaf.requires_grad else base.detach()
                leaves[position] = base.as_strided(leaf.shape, stride, base.storage_offset() + start)
        for position, tensor in self._known.items():
            leaves[position] = tensor
        for position, of in self._twins.items():
            leaves[position] = leaves[of]


# position of what it is a view of, the dimension of rows, strides, and how far into that it begins
_View = tuple[int, int, tuple[int, ...], int]


def _views(tensors: Mapping[int, Any]) -> dict[int, _View]:
    strided = {i: each for i, each in tensors.items() if type(each) is torch.Tensor and each.layout is torch.strided}
    strided = {i: each for i, each in strided.items() if not (each.is_conj() or each.is_neg())}
    largest: dict[tuple[int, torch.dtype], int] = {}
    for i in sorted(strided, key=lambda i: -strided[i].numel()):
        if strided[i].is_contiguous() and strided[i].dim():
            largest.setdefault((strided[i].untyped_storage()._cdata, strided[i].dtype), i)
    found = {}
    for i, view in strided.items():
        of = largest.get((view.untyped_storage()._cdata, view.dtype), i)
        start = int(view.storage_offset() - strided[of].storage_offset())
        rows = [d for d in range(view.dim()) if view.size(d) * view.stride(d) == strided[of].numel()]
        end = start + sum((view.size(d) - 1) * view.stride(d) for d in range(view.dim()) if d not in rows)
        if of != i and start >= 0 and len(rows) == 1 and end < view.stride(rows[0]):
            found[i] = of, rows[0], view.stride(), start
    return found
