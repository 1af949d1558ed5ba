"""`KnownVerdicts`: what the judge has said of calls, by their shape and the condition they are under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.runtime.tree import flatten
from memlab.techniques.accumulation.split import Call, Layout, row_ranges
from memlab.techniques.accumulation.verdict import SplitVerdict

Shape = tuple[Any, ...]
Verdict = SplitVerdict | RefusalError | None  # None where there was no memory for one

_MOST_ROWS_JUDGED = 8  # numbers of rows of one shape


@dataclass
class _Calls:
    """Calls of one shape."""

    # rows that belong together in groups may be split between groups and nowhere else, so each verdict holds for
    # parts of a multiple of so many rows
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    # numbers of rows that were judged after the first, and why such a batch is not split
    by_rows: dict[int, RefusalError | None] = field(default_factory=dict)
    starts: set[Any] = field(default_factory=set)  # what was in the places that they write to, see `start_of`
    count: int = 1  # of models that choose by values

    def known(self, grain: int) -> Verdict | tuple[()]:
        """Return what is known of parts of a multiple of so many rows; a tuple where nothing is."""
        fitting = (self.verdicts[of] for of in sorted(self.verdicts) if grain % of == 0)
        return next((each for each in fitting if not isinstance(each, RefusalError)), self.verdicts.get(grain, ()))

    def is_looked_at_again(self, known: SplitVerdict) -> bool:
        """Count a call; return whether it is the second, the fourth, the eighth of a model that chooses by values."""
        self.count += known.chooses
        return known.chooses and self.count.bit_count() == 1


@dataclass
class JudgedCall:
    """A call, and what is known of it."""

    verdict: Verdict | tuple[()]  # a tuple where it is to be judged
    before: SplitVerdict | None  # what is known where it is judged once more
    rows: int
    grain: int
    _calls: _Calls

    @property
    def starts(self) -> set[Any]:
        """Contents of the places that such calls write to, when they were judged."""
        return self._calls.starts

    def note_refusal(self, refusal: RefusalError) -> None:
        """Note that it cannot be split; where others of its shape can, this holds for its number of rows."""
        if self.before is None:
            self._calls.verdicts[self.grain] = refusal
        else:
            self._calls.by_rows[self.rows] = refusal

    def note_verdict(self, verdict: SplitVerdict | None) -> None:
        """Note a verdict."""
        self._calls.verdicts[self.grain] = verdict
        self._calls.by_rows[self.rows] = None


class KnownVerdicts:
    """Verdicts on calls of one model."""

    def __init__(self) -> None:
        self._by_shape: dict[Shape, _Calls] = {}

    def ask(self, shape: Shape, rows: int, grain: int) -> JudgedCall:
        """Return what is known of a call of so many rows, whose parts have a multiple of `grain` rows; it is counted."""
        calls = self._by_shape.setdefault(shape, _Calls())
        found = calls.known(grain)
        # a forward may ask how many rows there are
        is_new = rows not in calls.by_rows and len(calls.by_rows) < _MOST_ROWS_JUDGED
        found = calls.by_rows.setdefault(rows, None) or found
        if isinstance(found, SplitVerdict) and (is_new or calls.is_looked_at_again(found)):
            return JudgedCall((), found, rows, grain, calls)
        return JudgedCall(found, None, rows, grain, calls)

    def at(self, shape: Shape, asked: JudgedCall) -> JudgedCall:
        """Return the same call under a shape that is known by now."""
        return JudgedCall(
            asked.verdict, asked.before, asked.rows, asked.grain, self._by_shape.setdefault(shape, _Calls())
        )

    def forget(self, shape: Shape) -> None:
        """Have calls of a shape judged anew."""
        self._by_shape[shape].verdicts.clear()


def shape_of(model: nn.Module, whole: Call, layout: Layout, parts: int) -> Shape:
    """Return what decides, beside the condition, whether another judgement is needed: everything but the number of rows.

    Lengths count by powers of two: a loop whose batches are as long as their longest row would else be judged all the time.
    Of rows in lists it counts whether all parts are as long as the whole, to which a model may pad them.
    """
    dims, whole = dict(layout.dims), layout.view(whole)
    shapes = tuple(
        (leaf.dtype, leaf.requires_grad, *(size.bit_length() for dim, size in enumerate(leaf.shape) if dim != dims.get(i)))
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), layout.in_lists and i in dims and _are_alike(leaf, row_ranges(layout.rows, parts)))
        for i, leaf in enumerate(whole.leaves)
    )  # fmt: skip
    modes = hash(
        tuple(
            (
                type(module),
                module.training,
                *map(id, module._forward_hooks.values()),
                *map(id, module._forward_pre_hooks.values()),
            )
            for module in model.modules()
        )
    )
    trained = hash(tuple(parameter.requires_grad for parameter in model.parameters()))
    return whole.spec, shapes, layout.dims, modes, trained


def _are_alike(rows: Any, ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether in all parts of a list the largest and the smallest sizes of rows are those of the whole list."""
    if not isinstance(rows, (list, tuple)):
        return True
    sizes = [_sizes(row) for row in rows]
    return len({*map(len, sizes)}) == 1 and all(_extremes(sizes[slice(*span)]) == _extremes(sizes) for span in ranges)


def _sizes(row: Any) -> tuple[int, ...]:
    """Return the sizes of what a row consists of: of tensors, and of texts."""
    found: list[int] = []
    for leaf in flatten(row)[0]:
        found += leaf.shape if isinstance(leaf, torch.Tensor) else [len(leaf)] if isinstance(leaf, str) else []
    return tuple(found)


def _extremes(sizes: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    return [(min(each), max(each)) for each in zip(*sizes, strict=True)]
