"""`Agreement`: what rows together give, held against what they give apart; what may differ is rule 3 of `judge`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from memlab.runtime.aliases import KEEP_WHOLE
from memlab.runtime.containers import Effect
from memlab.runtime.lazy import real
from memlab.runtime.tree import flatten, runs_later
from memlab.techniques.accumulation.merge import (
    Chain,
    Join,
    Merge,
    close,
    distance,
    equal,
    first_difference,
    found_merge,
    why_apart,
)
from memlab.techniques.accumulation.rounding import TIMES, is_switched
from memlab.techniques.accumulation.split import Outputs
from memlab.techniques.accumulation.verdict import Left

# a gradient smaller than this share of the largest one need not be known better than that one
_LEAST_SHARE = 5e-2
# share of a gradient's size that may be rounding
_MOST_ROUNDING = 0.2


class DisagreementError(Exception):
    """Rows apart give something else than rows together.

    Args:
        reason: what, in words.
        instead: what can be done.
    """

    def __init__(self, reason: str, instead: str = KEEP_WHOLE) -> None:
        super().__init__(reason)
        self.reason, self.instead = reason, instead


class OtherResultsError(DisagreementError):
    """What they give was compared, and is not the same."""


class Agreement:
    """Comparisons of one batch together with its parts; each raises `DisagreementError`."""

    def __init__(self, name: str, rows: Sequence[int], joins: Sequence[Join | None], tolerance: float) -> None:
        self._name = name  # what errors call the model
        self._rows = rows  # of each part
        # for each output where it is joined, as the probe has found; None or missing where it has not
        self._joins = joins
        self.tolerance = tolerance  # share by which values may differ

    def structure(self, part: Outputs, whole: Outputs) -> None:
        """Compare what a part returns and leaves with what the whole does, by names."""
        if part.spec == whole.spec:
            return
        names = {*map(whole.name_of, range(len(whole.leaves)))} ^ {*map(part.name_of, range(len(part.leaves)))}
        what = ", ".join(sorted(names)[:3]) or "its type"
        differ(f"what {self._name} returns or leaves behind has another structure for some rows than for all ({what})")

    def outputs(
        self,
        whole: Outputs,  # of the rows together
        parts: Sequence[Outputs],  # of the rows apart
        weights: Mapping[int, list[float]],  # for each scalar output that has a rule, one weight per part
        rounded: Callable[[], Outputs],  # gives those of the rows together, rounded differently
    ) -> dict[int, Merge]:
        """Compare outputs. Returns how outputs that are neither joined nor weighted are put together, by position."""
        merges: dict[int, Merge] = {}
        for i in range(whole.returned):
            leaf, pieces = whole.leaves[i], [part.leaves[i] for part in parts]
            if i in weights:
                together = sum(piece * share for piece, share in zip(pieces, weights[i], strict=True) if share)
                apart = _number(together) - _number(leaf)
                size = max(abs(_number(p)) for p, s in zip([leaf, *pieces], [1.0, *weights[i]], strict=True) if s)
                if (
                    not abs(apart) <= self.tolerance * size
                    and _number(leaf) == _number(leaf)
                    and not abs(apart) <= TIMES * abs(_number(rounded().leaves[i]) - _number(leaf))
                ):
                    self._refuse_loss(whole, i, abs(apart) / size)
                continue
            known = self._known_join(i)
            if (
                known is not None
                and isinstance(leaf, torch.Tensor)
                and close(Merge("join", known).value(None, pieces, self._rows), leaf, self.tolerance)
            ):
                continue
            merge = found_merge(None, pieces, leaf, self._rows, self.tolerance)
            if merge is None:
                self._refuse_output(whole, i, pieces)
            merges[i] = merge
        return merges

    def _refuse_loss(self, whole: Outputs, position: int, share: float) -> NoReturn:
        what = "the loss" if position == whole.loss else whole.name_of(position)
        differ(
            f"{what} of {self._name} is not a mean or sum over rows or targets, so micro-batches cannot give its gradient: "
            f"together they are {share:.2g} off (allowed {self.tolerance:.0e})",
            "let the loop compute the loss from the outputs (any loss works then), or use --checkpoint",
        )

    def _refuse_output(self, whole: Outputs, position: int, pieces: Sequence[Any]) -> NoReturn:
        leaf, name = whole.leaves[position], whole.name_of(position)
        if runs_later(leaf):
            differ(f"{name} of {self._name} is a {type(leaf).__name__}, which computes when the loop uses it")
        if not isinstance(leaf, torch.Tensor):
            other = next((piece for piece in pieces if not equal(leaf, piece)), pieces[0])
            place, here, there = first_difference(leaf, other) or ("", leaf, other)
            differ(f"{name}{place} of {self._name} is {here!r} for the whole batch and {there!r} for a micro-batch")
        if position in whole.scalars:
            self._refuse_loss(whole, position, self._off(pieces, leaf, Merge("mean")))
        known = self._known_join(position)
        differ(*why_apart(name, self._name, leaf, pieces, self._rows, known or Join(0), self.tolerance))

    def _off(self, pieces: Sequence[Any], leaf: torch.Tensor, merge: Merge) -> float:
        try:
            value = merge.value(None, [real(piece).detach() for piece in pieces], self._rows)
            return distance(value, leaf)
        except (RuntimeError, IndexError):
            return float("inf")

    def left(self, whole: Mapping[str, Effect], parts: Sequence[Mapping[str, Effect]]) -> dict[str, Left]:
        """Compare what is left beside the output; return how it is put together, by name."""
        left: dict[str, Left] = {}
        for name in {**whole, **{name: None for part in parts for name in part}}:
            present = [part.get(name) for part in parts]
            effect = whole.get(name)
            if effect is None or any(each is None for each in present):
                differ(f"{self._name} changes {name} for some rows of a batch and not for others")
            left[name] = self._left_at(name, effect, [each for each in present if each is not None])
        return left

    def _left_at(self, name: str, whole: Effect, parts: Sequence[Effect]) -> Left:
        values = [part.value for part in parts]
        if isinstance(whole.value, Chain) and all(isinstance(value, Chain) for value in values):
            if all(len(value.items) == len(whole.value.items) for value in values):
                merges = self._merges(name, None, [[*value.items] for value in values], [*whole.value.items])
                return Left(merges)
            if equal(Chain.of(values, None, self._rows), whole.value):
                return Left(None)
        leaves, structure = flatten(whole.value)
        flat = [flatten(value) for value in values]
        if any(spec != structure for _, spec in flat) or any(part.kind != whole.kind for part in parts):
            differ(f"{name} of {self._name} holds another number of things after a split batch than after a whole one")
        before, before_structure = flatten(whole.before)
        known = before if before_structure == structure and whole.kind != "appended" else None
        return Left(self._merges(name, known, [leaves for leaves, _ in flat], leaves))

    def _merges(
        self, name: str, before: Sequence[Any] | None, parts: Sequence[Sequence[Any]], whole: Sequence[Any]
    ) -> tuple[Merge, ...]:
        merges = []
        for i, leaf in enumerate(whole):
            pieces = [leaves[i] for leaves in parts]
            merge = found_merge(before[i] if before else None, pieces, leaf, self._rows, self.tolerance)
            if merge is None:
                how = ""
                if isinstance(leaf, torch.Tensor) and all(piece.shape == leaf.shape for piece in pieces):
                    how = f", {self._off(pieces, leaf, Merge('mean')):.2g} of its size away (allowed {self.tolerance:.0e})"
                differ(
                    f"{name} of {self._name} cannot be put together from micro-batches: a whole batch leaves another value{how}"
                )
            merges.append(merge)
        return tuple(merges)

    def gradients(
        self,
        residuals: Sequence[float],  # norm of the difference, for each parameter
        sizes: Sequence[float],  # norm of the gradient or of its largest partial sum, likewise
        rounded: Callable[[], Sequence[float]],  # gives by how much gradients differ with noise on products
        strongly: Callable[[], Sequence[float]],  # the same with strong noise
        name_of: Callable[[int], str],  # tells the name of a parameter
    ) -> None:
        """Compare gradients of parameters."""
        largest = max((size for size in sizes if size == size), default=0.0)
        # by the number of the parameter: the difference, and what it is a share of
        off: dict[int, tuple[float, float]] = {}
        for number, (residual, size) in enumerate(zip(residuals, sizes, strict=True)):
            scale = max(size, _LEAST_SHARE * largest)
            if size != size or size == float("inf") or not scale:  # the model's own answer is not finite
                continue
            share = residual / scale if residual == residual else float("inf")
            if share > self.tolerance:
                off[number] = share, scale
        if off and max(share for share, _ in off.values()) < _MOST_ROUNDING:
            little = rounded()
            off = {number: each for number, each in off.items() if not math.prod(each) <= TIMES * little[number]}
            much = strongly() if off else []
            off = {n: each for n, each in off.items() if not is_switched(math.prod(each), little[n], much[n])}
        if off:
            worst = max(off, key=lambda number: off[number])
            differ(
                f"the gradient of {self._name} by {name_of(worst)} is {off[worst][0]:.2g} of its size off when the batch is split "
                f"(allowed {self.tolerance:.0e}): rows of a batch depend on each other"
            )

    def inputs(self, whole: Sequence[Any], parts: Sequence[Sequence[Any]]) -> None:
        """Compare gradients of inputs."""
        for i, gradient in enumerate(whole):
            pieces = [part[i] for part in parts]
            if gradient is None or any(piece is None for piece in pieces):
                continue
            tolerance = max(self.tolerance, 1e-4)
            merge = found_merge(None, pieces, gradient, self._rows, tolerance)
            if merge is None and close(sum(pieces), gradient, tolerance) is False:
                differ(f"the gradient by an input of {self._name} is another one when the batch is split")

    def join_of(self, position: int, part: torch.Tensor, whole: torch.Tensor) -> Join:
        """Return where an output is joined, by the shapes of a part and of the whole where the probe does not know."""
        known = self._known_join(position)
        if known is not None:
            return known
        rows, total = self._rows[0], sum(self._rows)
        fitting = [d for d in range(whole.dim()) if whole.size(d) != part.size(d) and part.dim() == whole.dim()]
        fitting = [d for d in fitting if part.size(d) * total == whole.size(d) * rows] or fitting
        if not fitting:
            differ(*why_apart(f"output {position}", self._name, whole, [part], self._rows[:1], Join(0), self.tolerance))
        return Join(fitting[0])

    def _known_join(self, position: int) -> Join | None:
        return self._joins[position] if position < len(self._joins) else None


def differ(reason: str, instead: str = KEEP_WHOLE) -> NoReturn:
    """Say that rows apart give something else. Raises `OtherResultsError`: always."""
    raise OtherResultsError(reason, instead)


def refuse(reason: str, instead: str = KEEP_WHOLE) -> NoReturn:
    """Say that a batch cannot be split. Raises `DisagreementError`: always."""
    raise DisagreementError(reason, instead)


def _number(value: Any) -> float:
    return float(real(value).detach()) if isinstance(value, torch.Tensor) else float(value)
