"""Splitting a model call into micro-batches: calls, layouts, outputs and the rules by which losses may add up.

A batch may be dimension 0 or 1 of its tensors; a loss may be a mean over rows, a mean over targets
that are not ignored, a sum, or a sum that the loop has divided already. None of this is written on
the model, so it is *probed* (`_probe.py`): a few rows are run together and apart, in eval mode and without
gradients, and the rule that puts the parts together to the whole is kept. Models that no rule fits
are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_IGNORED_TARGET = -100


@dataclass(frozen=True)
class Call:
    """Arguments of a model call, flattened."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = tree_flatten((args, kwargs))
        return cls(tuple(leaves), spec)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two calls have in common that split alike: the same arguments, the same ones of them tensors."""
        return self.spec, tuple(leaf.dim() if isinstance(leaf, torch.Tensor) else -1 for leaf in self.leaves)

    def run(self, call: Callable[..., Any]) -> Any:
        args, kwargs = tree_unflatten(list(self.leaves), self.spec)
        return call(*args, **kwargs)

    def with_leaves(self, leaves: Sequence[Any]) -> Call:
        return Call(tuple(leaves), self.spec)


@dataclass(frozen=True)
class Layout:
    """Which leaves of a call hold rows of the batch, and along which dimension.

    Args:
        rows: rows of the batch.
        dim: dimension of the batch in every split leaf.
        split: positions of the leaves that are split; the others go whole into every micro-batch.
    """

    rows: int
    dim: int
    split: tuple[int, ...]

    def take(self, call: Call, start: int, stop: int) -> Call:
        return call.with_leaves(
            [
                leaf.narrow(self.dim, start, stop - start) if i in self.split else leaf
                for i, leaf in enumerate(call.leaves)
            ]
        )

    def pick(self, call: Call, rows: Sequence[int]) -> Call:
        def picked(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.index_select(self.dim, torch.tensor(rows, device=leaf.device))

        return call.with_leaves([picked(leaf) if i in self.split else leaf for i, leaf in enumerate(call.leaves)])


def layouts_of(call: Call) -> list[Layout]:
    """The ways a call could be split, likeliest first: along dimension 0, then along 1.

    A square matrix among them may be a mask over positions that is as large as the batch by chance: each way
    is followed by one that leaves such matrices whole.
    """
    found = []
    for dim in (0, 1):
        sizes = [
            (i, leaf.size(dim))
            for i, leaf in enumerate(call.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > dim
        ]
        if sizes:
            rows = max(size for _, size in sizes) if dim else sizes[0][1]
            split = tuple(i for i, size in sizes if size == rows)
            found.append(Layout(rows, dim, split))
            without_squares = tuple(i for i in split if i == split[0] or call.leaves[i].shape != (rows, rows))
            if without_squares != split:
                found.append(Layout(rows, dim, without_squares))
    return found


def row_ranges(rows: int, parts: int) -> list[tuple[int, int]]:
    """Cut rows into parts whose sizes differ by one at most.

    Example:
        >>> row_ranges(7, 3)
        [(0, 3), (3, 5), (5, 7)]
    """
    size, larger = divmod(rows, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(starts))


@dataclass(frozen=True)
class LossRule:
    """How the losses of micro-batches make the loss of the batch: a weight for each.

    Args:
        name: "rows", "sum", or what is counted in which leaf.
        leaf: position of the leaf that is counted, or -1.
        shifted: the first position of each row is not counted (next-token targets).
        counts_ones: count what is not zero (a mask) instead of what is not ignored.
    """

    name: str
    leaf: int = -1
    shifted: bool = False
    counts_ones: bool = False

    def counts(self, parts: Sequence[Call], layout: Layout) -> list[float]:
        """What each part weighs, before dividing by the total; one transfer for all parts."""
        if self.leaf < 0:
            return [float(part.leaves[layout.split[0]].size(layout.dim)) for part in parts]
        counted = [self._count(part.leaves[self.leaf]) for part in parts]
        return [float(count) for count in torch.stack(counted).tolist()]

    def _count(self, leaf: torch.Tensor) -> torch.Tensor:
        considered = leaf[..., 1:] if self.shifted else leaf
        return (considered != 0).sum() if self.counts_ones else (considered != _IGNORED_TARGET).sum()

    def weights(self, parts: Sequence[Call], layout: Layout) -> list[float]:
        if self.name == "sum":
            return [1.0] * len(parts)
        counts = self.counts(parts, layout)
        total = sum(counts)
        return [count / total if total else 0.0 for count in counts]


def loss_rules(call: Call, layout: Layout) -> list[LossRule]:
    """Every rule that could hold for this call."""
    rules = [LossRule("rows"), LossRule("sum")]
    for position in layout.split:
        leaf = call.leaves[position]
        if leaf.is_floating_point() or leaf.is_complex():
            continue
        for shifted in (False, True) if leaf.dim() >= 2 else (False,):
            rules.append(LossRule("targets", position, shifted))
            rules.append(LossRule("mask", position, shifted, counts_ones=True))
    return rules


@dataclass(frozen=True)
class Outputs:
    """What a model returned, flattened, with the place of its loss.

    Args:
        leaves: tensors and other values, in order.
        spec: how to put them together again.
        loss: position of the loss, or -1 when there is none to build on.
        scalars: positions of all floating-point scalars.
    """

    leaves: tuple[Any, ...]
    spec: TreeSpec
    loss: int
    scalars: tuple[int, ...]

    @classmethod
    def of(cls, output: Any) -> Outputs:
        leaves, spec = tree_flatten(output)
        scalars = tuple(i for i, leaf in enumerate(leaves) if _is_scalar(leaf))
        return cls(tuple(leaves), spec, _loss_position(output, leaves, scalars), scalars)

    def without_tensors(self) -> Outputs:
        """The same structure holding no tensor, so that none is kept alive by it."""
        return replace(self, leaves=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves))

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        return tree_unflatten(list(leaves), self.spec)


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() == 1 and leaf.dim() <= 1


def _loss_position(output: Any, leaves: list[Any], scalars: tuple[int, ...]) -> int:
    named = output.get("loss") if isinstance(output, dict) else None
    if named is not None:
        return next((i for i in scalars if leaves[i] is named), -1)
    return scalars[0] if len(scalars) == 1 else -1
