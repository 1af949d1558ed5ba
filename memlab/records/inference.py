"""Measurements of calls that only run forward: records without torch; `report.inference` puts them into words.

A *call* is one forward of the model outside of a generation, or one whole generation: `generate`, or a loop that
hands the cache of one forward to the next. A generation has a *prefill*, the pass over the prompt, and *decode* passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from memlab.records import Measurement, TimelinePoint, ratio


class CallKind(StrEnum):
    """Kinds of calls."""

    FORWARD = "forward"
    GENERATE = "generate"


@dataclass(frozen=True)
class CacheUse:
    """A key-value cache: what it took, and what its formula says."""

    size_bytes: int  # bytes of the storages that its tensors lie in
    rows: int  # rows it was for, beams included
    tokens: int  # tokens of each row that were fed to the model
    # 2 × layers × heads × head dimension × bytes of an element × tokens × rows; None where the model's configuration
    # does not say them
    predicted_bytes: int | None = None
    formula: str = ""  # the factors in words; empty without a prediction


@dataclass(frozen=True)
class CallRecord:
    """One call."""

    kind: CallKind  # a forward, or a generation
    rows: int  # rows that went in
    tokens: int  # tokens of each row that went in; 0 where inputs are no token ids
    # tokens that came out, of all rows together; a row that ended early counts as the longest. 0 of a forward
    new_tokens: int
    passes: int  # forward passes of the model
    seconds: float  # the whole call
    prefill_seconds: float  # until the end of the first pass
    peak_allocated_bytes: int | None = None  # highest live bytes; None when the call was not observed
    peak_reserved_bytes: int | None = None  # highest reserved bytes; None off CUDA
    fixed_bytes: int | None = None  # what lived when it began, without inputs and cache; None when it was not observed
    cache_bytes: int = 0  # bytes of its cache when it ended
    observed: bool = False  # a ledger watched it, which takes time

    @property
    def shape(self) -> tuple[CallKind, int, int]:
        """Return what decides, with the rows, what the call needs: kind, tokens of a row in and out."""
        return self.kind, self.tokens, self.new_tokens // max(1, self.rows)


@dataclass(frozen=True)
class BatchAdvice:
    """The largest number of rows of a call that fits.

    Args:
        rows: as many fit; 0 when not even one does.
        budget_bytes: size that they must fit into.
        fixed_bytes: what does not grow with the rows.
        row_bytes: what one row needs at the peak.
        sizes: numbers of rows that were measured. From two, both numbers are exact where memory is affine in the rows;
            from one, all growth is attributed to rows, so that more may fit.
    """

    rows: int
    budget_bytes: int
    fixed_bytes: int
    row_bytes: int
    sizes: tuple[int, ...]

    @property
    def expected_bytes(self) -> int:
        """Peak to be expected of so many rows."""
        return self.fixed_bytes + self.rows * self.row_bytes


@dataclass(frozen=True)
class InferenceRecord:
    """Memory and speed of the calls of one kind, under one precision.

    Args:
        precision: format of the weights: "keep", "fp16" or "bf16".
        device: name of the device, with its capacity when it has one.
        calls: the calls, in order; at least one.
        breakdown: live bytes by category at the highest peak.
        timeline: live bytes over the pass with the highest peak; empty on CUDA.
        host_bytes: bytes kept off the device meanwhile: the weights in their own format.
        cache: the largest cache; None when there was none.
        notes: remarks on the numbers, in words.

    Example:
        >>> call = CallRecord(CallKind.GENERATE, 4, 16, 80, 20, 2.0, 0.5, 1000, None, 600)
        >>> record = InferenceRecord("keep", "cpu", (call,))
        >>> record.label, record.new_tokens_per_second, record.decode_tokens_per_second
        ('--inference', 40.0, 50.666666666666664)
        >>> record.advise(2000).rows
        14
    """

    precision: str
    device: str
    calls: tuple[CallRecord, ...]
    breakdown: Mapping[str, int] | None = None
    timeline: tuple[TimelinePoint, ...] = field(default=(), repr=False)  # hundreds of points
    host_bytes: int = 0
    cache: CacheUse | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> CallKind:
        """Return whether its calls are forwards or generations."""
        return self.calls[0].kind

    @property
    def label(self) -> str:
        """The flags it ran under."""
        return "--inference" if self.precision == "keep" else f"--inference --{self.precision}"

    @property
    def peak_allocated_bytes(self) -> int:
        """Highest live bytes of all calls."""
        return max((c.peak_allocated_bytes for c in self.calls if c.peak_allocated_bytes is not None), default=0)

    @property
    def timed(self) -> tuple[CallRecord, ...]:
        """The calls that speed is taken from: those no ledger watched, without the first one where there are more."""
        plain = tuple(call for call in self.calls if not call.observed) or self.calls
        return plain[1:] if len(plain) > 1 and plain[0] is self.calls[0] else plain

    @property
    def new_tokens_per_second(self) -> float:
        """Tokens that came out, for each second of whole calls; NaN for forwards."""
        return self._per_second(sum(c.new_tokens for c in self.timed), sum(c.seconds for c in self.timed))

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of prompts for each second of prefill; NaN for forwards."""
        seconds = sum(c.prefill_seconds for c in self.timed)
        return self._per_second(sum(c.rows * c.tokens for c in self.timed), seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after each row's first one, for each second after the prefill; NaN without any."""
        longer = [c for c in self.timed if c.passes > 1]
        seconds = sum(c.seconds - c.prefill_seconds for c in longer)
        return self._per_second(sum(c.new_tokens - c.rows for c in longer), seconds)

    @property
    def measurement(self) -> Measurement:
        """The same as a row of a receipt: a step is a call, its tokens are those that came out, or went into a forward."""
        timed = self.timed
        count = len(timed)
        reserved = [c.peak_reserved_bytes for c in self.calls if c.peak_reserved_bytes is not None]
        tokens = sum(c.new_tokens if self.kind is CallKind.GENERATE else c.rows * c.tokens for c in timed)
        return Measurement(
            plan=self.label,
            device=self.device,
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=max(reserved, default=None),
            host_bytes=self.host_bytes,
            breakdown=dict(self.breakdown or {}),
            timeline=self.timeline,
            step_seconds=tuple(c.seconds for c in timed),
            samples_per_step=sum(c.rows for c in timed) / count,
            tokens_per_step=tokens / count,
        )

    def advise(self, budget_bytes: int) -> BatchAdvice | None:
        """Return how many rows of the call with the highest peak fit into a budget.

        Args:
            budget_bytes: size of the device, or what may be used of it. It is held against allocated bytes: on a GPU
                leave the allocator some room.

        Returns:
            None when no call was observed, or nothing of what it needs grows with its rows.
        """
        known = [
            (call.peak_allocated_bytes, call)
            for call in self.calls
            if call.peak_allocated_bytes is not None and call.rows
        ]
        if not known:
            return None
        _, highest = max(known, key=lambda each: each[0])
        peaks: dict[int, int] = {}
        for peak_bytes, call in known:
            if call.shape == highest.shape:
                peaks[call.rows] = max(peaks.get(call.rows, 0), peak_bytes)
        return advice_from(peaks, highest.fixed_bytes or 0, budget_bytes)

    def _per_second(self, tokens: int, seconds: float) -> float:
        return ratio(tokens, seconds) if self.kind is CallKind.GENERATE else math.nan


def advice_from(peaks: Mapping[int, int], fixed_bytes: int, budget_bytes: int) -> BatchAdvice | None:
    """Return how many rows fit, from the peaks of some numbers of rows.

    Args:
        peaks: measured peak by number of rows; of more than two the outermost count.
        fixed_bytes: what does not grow with the rows, as far as known; two sizes tell it themselves.
        budget_bytes: what is to be fitted into.

    Returns:
        None when nothing grows with the rows.

    Example:
        >>> advice_from({2: 300, 4: 500}, 0, 1000).rows, advice_from({2: 300}, 100, 1000).rows
        (9, 9)
    """
    least, most = min(peaks), max(peaks)
    if least < most:
        row_bytes = -((peaks[least] - peaks[most]) // (most - least))
        fixed_bytes = peaks[most] - most * row_bytes
    else:
        row_bytes = -((fixed_bytes - peaks[most]) // most)
    if row_bytes <= 0:
        return None
    rows = max(0, (budget_bytes - fixed_bytes) // row_bytes)
    return BatchAdvice(rows, budget_bytes, fixed_bytes, row_bytes, tuple(sorted({least, most})))
