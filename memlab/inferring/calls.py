"""`CallMeter`: memory and speed of every call that runs forward only.

Rules of the meter:

1. A *call* is a forward outside of a generation, or a whole generation. That is `generate`; or a forward, with all
   that follow it and are handed a cache that has tokens in it. Nothing is kept for each token.
2. Where a ledger is what counts memory (the CPU), it watches the first call of so many rows, calls that are larger
   than any it has watched, and a generation from where its cache outgrows those; it takes time, so speed is taken
   from the others where there are any. On CUDA the allocator's counters are read after each pass, and no ledger runs.
3. Each pass is an observation of its own, so that a long generation does not pile up events.
4. Nothing waits for the device while a call runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memlab.inferring import cache
from memlab.inferring.cache import CacheShape
from memlab.measuring.device import Device, TimeMark
from memlab.measuring.holdings import Holding, inputs_of
from memlab.measuring.observation import Observation
from memlab.records import Category, Phase
from memlab.records.inference import CacheUse, CallKind, CallRecord, InferenceRecord
from memlab.runtime.batch import Batch
from memlab.runtime.tree import tensors_in

_MOST_CALLS = 10_000


@dataclass
class _Run:
    """A call that is under way, or that has not been timed yet."""

    begin: TimeMark
    rows: int
    tokens: int
    observed: bool
    is_generate: bool
    first_end: TimeMark | None = None
    end: TimeMark | None = None
    passes: int = 0
    fed: int = 0  # tokens of each row that the cache has seen
    continued: int = 0  # of those, what came after the first pass
    new_tokens: int = 0
    fixed_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    cache_bytes: int = 0
    cache: CacheUse | None = None
    breakdown: dict[str, int] | None = None
    observation: Observation | None = None

    @property
    def kind(self) -> CallKind:
        return CallKind.GENERATE if self.is_generate or self.passes > 1 else CallKind.FORWARD

    @property
    def elements(self) -> int:
        return self.rows * max(1, self.tokens)

    def record(self) -> CallRecord:
        """Return what it came to; waits until the device has done it."""
        end = self.end or self.begin
        first = self.first_end or end
        is_generation = self.kind is CallKind.GENERATE
        return CallRecord(
            kind=self.kind,
            rows=self.rows,
            tokens=self.tokens,
            new_tokens=self.new_tokens if self.is_generate else self.rows * (self.continued + is_generation),
            passes=self.passes,
            seconds=end.seconds_since(self.begin),
            prefill_seconds=first.seconds_since(self.begin),
            peak_allocated_bytes=self.peak_bytes,
            peak_reserved_bytes=self.reserved_bytes,
            fixed_bytes=self.fixed_bytes,
            cache_bytes=self.cache_bytes,
            observed=self.observed,
        )


@dataclass
class _Kind:
    """Records of all calls of one kind."""

    runs: list[_Run]
    records: list[CallRecord]
    peak_bytes: int = -1
    breakdown: dict[str, int] | None = None
    observation: Observation | None = None
    cache: CacheUse | None = None

    def take(self, run: _Run) -> None:
        """Take in a call that is over; of all calls the highest peak and the largest cache are kept."""
        self.runs.append(run)
        if run.peak_bytes is not None and run.peak_bytes > self.peak_bytes:
            self.peak_bytes, self.breakdown, self.observation = run.peak_bytes, run.breakdown, run.observation
        if run.cache is not None and (self.cache is None or run.cache.size_bytes > self.cache.size_bytes):
            self.cache = run.cache
        run.observation = None


class CallMeter:
    """Measures calls on the thread that makes them, one at a time."""

    def __init__(self, device: Device, held: Callable[[], Iterable[Holding]], shape: CacheShape | None) -> None:
        self.device = device
        self._held = held
        self._shape = shape
        self._ledger = device.ledger()
        self._type = self._ledger.device_type
        # a device that knows its peaks by itself needs nobody to watch
        self._needs_ledger = device.peaks(None)[0] is None
        self._run: _Run | None = None
        self._kinds: dict[CallKind, _Kind] = {}
        # by whether it is `generate`: the most elements watched, by rows
        self._watched: dict[bool, dict[int, int]] = {False: {}, True: {}}
        self._most_cache_bytes = 0
        self._cross_tokens = 0
        self._pass: Batch | None = None

    # -- told by the hooks ---------------------------------------------------------------------

    def generation_begins(self, batch: Batch) -> None:
        self._close()
        self._begin(batch, is_generate=True)
        if self._run is not None and self._run.observed:
            self._begin_observation(batch)

    def generation_ended(self, new_tokens: int) -> None:
        """`generate` returned, with so many tokens of all rows together."""
        run = self._run
        if run is not None:
            run.new_tokens = new_tokens
            run.end = self.device.mark()
            self._end_observation()
            self._read_counters(run)
        self._close()

    def pass_begins(self, batch: Batch) -> None:
        caches = cache.caches_in(batch.kwargs)
        has_past = any(any(tensor.dim() > 1 and tensor.numel() for tensor in cache.tensors_of(each)) for each in caches)
        if self._run is None or not (self._run.is_generate or (has_past and self._run.cache_bytes)):
            self._close()
            self._begin(batch, is_generate=False)
        run = self._run
        assert run is not None
        fed = _fed(batch)
        run.fed = run.fed + fed if run.passes else fed + _past_tokens(caches)
        run.continued += fed if run.passes else 0
        self._cross_tokens = _cross_tokens(batch)
        if self._needs_ledger and not run.observed and run.cache_bytes > self._most_cache_bytes:
            run.observed = True  # nothing as large has been watched yet
        self._pass = batch
        if run.observed:
            self._end_observation()
            self._begin_observation(batch)
            self._ledger.phase = Phase.FORWARD

    def pass_ended(self, output: Any) -> None:
        run, batch = self._run, self._pass
        if run is None or batch is None:
            return
        self._pass = None
        tensors = self._cache_tensors(output, batch)
        run.passes += 1
        self._note_cache(run, tensors)
        run.end = self.device.mark()
        run.first_end = run.first_end or run.end
        if run.observed:
            self._ledger.phase = Phase.OTHER
            self._ledger.know((Category.CACHE, tensor) for tensor in tensors)
        if not run.is_generate:
            # what the loop does between its passes is its own
            self._end_observation()
        self._read_counters(run)

    def interrupted(self) -> None:
        """A call raised: what it was in is forgotten, its cache and its peak apart."""
        self._ledger.stop()
        self._ledger.phase = Phase.OTHER
        self._run = self._pass = None

    # -- what was measured ---------------------------------------------------------------------

    def records(self, precision: str, host_bytes: int, notes: tuple[str, ...]) -> tuple[InferenceRecord, ...]:
        """All calls, those of one kind in order; waits for the device."""
        return tuple(self._record(kind, precision, host_bytes, notes) for kind in self._settled())

    def close(self) -> None:
        """Let go of everything; the device stays open."""
        self._close()
        self._ledger.close()

    # -- one call ------------------------------------------------------------------------------

    def _begin(self, batch: Batch, *, is_generate: bool) -> None:
        self.device.reset_peaks()
        run = _Run(self.device.mark(), batch.rows, _fed(batch), False, is_generate)
        run.observed = self._needs_ledger and (self.device.observes_every_step or self._is_larger(run))
        live_bytes = self.device.peaks(None)[0]
        if live_bytes is not None:
            run.fixed_bytes = live_bytes - cache.bytes_of(_varying(batch), self._type)
        self._run = run

    def _is_larger(self, run: _Run) -> bool:
        """Return whether no call of so many rows, or none as large, has been watched yet; notes that one has now."""
        watched = self._watched[run.is_generate]
        is_larger = run.rows not in watched or run.elements > max(watched.values())
        if is_larger:
            watched[run.rows] = run.elements
        return is_larger

    def _begin_observation(self, batch: Batch) -> None:
        """Begin an observation: what lives now is named."""
        caches = [(Category.CACHE, each) for each in cache.tensors_of(cache.caches_in(batch.kwargs))]
        self._ledger.begin([*inputs_of(batch), *caches, *self._held()])
        self._ledger.start()
        run = self._run
        if run is not None and run.fixed_bytes is None:
            run.fixed_bytes = self._ledger.live_bytes - cache.bytes_of(_varying(batch), self._type)

    def _end_observation(self) -> None:
        """End an observation; the highest one is kept."""
        run = self._run
        if run is None or not self._ledger.watching:
            return
        self._ledger.stop()
        observation = self._ledger.finish()
        if observation.peak_bytes > (run.peak_bytes or 0):
            run.peak_bytes, run.observation = observation.peak_bytes, observation

    def _read_counters(self, run: _Run) -> None:
        """Take in the peak so far, where the device counts by itself."""
        allocated, reserved = self.device.peaks(None)
        if allocated is not None and allocated > (run.peak_bytes or 0):
            run.peak_bytes, run.reserved_bytes = allocated, reserved
            run.breakdown = self._named(run, allocated, reserved)

    def _named(self, run: _Run, allocated: int, reserved: int | None) -> dict[str, int]:
        """Return what of a peak has a name; the rest is what the pass worked with."""
        held: dict[str, list[torch.Tensor]] = {}
        for category, tensor in self._held():
            held.setdefault(str(category), []).append(tensor)
        parts = {name: cache.bytes_of(tensors, self._type) for name, tensors in held.items()}
        parts[str(Category.CACHE)] = run.cache_bytes
        parts[str(Category.TEMPORARIES)] = max(0, allocated - sum(parts.values()))
        parts[str(Category.UNUSED)] = max(0, (reserved or allocated) - allocated)
        return {name: size for name, size in parts.items() if size}

    def _close(self) -> None:
        """End the call that is under way, if any."""
        run, self._run, self._pass = self._run, None, None
        self._ledger.stop()
        if run is None or not run.passes:
            return
        if run.observed:
            self._most_cache_bytes = max(self._most_cache_bytes, run.cache_bytes)
        kind = self._kinds.setdefault(run.kind, _Kind([], []))
        kind.take(run)
        while kind.runs and kind.runs[0].end is not None and kind.runs[0].end.passed():
            kind.records.append(kind.runs.pop(0).record())
        del kind.records[:-_MOST_CALLS]

    def _settled(self) -> list[_Kind]:
        self._close()
        for kind in self._kinds.values():
            kind.records += [run.record() for run in kind.runs]
            kind.runs.clear()
        return [kind for kind in self._kinds.values() if kind.records]

    def _record(self, kind: _Kind, precision: str, host_bytes: int, notes: tuple[str, ...]) -> InferenceRecord:
        timeline = kind.observation.timeline() if kind.observation is not None else ()
        breakdown = self.device.breakdown(timeline, None, None) if timeline else kind.breakdown
        calls = tuple(kind.records)
        return InferenceRecord(precision, self.device.name, calls, breakdown, timeline, host_bytes, kind.cache, notes)

    # -- its cache -----------------------------------------------------------------------------

    def _cache_tensors(self, output: Any, batch: Batch) -> list[torch.Tensor]:
        """Tensors of the caches a pass returned, or filled."""
        caches = cache.caches_in(output) or cache.caches_in(batch.kwargs)
        return [tensor for tensor in cache.tensors_of(caches) if tensor.dim()]

    def _note_cache(self, run: _Run, tensors: list[torch.Tensor]) -> None:
        first = next((tensor for tensor in tensors if tensor.dim() > 1), None)
        size_bytes = cache.bytes_of(tensors, self._type)
        if first is None or size_bytes < run.cache_bytes:
            return
        run.cache_bytes = size_bytes
        if self._shape is None:
            run.cache = CacheUse(size_bytes, first.shape[0], run.fed)
        else:
            run.cache = self._shape.use(size_bytes, first.shape[0], run.fed, self._cross_tokens, first.dtype)


def _varying(batch: Batch) -> list[torch.Tensor]:
    """Inputs and caches: what grows with the rows."""
    return [*batch.tensors, *cache.tensors_of(cache.caches_in(batch.kwargs))]


def _fed(batch: Batch) -> int:
    """Tokens of each row in a call's inputs; 0 where they are no tokens."""
    for name in ("decoder_input_ids", "input_ids", "inputs", "inputs_embeds"):
        value = batch.kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return value.shape[1]
    first = next(iter(batch.args), None)
    is_ids = isinstance(first, torch.Tensor) and first.dim() == 2 and not first.is_floating_point()
    return first.shape[1] if is_ids and isinstance(first, torch.Tensor) else 0


def _cross_tokens(batch: Batch) -> int:
    """Tokens of each row that an encoder read."""
    encoded = batch.kwargs.get("encoder_outputs")
    hidden = next(iter(tensors_in(encoded)), None) if encoded is not None else batch.kwargs.get("input_ids")
    return hidden.shape[1] if isinstance(hidden, torch.Tensor) and hidden.dim() > 1 else 0


def _past_tokens(caches: list[Any]) -> int:
    """Tokens of each row that caches hold already."""
    lengths = [each.get_seq_length() for each in caches if hasattr(each, "get_seq_length")]
    if lengths:
        return int(lengths[0])
    first = next((t for t in cache.tensors_of(caches) if t.dim() == 4), None)
    return first.shape[-2] if first is not None else 0
