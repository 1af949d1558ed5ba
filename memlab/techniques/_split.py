"""Splitting a model call into micro-batches, and finding out how their losses add up.

A batch may be dimension 0 or 1 of its tensors; a loss may be a mean over rows, a mean over targets
that are not ignored, a sum, or a sum that the loop has divided already. None of this is written on
the model, so it is *probed*: a few rows are run together and apart, in eval mode and without
gradients, and the rule that puts the parts together to the whole is kept. Models that no rule fits
are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memlab.errors import RefusalError
from memlab.techniques._autocast import without_autocast

_IGNORED_TARGET = -100
_FIELD = "accumulation"
# relative difference up to which two results count as equal: in fp32, and in half precision
_TOLERANCE = 1e-4
_LOW_TOLERANCE = 3e-2
# columns of the probe's outputs that are compared; more than the rows it looks at, should those be the last dimension
_MOST_COLUMNS = 256
# losses of the probe's parts that are closer than this, relatively, tell little about how they add up
_ALIKE = 0.1
# rows among which the probe then looks for unlike ones
_FEW_ROWS = 8
_HALF_DTYPES = (torch.float16, torch.bfloat16)


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


class Probe:
    """Finds, for one model, how calls split and how scalars add up; remembers what it learnt.

    Args:
        model: the model whose calls are split. It is run through its own `forward`, in eval mode.
        name: how errors call it.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model = model
        self._name = name
        # by kind of call
        self._layouts: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}
        self._rules: dict[tuple[Any, ...], dict[int, list[LossRule]]] = {}
        self._joins: dict[tuple[Any, ...], tuple[int | None, ...]] = {}

    def layout(self, call: Call) -> Layout:
        """How this call splits.

        Raises:
            RefusalError: no tensor with a batch dimension, or rows that depend on each other.
        """
        known = self._layouts.get(call.kind)
        if known is not None:
            dim, split = known
            return Layout(call.leaves[split[0]].size(dim), dim, split)
        candidates = layouts_of(call)
        if not candidates:
            raise RefusalError(
                _FIELD, f"the call of {self._name} has no tensor argument to split", "pass the batch as tensors"
            )
        for layout in candidates:
            if layout.rows >= 2 and self._fits(call, layout):
                self._layouts[call.kind] = (layout.dim, layout.split)
                return layout
        if candidates[0].rows < 2:
            return candidates[0]
        raise RefusalError(
            _FIELD,
            f"rows of a batch depend on each other in {self._name}: run apart they give another result than together",
            "use --checkpoint or --offload activations, which keep the batch whole",
        )

    def joins(self, call: Call) -> tuple[int | None, ...]:
        """For each output, the dimension along which parts are joined; None for scalars and shared values."""
        return self._joins[call.kind]

    def weights(self, call: Call, layout: Layout, parts: Sequence[Call]) -> dict[int, list[float]]:
        """For each scalar output with a rule, the weight of each part's value in the batch's.

        Raises:
            RefusalError: no rule makes the parts' losses add up to the batch's.
        """
        known = self._rules.get(call.kind)
        if known is None or not all(
            _agree([rule.weights(parts, layout) for rule in rules]) for rules in known.values()
        ):
            known = self._matching(call, layout, known)
            if not all(known.values()):  # a loss over no target: there is nothing to learn from it
                return {position: [0.0] * len(parts) for position in known}
            self._rules[call.kind] = known
        return {position: rules[0].weights(parts, layout) for position, rules in known.items()}

    def _fits(self, call: Call, layout: Layout) -> bool:
        """Whether outputs of rows run apart are those of rows run together."""
        try:
            whole, parts = self._look(call, layout, range(min(layout.rows, 3)))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        joins: list[int | None] = []
        for i, leaf in enumerate(whole.leaves):
            if i in whole.scalars or not isinstance(leaf, torch.Tensor):
                joins.append(None)
                continue
            pieces = [part.leaves[i] for part in parts]
            joins.append(_joining_dim(leaf, pieces, self._tolerance))
            if joins[-1] is None and not all(_close(piece, leaf, self._tolerance) for piece in pieces):
                return False
        self._joins[call.kind] = tuple(joins)
        return True

    def _matching(
        self, call: Call, layout: Layout, known: dict[int, list[LossRule]] | None
    ) -> dict[int, list[LossRule]]:
        every = loss_rules(call, layout)
        rows = self._telling_rows(call, layout, every)
        found, outputs = self._holding(call, layout, rows, lambda position: (known or {}).get(position, every))
        if found.get(outputs[0].loss) and _alike(outputs):
            # nearly the same loss in both parts: almost any function of it would do, so look at rows that differ
            rows = self._unlike_rows(call, layout)
            found, outputs = self._holding(call, layout, rows, lambda position: found.get(position, []))
        whole = outputs[0]
        if whole.loss >= 0 and whole.loss not in found:
            if whole.leaves[whole.loss].isnan():
                return {whole.loss: []}
            raise RefusalError(
                _FIELD,
                f"the loss of {self._name} is not a mean or sum over rows or targets, so micro-batches cannot give its gradient",
                "let the loop compute the loss from the outputs (any loss works then), or use --checkpoint",
            )
        return found

    def _holding(
        self, call: Call, layout: Layout, rows: Sequence[int], candidates: Callable[[int], list[LossRule]]
    ) -> tuple[dict[int, list[LossRule]], list[Outputs]]:
        """The rules that hold for the first of these rows and the others, and what was run: together, apart."""
        parts = [layout.pick(call, rows[:1]), layout.pick(call, rows[1:])]
        whole, outputs = self._look(call, layout, rows)
        found: dict[int, list[LossRule]] = {}
        for position in whole.scalars:
            rules = candidates(position)
            holding = _closest(
                rules,
                [rule.weights(parts, layout) for rule in rules],
                [float(output.leaves[position]) for output in outputs],
                float(whole.leaves[position]),
                self._tolerance,
            )
            if holding:
                found[position] = holding
        return found, [whole, *outputs]

    def _unlike_rows(self, call: Call, layout: Layout) -> list[int]:
        """The two rows whose losses are furthest apart, of the first few."""
        losses = []
        with quietly(self._model):
            for row in range(min(layout.rows, _FEW_ROWS)):
                outputs = Outputs.of(self._widened(layout.pick(call, [row])).run(self._model.forward))
                losses.append((float(outputs.leaves[outputs.loss]), row))
        ordered = sorted((loss, row) for loss, row in losses if math.isfinite(loss))
        return [ordered[0][1], ordered[-1][1]]

    def _telling_rows(self, call: Call, layout: Layout, rules: list[LossRule]) -> list[int]:
        """Up to three rows that differ most in their targets, so that the probe can tell rules apart."""
        rows = [layout.take(call, row, row + 1) for row in range(min(layout.rows, 64))]
        for rule in rules:
            if rule.leaf < 0 or rule.counts_ones:
                continue
            counts = rule.counts(rows, layout)
            order = sorted((row for row in range(len(rows)) if counts[row]), key=lambda row: counts[row])
            if len(order) == 1:  # the only row with a target, and any other
                return [order[0], 1 if order[0] == 0 else 0][: len(rows)]
            if len(order) >= 2 and counts[order[0]] != counts[order[-1]]:
                return [order[0], *order[-2:]] if len(order) >= 3 else order
        return list(range(min(layout.rows, 3)))

    def _look(self, call: Call, layout: Layout, rows: Sequence[int]) -> tuple[Outputs, list[Outputs]]:
        call = self._widened(call)
        with quietly(self._model):
            together, *apart = (
                _sampled(Outputs.of(layout.pick(call, some).run(self._model.forward)))
                for some in (rows, rows[:1], rows[1:])
            )
        return together, apart

    def _widened(self, call: Call) -> Call:
        return call if self._has_half_parameters else call.with_leaves([_widened(leaf) for leaf in call.leaves])

    @property
    def _has_half_parameters(self) -> bool:
        return any(p.dtype in _HALF_DTYPES for p in self._model.parameters())

    @property
    def _tolerance(self) -> float:
        # Accelerate's mixed precision runs inside forward and keeps the original beside it
        low = self._has_half_parameters or "_original_forward" in self._model.__dict__
        return _LOW_TOLERANCE if low else _TOLERANCE


