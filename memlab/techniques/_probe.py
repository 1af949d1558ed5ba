"""Finding out how a model's batch splits, and how the losses of its parts add up, by looking at a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.shortage import is_out_of_memory
from memlab.techniques._autocast import without_autocast
from memlab.techniques._split import Call, Layout, LossRule, Outputs, layouts_of, loss_rules

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
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if is_out_of_memory(error):
                raise
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
            if 2 <= len(order) < len(rows):  # alike where they have targets, and some have none
                return [order[0], next(row for row in range(len(rows)) if not counts[row]), order[-1]]
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
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
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
