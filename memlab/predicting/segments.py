"""A stretch of a step: live bytes by category on top of what lived before it, and how long it takes.

A step is a sequence of stretches: a pass for every micro-batch, then the update. What is live when one begins is
added when the stretches are put together, so one stretch serves many plans.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from memlab.hardware.roofline import Bill, Rates
from memlab.measuring.observation import BACKWARD, PHASES, RawEvent
from memlab.records import Category, Phase, TimelinePoint, thin
from memlab.trace.hidden_memory import Held
from memlab.trace.recorder import Hidden
from memlab.trace.tracer import Trace

CATEGORIES = tuple(Category)
PLACE = {category: place for place, category in enumerate(CATEGORIES)}
_GRADIENTS = PLACE[Category.GRADIENTS]
_TEMPORARIES = PLACE[Category.TEMPORARIES]
ACTIVATIONS = PLACE[Category.ACTIVATIONS]
# the moment outside forward, backward and step
OUTSIDE = PHASES.index(Phase.OTHER)
_MOST_POINTS = 100

# bytes gained or lost, number of the storage, place of its category, moment
Event = tuple[int, int, int, int]
# bytes by category, in the order of `Category`
Levels = tuple[int, ...]
NOTHING: Levels = (0,) * len(CATEGORIES)


def levels(sizes: Mapping[Category, int]) -> Levels:
    """Bytes by category as a tuple."""
    return tuple(sizes.get(category, 0) for category in CATEGORIES)


def added(one: Levels, other: Levels) -> Levels:
    """Two levels on top of each other."""
    return tuple(map(operator.add, one, other))


def without_state(total: Levels) -> Levels:
    """Levels before an optimizer has taken its first step."""
    place = PLACE[Category.OPTIMIZER_STATE]
    return (*total[:place], 0, *total[place + 1 :])


def by_name(total: Levels) -> dict[str, int]:
    """Levels by the names of their categories, without those that are empty."""
    return {str(category): size for category, size in zip(CATEGORIES, total, strict=True) if size}


@dataclass(frozen=True, eq=False)
class Segment:
    """Births and deaths of a stretch."""

    events: Sequence[Event]  # in order
    bill: Bill  # the work of its operators
    rates: Rates  # how fast the device works
    # number of the storage that the first product of matrices filled, outside of backward and in it
    products: Mapping[bool, int] = field(default_factory=dict)

    @functools.cached_property
    def shape(self) -> Shape:
        """Highest point, last point and a few in between."""
        return _walked(self.events)

    @functools.cached_property
    def seconds(self) -> float:
        return self.bill.seconds(self.rates)

    def points(self, begin_seconds: float, base: Levels) -> list[Point]:
        """Points of the stretch in a step."""
        per_event, base_bytes = self.seconds / max(1, len(self.events)), sum(base)
        return [
            (begin_seconds + at * per_event, base_bytes + size_bytes, moment, base, relative)
            for at, size_bytes, moment, relative in self.shape.points
        ]


# seconds, all live bytes, what runs, and bytes by category: of what lived before the stretch, and on top of that
Point = tuple[float, int, int, Levels, Levels]


def timeline_of(points: Sequence[Point]) -> tuple[TimelinePoint, ...]:
    """Return the highest of many points."""
    return tuple(
        TimelinePoint(seconds, PHASES[moment], by_name(added(base, relative)))
        for seconds, _, moment, base, relative in thin(points, size_of=lambda point: point[1])
    )


@dataclass(frozen=True)
class Shape:
    """Shape of a stretch."""

    peak: Levels  # bytes by category at the highest point
    peak_bytes: int  # their sum
    phase: Phase  # what runs there
    end: Levels  # bytes by category when it is over
    # number of the event, bytes, moment, bytes by category: of every part of the stretch the highest one
    points: tuple[tuple[int, int, int, Levels], ...]


def _walked(events: Sequence[Event]) -> Shape:
    live = [0] * len(CATEGORIES)
    total, peak_bytes, peak, peak_moment = 0, 0, NOTHING, 0
    stretch = max(1, len(events) // _MOST_POINTS)
    points: list[tuple[int, int, int, Levels]] = []
    highest = -1
    at_highest: tuple[int, int, int, Levels] | None = None
    for at, (size_bytes, _, place, moment) in enumerate(events):
        total += size_bytes
        live[place] += size_bytes
        if size_bytes > 0 and total > highest:
            highest, at_highest = total, (at, total, moment, tuple(live))
            if total > peak_bytes:
                peak_bytes, peak, peak_moment = total, at_highest[3], moment
        if at % stretch == stretch - 1 and at_highest is not None:
            points.append(at_highest)
            highest, at_highest = -1, None
    return Shape(peak, peak_bytes, PHASES[peak_moment], tuple(live), tuple(points))


@dataclass(frozen=True)
class Resized:
    """A pass with another number of rows, laid beside a trace of it."""

    rows: int  # rows of its batch
    sizes: Sequence[int]  # bytes of each event of the trace, with so many rows
    bill: Bill  # the work of each of its operators
    hidden: Sequence[Hidden]  # what lives inside operators
    host_bytes: int  # kept off the device


class TracedPass:
    """A pass, and the same with another number of rows, from which that of any number follows.

    Sizes of storages and work of operators are affine in the rows of a batch: a part that grows with them and one
    that does not.
    """

    def __init__(
        self,
        rates: Rates,  # how fast the device works
        one: Trace,
        rows: int,  # of its batch
        other: Resized | None = None,  # the pass with other rows; None when it is wanted with `rows` only
    ) -> None:
        self.trace = one
        self._rates = rates
        self._rows = rows
        self._numbers = [(number, moment) for _, _, number, moment in one.observation.raw]
        self._sizes = [size_bytes for _, size_bytes, _, _ in one.observation.raw]
        self._other = other
        self._other_sizes = self._sizes if other is None else other.sizes
        categories = one.observation.categories
        self._places = [PLACE[categories.get(number, Category.TEMPORARIES)] for number, _ in self._numbers]
        self._segments: dict[tuple[int, bool, frozenset[int] | None], Segment] = {}
        self._outputs: dict[int, dict[int, int]] = {}  # by rows

    def share(self, rows: int) -> float:
        """Return how far a number of rows lies from that of the one trace towards that of the other."""
        return 0.0 if self._other is None else (rows - self._rows) / (self._other.rows - self._rows)

    def segment(self, rows: int, *, accumulating: bool = False, kept: frozenset[int] | None = None) -> Segment:
        """The pass with so many rows; of a split batch with the numbers of the outputs that are kept when it is over."""
        key = (rows, accumulating, kept)
        if key not in self._segments:
            self._segments[key] = self._made(rows, accumulating=accumulating, kept=kept)
        return self._segments[key]

    def events(self, rows: int) -> list[Event]:
        """Births and deaths with so many rows."""
        share = self.share(rows)
        sizes = [_between(a, b, share) for a, b in zip(self._sizes, self._other_sizes, strict=True)]
        return [
            (size_bytes, number, place, moment)
            for size_bytes, (number, moment), place in zip(sizes, self._numbers, self._places, strict=True)
        ]

    def hidden(self, rows: int) -> Sequence[Hidden]:
        """Return what lives inside operators with so many rows."""
        share = self.share(rows)
        if self._other is None or not share:
            return self.trace.hidden
        pairs = [*zip(self.trace.hidden, self._other.hidden, strict=True)]
        # operators on like shapes have one description, which is kept by its id while the pairs hold it
        found = {(id(mine.inside), id(theirs.inside)): (mine.inside, theirs.inside) for mine, theirs in pairs}
        between = {key: mine.between(theirs, share) for key, (mine, theirs) in found.items()}
        return [
            Hidden(mine.begin, mine.event, between[id(mine.inside), id(theirs.inside)], mine.moment)
            for mine, theirs in pairs
        ]

    def host_bytes(self, rows: int) -> int:
        other = self.trace.host_bytes if self._other is None else self._other.host_bytes
        return _between(self.trace.host_bytes, other, self.share(rows))

    def category_of(self, number: int) -> Category:
        return self.trace.observation.categories.get(number, Category.TEMPORARIES)

    def outputs_bytes(self, rows: int) -> dict[int, int]:
        """Bytes of the storages the model's outputs lie in, by number."""
        if rows not in self._outputs:
            wanted = set(self.trace.outputs)
            share = self.share(rows)
            pairs = zip(self._sizes, self._other_sizes, self._numbers, strict=True)
            self._outputs[rows] = {n: _between(a, b, share) for a, b, (n, _) in pairs if a > 0 and n in wanted}
        return self._outputs[rows]

    def _made(self, rows: int, *, accumulating: bool, kept: frozenset[int] | None) -> Segment:
        share, events, hidden = self.share(rows), self.events(rows), self.hidden(rows)
        if hidden or accumulating:
            settled = self.trace.settled if accumulating else {}
            events = list(_with_insertions(events, hidden, settled, self.trace.copied if accumulating else frozenset()))
        if kept is not None:
            events = [event for event in events if event[0] > 0 or event[1] not in kept]
            events += _gone_with_the_graph(events)
        bill = self.trace.bill
        if self._other is not None and share:
            bill = bill.towards(self._other.bill, share)
        return Segment(events, bill, self._rates, self.trace.products)