def _sampled(outputs: Outputs) -> Outputs:
    """The same outputs, wide ones cut short along their last dimension.

    Comparing them needs no more, and the logits of three rows may be larger than a whole micro-batch.
    """
    return replace(outputs, leaves=tuple(_cut_short(leaf) for leaf in outputs.leaves))


def _cut_short(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2 or leaf.size(-1) <= _MOST_COLUMNS:
        return leaf
    return leaf.narrow(-1, 0, _MOST_COLUMNS).clone()


def _widened(leaf: Any) -> Any:
    """An input that Fabric has cast for a model under autocast, as the probe without autocast needs it."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF_DTYPES else leaf


def _closest(
    rules: list[LossRule], weightings: list[list[float]], values: list[float], target: float, tolerance: float
) -> list[LossRule]:
    """The rules whose weighted sum meets the target: the best one, and those that are as good."""
    size = max(abs(target), *(abs(value) for value in values), 1e-6)
    errors = [
        abs(sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) - target) / size
        for weights in weightings
    ]
    bound = min(tolerance, 10 * min(errors) + 1e-6)
    return [rule for rule, error in zip(rules, errors, strict=True) if error <= bound]


def _alike(outputs: Sequence[Outputs]) -> bool:
    """Whether the losses of the parts are near each other; not when they are the same, as those of a twin are."""
    _, one, other = (float(output.leaves[output.loss]) for output in outputs)
    return 0 < abs(one - other) < _ALIKE * max(abs(one), abs(other))


def _agree(weightings: list[list[float]]) -> bool:
    first = weightings[0]
    return all(abs(a - b) <= 1e-9 for weights in weightings[1:] for a, b in zip(first, weights, strict=True))


def _joining_dim(whole: torch.Tensor, parts: list[torch.Tensor], tolerance: float) -> int | None:
    for dim in range(whole.dim()):
        if sum(part.size(dim) for part in parts if part.dim() > dim) != whole.size(dim):
            continue
        try:
            joined = torch.cat(parts, dim)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        if _close(joined, whole, tolerance):
            return dim
    return None


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    size = float(torch.where(b.isfinite(), b, torch.zeros_like(b)).abs().max()) if b.numel() else 1.0
    return bool(torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance * max(size, 1e-6), equal_nan=True))


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and random numbers as they were, for a look at the model's outputs."""
    training = [module for module in model.modules() if module.training]
    devices = list({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), without_autocast():
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True
