"""`Observation`: what a ledger saw in one step: births and deaths of storages, and what each was for."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from memlab.records import Category, Phase, TimelinePoint, thin

# Moments in which a storage is made or freed; RECOMPUTE is a checkpoint's forward inside backward. Plain integers for the
# hot path, where looking up a member of an enum costs as much as the rest.
_FORWARD, BACKWARD, RECOMPUTE, STEP, OTHER = range(5)
FORWARD_LIKE = frozenset({_FORWARD, RECOMPUTE, OTHER})
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.STEP, Phase.OTHER)
MOMENT_OF_PHASE = {phase: PHASES.index(phase) for phase in Phase}

# seconds, bytes gained or lost, number of the storage, moment
RawEvent = tuple[float, int, int, int]


@dataclass(frozen=True)
class Observation:
    """Observations of a ledger in one step."""

    peak_bytes: int  # highest live bytes of the step
    baseline: Mapping[int, int]  # bytes of every storage that lived when the step began, by number
    raw: tuple[RawEvent, ...]  # births and deaths in order: seconds, bytes, number of the storage, moment
    assigned: Mapping[int, Category]  # what storages were said to be for, by number
    start: float  # when the step began, on the clock of `raw`
    # by how much sums of gradients that are no events, being in place where nobody watches, raised the peak
    sums_bytes: int = 0
    # number of the model that a storage is of, by the storage's number, where several models train
    owners: Mapping[int, int] = field(default_factory=dict)

    @functools.cached_property
    def baseline_bytes(self) -> dict[Category, int]:
        categories = self.categories
        summed: dict[Category, int] = {}
        for number, size_bytes in self.baseline.items():
            category = categories.get(number, Category.TEMPORARIES)
            summed[category] = summed.get(category, 0) + size_bytes
        return summed

    def timeline(self) -> tuple[TimelinePoint, ...]:
        """Live bytes by category over the step, one point for each birth and death, thinned."""
        live = {str(category): size for category, size in self.baseline_bytes.items() if size}
        points = [TimelinePoint(0.0, Phase.OTHER, dict(live))]
        for seconds, size_bytes, number, moment in self.raw:
            category = self.categories.get(number, Category.TEMPORARIES)
            live[category] = live.get(category, 0) + size_bytes
            points.append(TimelinePoint(seconds - self.start, PHASES[moment], dict(live)))
        return thin(points)

    def parts(self) -> dict[int, dict[str, int]]:
        """Live bytes at the peak, by owner and category; 0 owns what is no model's."""
        live = Counter(self.baseline)
        totals = [*accumulate((size_bytes for _, size_bytes, _, _ in self.raw), initial=live.total())]
        for _, size_bytes, number, _ in self.raw[: totals.index(max(totals))]:
            live[number] += size_bytes
        summed: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for number, size_bytes in live.items():
            category = str(self.categories.get(number, Category.TEMPORARIES))
            summed[self.owners.get(number, 0)][category] += size_bytes
        return {owner: {name: size for name, size in parts.items() if size} for owner, parts in summed.items()}

    @functools.cached_property
    def categories(self) -> dict[int, Category]:
        """Return what each storage is for, by number; those that are missing are temporaries."""
        saved = dict.fromkeys(_saved_for_backward(self.raw), Category.ACTIVATIONS)
        return {**saved, **self.assigned}


def _saved_for_backward(raw: Iterable[RawEvent]) -> set[int]:
    """Storages born outside backward, or by a recomputation, that live when backward work follows."""
    waiting: set[int] = set()
    saved: set[int] = set()
    for _, size_bytes, number, moment in raw:
        if moment == BACKWARD and waiting:
            saved |= waiting
            waiting.clear()
        if size_bytes < 0:
            waiting.discard(number)
        elif moment in FORWARD_LIKE:
            waiting.add(number)
    return saved