def laid_beside(one: Trace, other: Trace) -> Resized | None:
    """Another trace of a pass, with other rows; None when it is not of the same operators in the same order."""
    mine, theirs = one.observation.raw, other.observation.raw
    if _steps(mine) != _steps(theirs) or one.bill.classes != other.bill.classes:
        return None
    if [each.inside.func for each in one.hidden] != [each.inside.func for each in other.hidden]:
        return None
    return Resized(other.samples, [size for _, size, _, _ in theirs], other.bill, other.hidden, other.host_bytes)


def _steps(raw: Iterable[RawEvent]) -> list[tuple[int, int, bool]]:
    return [(number, moment, size_bytes > 0) for _, size_bytes, number, moment in raw]


def _gone_with_the_graph(events: Iterable[Event]) -> list[Event]:
    """Deaths of what a backward pass leaves beside gradients: those of leaves that a forward makes, which its graph holds."""
    left: dict[int, Event] = {}
    for size_bytes, number, place, moment in events:
        if size_bytes > 0 and moment == BACKWARD and place != _GRADIENTS:
            left[number] = (-size_bytes, number, place, OUTSIDE)
        elif size_bytes < 0:
            left.pop(number, None)
    return list(left.values())


def _with_insertions(
    events: Sequence[Event], hidden: Iterable[Hidden], settled: Mapping[int, int], copied: Collection[int]
) -> Iterator[Event]:
    """A pass with what lives inside operators, and with gradients that are there already.

    Gradients that are `settled` are added to those there and then freed, before the event that is named. Of those that were
    `copied` there is no copy then.
    """
    # by event, in order: of operators that end there, gradients that are complete, of operators that begin there
    inserted: dict[int, tuple[list[Event], list[Event], list[Event]]] = defaultdict(lambda: ([], [], []))
    number = 0
    for each in hidden:
        begun = inserted[each.begin][2]
        over = inserted[each.event][0] if each.event > each.begin else begun
        for group in each.inside.groups:
            numbers = range(number - len(group), number)
            number -= len(group)
            for sign, additions in ((1, begun if isinstance(group, Held) else over), (-1, over)):
                additions.extend(
                    (sign * size_bytes, own, _TEMPORARIES, each.moment)
                    for size_bytes, own in zip(group, numbers, strict=True)
                )
    for own, before in settled.items():
        inserted[before][1].append((0, own, _TEMPORARIES, 0))
    alive: dict[int, tuple[int, int]] = {}
    for at, event in enumerate((*events, None)):
        for addition in chain.from_iterable(inserted.get(at, ())):
            if addition[0]:
                yield addition
            elif addition[1] in alive:
                size_bytes, moment = alive.pop(addition[1])
                yield (-size_bytes, addition[1], _TEMPORARIES, moment)
        if event is None:
            return
        size_bytes, own, place, moment = event
        if own in copied:
            continue
        if own not in settled:
            yield event
        elif size_bytes > 0:
            alive[own] = (alive.get(own, (0, 0))[0] + size_bytes, moment)
            yield (size_bytes, own, _TEMPORARIES, moment)
        elif own in alive:
            alive.pop(own)
            yield (size_bytes, own, place if place != _GRADIENTS else _TEMPORARIES, moment)


def segment_of(trace: Trace, rates: Rates) -> Segment:
    """A trace as a single stretch, as it is."""
    return TracedPass(rates, trace, trace.samples).segment(trace.samples)


def holding(size_bytes: int, segment: Segment, until: int | None = None) -> Segment:
    """A stretch during which so many bytes more live, to its end or until an event by number."""
    events, number = [*segment.events], 0  # no storage of a trace has this number
    events.insert(len(events) if until is None else until, (-size_bytes, number, _TEMPORARIES, OUTSIDE))
    return replace(segment, events=[(size_bytes, number, _TEMPORARIES, OUTSIDE), *events])


def begun_without_state(first: Segment, later: Trace, like: Segment) -> Segment:
    """The first update, to stand where state of all later ones is counted as there; it takes the time of these."""
    state_bytes = later.observation.baseline_bytes.get(Category.OPTIMIZER_STATE, 0)
    missing = (-state_bytes, -1, PLACE[Category.OPTIMIZER_STATE], PHASES.index(Phase.STEP))
    return Segment([missing, *first.events], like.bill, first.rates)


def _between(one: int, other: int, share: float) -> int:
    return one if one == other else round(one + share * (other - one))
