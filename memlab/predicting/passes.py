"""Passes of every size and setting, from as few traces as will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memlab.hardware.roofline import Bill, Rates
from memlab.plan import Checkpointing, Plan
from memlab.predicting.segments import (
    ACTIVATIONS,
    NOTHING,
    OUTSIDE,
    Levels,
    Segment,
    TracedPass,
    added,
    laid_beside,
    levels,
    segment_of,
)
from memlab.runtime.lazy import LAZY_FROM_BYTES
from memlab.trace.tracer import Trace, Tracer

_LEAST_ROWS_HALVED = 4


class Passes:
    """Forward and backward passes of one workload.

    Two traces with different numbers of rows serve all numbers of rows, where they are alike: the whole batch and
    half of it. Where they are not (a loss in tiles whose number grows with the batch, blocks chosen by what they
    keep), and for a single row, which is spared copies of transposed tensors, each number of rows is traced.
    """

    def __init__(self, tracer: Tracer, rates: Callable[[Plan], Rates]) -> None:
        self._tracer = tracer
        self._rates = rates
        self._traces: dict[tuple[Plan, int | None, bool, int | None], Trace] = {}
        self._own: dict[tuple[Plan, int, bool, int | None], TracedPass] = {}
        self._first: dict[tuple[Plan, int], Segment] = {}
        self._scalable: dict[Plan, TracedPass | None] = {}

    def whole(self, settings: Plan) -> Trace:
        return self._trace(settings, None, is_split=False)

    def segments(self, settings: Plan, sizes: Sequence[int]) -> list[Segment]:
        """The passes of a step."""
        if len(sizes) == 1:
            return [self.traced(settings, sizes[0], is_split=False).segment(sizes[0])]
        places = self._kept(settings)
        found = []
        for number, rows in enumerate(sizes):
            # blocks are chosen by what they keep of the largest micro-batch, which comes first
            traced = self.traced(settings, rows, is_split=True, after=sizes[0])
            kept = frozenset(traced.trace.outputs[place] for place in places)
            found.append(traced.segment(rows, accumulating=number > 0, kept=kept))
        return [*found, self._joined(settings)] if places else found

    def first(self, settings: Plan, rows: int, *, is_split: bool) -> Segment | None:
        """Return the first pass of all, where it decides how those after it are run; None where it is like them."""
        if not self.traced(settings, rows, is_split=is_split).trace.is_decided:
            return None
        key = (settings, rows)
        if key not in self._first:
            whole, use_cache = rows == self._rows, self._uses_cache(settings, is_split=is_split)
            trace = self._tracer.one_pass(settings, None if whole else rows, use_cache=use_cache, is_first=True)
            self._first[key] = segment_of(trace, self._rates(settings))
        return self._first[key]

    def notes(self, settings: Plan, rows: int) -> tuple[str, ...]:
        return self.traced(settings, rows, is_split=rows != self._rows).trace.notes

    def kept(self, settings: Plan) -> Levels:
        """Bytes, by category, of the outputs that a split batch keeps until its update."""
        whole, sizes = self.traced(without_budget(settings), self._rows, is_split=True), self._whole_outputs(settings)
        found = NOTHING
        for place in self._kept(settings):
            found = added(found, levels({whole.category_of(whole.trace.outputs[place]): sizes[place]}))
        return found

    def large_outputs_bytes(self, settings: Plan) -> int:
        """Bytes of the model's outputs that nothing but the loop keeps alive during backward."""
        whole = self.traced(settings, self._rows, is_split=False)
        return sum(whole.outputs_bytes(self._rows).values())

    def host_bytes(self, settings: Plan, rows: int) -> int:
        """Bytes kept off the device during a pass with so many rows."""
        return self.traced(settings, rows, is_split=rows != self._rows).host_bytes(rows)

    @property
    def _rows(self) -> int:
        return self.whole(Plan()).samples

    def _trace(self, settings: Plan, rows: int | None, *, is_split: bool, after: int | None = None) -> Trace:
        use_cache = self._uses_cache(settings, is_split=is_split)
        key = (settings, rows, use_cache, after)
        if key not in self._traces:
            self._traces[key] = self._tracer.one_pass(settings, rows, use_cache=use_cache, after=after)
        return self._traces[key]

    def _uses_cache(self, settings: Plan, *, is_split: bool) -> bool:
        # checkpointing switches the cache off as well
        return not (is_split and settings.checkpointing == "off" and self._tracer.uses_cache)

    def traced(self, settings: Plan, rows: int, *, is_split: bool, after: int | None = None) -> TracedPass:
        """Return what serves a pass with so many rows, of a larger batch where that `is_split`.

        Where calls before it matter, the one before had the rows `after`.
        """
        # a budget that serves the parts of a batch may be too small for the whole of it
        whole = self._trace(settings if rows == self._rows else without_budget(settings), None, is_split=is_split)
        if rows not in (1, whole.samples) and settings.checkpointing.budget_bytes is None:
            if settings not in self._scalable:
                self._scalable[settings] = self._laid_side_by_side(settings, whole)
            if (scalable := self._scalable[settings]) is not None:
                return scalable
        after = after if settings.checkpointing.budget_bytes is not None and after != rows else None
        key = (settings, rows, is_split, after)
        if key not in self._own:
            trace = whole if rows == whole.samples else self._trace(settings, rows, is_split=is_split, after=after)
            self._own[key] = TracedPass(self._rates(settings), trace, rows)
        return self._own[key]

    def _laid_side_by_side(self, settings: Plan, whole: Trace) -> TracedPass | None:
        rows = whole.samples
        other_rows = rows // 2 if rows >= _LEAST_ROWS_HALVED else 2 * rows
        trace = self._trace(settings, other_rows, is_split=True)
        # a batch of which some tensors are not split has the rows of those, whatever the others have
        other = laid_beside(whole, trace) if trace.samples != rows else None
        return None if other is None else TracedPass(self._rates(settings), whole, rows, other)

    def _whole_outputs(self, settings: Plan) -> list[int]:
        whole = self.traced(without_budget(settings), self._rows, is_split=True)
        sizes = whole.outputs_bytes(self._rows)
        return [sizes.get(number, 0) for number in whole.trace.outputs]

    def _kept(self, settings: Plan) -> list[int]:
        """Places of the outputs that micro-batches keep until the batch is whole: see `accumulation.micro`."""
        whole = self._whole_outputs(settings)
        return [place for place, size_bytes in enumerate(whole) if 0 < size_bytes <= LAZY_FROM_BYTES]

    def _joined(self, settings: Plan) -> Segment:
        """Outputs of the micro-batches put together for the loop, which drops them again."""
        whole = self._whole_outputs(settings)
        sizes = [whole[place] for place in self._kept(settings)]
        births = [(size_bytes, place, ACTIVATIONS, OUTSIDE) for place, size_bytes in enumerate(sizes)]
        deaths = [(-size_bytes, place, ACTIVATIONS, OUTSIDE) for place, size_bytes in enumerate(sizes)]
        return Segment([*births, *deaths], Bill.of([]), self._rates(settings))


def without_budget(settings: Plan) -> Plan:
    """Settings whose pass is as good as theirs for all but what blocks keep, and is refused for no size."""
    if settings.checkpointing.budget_bytes is None:
        return settings
    return replace(settings, checkpointing=Checkpointing("full"))
