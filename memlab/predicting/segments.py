"""A stretch of a step: live bytes by category on top of what lived before it, and how long it takes.

A step is a sequence of stretches: a pass for every micro-batch, then the update. What is live when one begins is
added when the stretches are put together, so one stretch serves many plans.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memlab.measuring.ledger import PHASES, RawEvent
from memlab.records import Category, Phase, TimelinePoint
from memlab.roofline import Bill, Rates
from memlab.trace.recorder import Hidden
from memlab.trace.tracer import Trace

_CATEGORIES = tuple(Category)
_PLACE = {category: place for place, category in enumerate(_CATEGORIES)}
_GRADIENTS = _PLACE[Category.GRADIENTS]
_TEMPORARIES = _PLACE[Category.TEMPORARIES]
ACTIVATIONS = _PLACE[Category.ACTIVATIONS]
# the moment outside forward, backward and step
OUTSIDE = PHASES.index(Phase.OTHER)
_MOST_POINTS = 100

# bytes by category, in the order of `Category`
Levels = tuple[int, ...]
NOTHING: Levels = (0,) * len(_CATEGORIES)


def levels(sizes: Mapping[Category, int]) -> Levels:
    """Bytes by category as a tuple."""
    return tuple(sizes.get(category, 0) for category in _CATEGORIES)


def added(one: Levels, other: Levels) -> Levels:
    """Two levels on top of each other."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


def without_state(total: Levels) -> Levels:
    """Levels before an optimizer has taken its first step."""
    place = _PLACE[Category.OPTIMIZER_STATE]
    return (*total[:place], 0, *total[place + 1 :])


def by_name(total: Levels) -> dict[str, int]:
    """Levels by the names of their categories, without those that are empty."""
    return {str(category): size for category, size in zip(_CATEGORIES, total, strict=True) if size}


@dataclass(frozen=True, eq=False)
class Segment:
    """Births and deaths of a stretch.

    Args:
        events: bytes, number of the storage, place of its category, moment; in order.
        bill: the work of its operators.
        rates: how fast the device works.
    """

    events: Sequence[tuple[int, int, int, int]]
    bill: Bill
    rates: Rates

    @functools.cached_property
    def shape(self) -> Shape:
        """Highest point, last point and a few in between."""
        return _walked(self.events)

    @functools.cached_property
    def seconds(self) -> float:
        """How long the stretch takes."""
        return self.bill.seconds(self.rates)

    def timeline(self, begin_seconds: float, base: Levels) -> Iterator[TimelinePoint]:
        """Points of the stretch in a step: when, what runs, live bytes."""
        per_event = self.seconds / max(1, len(self.events))
        for at, moment, relative in self.shape.points:
            yield TimelinePoint(begin_seconds + at * per_event, PHASES[moment], by_name(added(base, relative)))


@dataclass(frozen=True)
class Shape:
    """What a stretch looks like.

    Args:
        peak: bytes by category at the highest point.
        peak_bytes: their sum.
        phase: what runs there.
        end: bytes by category when it is over.
        points: number of the event, moment, bytes by category: of every part of the stretch the highest one.
    """

    peak: Levels
    peak_bytes: int
    phase: Phase
    end: Levels
    points: tuple[tuple[int, int, Levels], ...]


def _walked(events: Sequence[tuple[int, int, int, int]]) -> Shape:
    live = [0] * len(_CATEGORIES)
    total, peak_bytes, peak, peak_moment = 0, 0, NOTHING, 0
    stretch = max(1, len(events) // _MOST_POINTS)
    points: list[tuple[int, int, Levels]] = []
    highest = -1
    at_highest: tuple[int, int, Levels] | None = None
    for at, (size_bytes, _, place, moment) in enumerate(events):
        total += size_bytes
        live[place] += size_bytes
        if size_bytes > 0 and total > highest:
            highest, at_highest = total, (at, moment, tuple(live))
            if total > peak_bytes:
                peak_bytes, peak, peak_moment = total, at_highest[2], moment
        if at % stretch == stretch - 1 and at_highest is not None:
            points.append(at_highest)
            highest, at_highest = -1, None
    return Shape(peak, peak_bytes, PHASES[peak_moment], tuple(live), tuple(points))


class TracedPass:
    """A pass traced with two numbers of rows, from which that of any number follows.

    Sizes of storages and work of operators are affine in the rows of a batch: a part that grows with them and one
    that does not.

    Args:
        rates: how fast the device works.
        one: a trace.
        rows: rows of its batch.
        other: the trace of the same pass with other rows, or None when it is wanted with `rows` only.
        other_rows: rows of its batch.

    Raises:
        NotAlikeError: the two traces do not have the same operators in the same order.
    """

    def __init__(self, rates: Rates, one: Trace, rows: int, other: Trace | None = None, other_rows: int = 0) -> None:
        self.trace = one
        self._rates = rates
        self._rows = rows
        self._other = other
        self._other_rows = other_rows
        self._numbers = [(number, moment) for _, _, number, moment in one.observation.raw]
        self._sizes = [size_bytes for _, size_bytes, _, _ in one.observation.raw]
        self._other_sizes = self._sizes if other is None else _aligned(one, other)
        categories = one.observation.categories
        self._places = [_PLACE[categories.get(number, Category.TEMPORARIES)] for number, _ in self._numbers]
        self._segments: dict[tuple[int, bool, frozenset[int]], Segment] = {}

    @property
    def is_scalable(self) -> bool:
        """Whether there is a second trace."""
        return self._other is not None

    def share(self, rows: int) -> float:
        """How far a number of rows lies from that of the one trace towards that of the other."""
        return 0.0 if self._other is None else (rows - self._rows) / (self._other_rows - self._rows)

    def segment(self, rows: int, *, accumulating: bool = False, kept: frozenset[int] = frozenset()) -> Segment:
        """The pass with so many rows.

        Args:
            rows: rows of the micro-batch.
            accumulating: whether gradients are there already: new ones are added to them and freed.
            kept: numbers of storages that outlive the pass.
        """
        key = (rows, accumulating, kept)
        if key not in self._segments:
            self._segments[key] = self._made(rows, accumulating=accumulating, kept=kept)
        return self._segments[key]

    def host_bytes(self, rows: int) -> int:
        """Bytes kept off the device during a pass."""
        other = self.trace.host_bytes if self._other is None else self._other.host_bytes
        return _between(self.trace.host_bytes, other, self.share(rows))

    def outputs_bytes(self, rows: int) -> dict[int, int]:
        """Bytes of the storages the model's outputs lie in, by number."""
        wanted = set(self.trace.outputs)
        share = self.share(rows)
        pairs = zip(self._sizes, self._other_sizes, self._numbers, strict=True)
        return {number: _between(a, b, share) for a, b, (number, _) in pairs if a > 0 and number in wanted}

    def _hidden(self, share: float) -> tuple[Sequence[Hidden], float]:
        """What lives inside operators, and by which factor it is larger with so many rows.

        Whether an operator takes temporaries at all depends on its size, so the nearer trace is asked.
        """
        if self._other is None:
            return self.trace.hidden, 1.0
        rows = self._rows + share * (self._other_rows - self._rows)
        if share < 0.5:  # noqa: PLR2004 - half the way
            return self.trace.hidden, rows / self._rows
        return self._other.hidden, rows / self._other_rows

    def _made(self, rows: int, *, accumulating: bool, kept: frozenset[int]) -> Segment:
        share = self.share(rows)
        sizes = [_between(a, b, share) for a, b in zip(self._sizes, self._other_sizes, strict=True)]
        events = [
            (size_bytes, number, place, moment)
            for size_bytes, (number, moment), place in zip(sizes, self._numbers, self._places, strict=True)
        ]
        events = [event for event in with_hidden(events, *self._hidden(share)) if event[0] > 0 or event[1] not in kept]
        bill = self.trace.bill
        if self._other is not None and share:
            bill = bill.towards(self._other.bill, share)
        return Segment(list(_accumulated(events)) if accumulating else events, bill, self._rates)


class NotAlikeError(Exception):
    """Two traces of a pass that cannot be laid side by side."""


def _aligned(one: Trace, other: Trace) -> list[int]:
    """Sizes of the other trace's events, in the order of the one's."""
    mine, theirs = one.observation.raw, other.observation.raw
    if _steps(mine) != _steps(theirs) or one.bill.classes != other.bill.classes:
        raise NotAlikeError
    return [size_bytes for _, size_bytes, _, _ in theirs]


def _steps(raw: Iterable[RawEvent]) -> list[tuple[int, int, bool]]:
    return [(number, moment, size_bytes > 0) for _, size_bytes, number, moment in raw]


def with_hidden(
    events: Sequence[tuple[int, int, int, int]], hidden: Iterable[Hidden], factor: float = 1.0
) -> Iterator[tuple[int, int, int, int]]:
    """Births and deaths together with those inside operators, each of these of a storage of its own."""
    done, number = 0, 0
    for inside in hidden:
        yield from events[done : inside.event]
        done = inside.event
        sizes = [round(size_bytes * factor) for size_bytes in inside.sizes]
        numbers = range(number - len(sizes), number)
        number -= len(sizes)
        for sign in (1, -1):
            for size_bytes, own in zip(sizes, numbers, strict=True):
                yield (sign * size_bytes, own, _TEMPORARIES, inside.moment)
    yield from events[done:]


def _accumulated(events: Iterable[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """The same pass when gradients are there already: each new one dies as soon as it has been added."""
    waiting: list[tuple[int, int, int, int]] = []
    gone: set[int] = set()
    for event in events:
        size_bytes, number, place, moment = event
        if place == _GRADIENTS:
            if size_bytes > 0:
                yield from _freed(waiting)
                yield (size_bytes, number, _TEMPORARIES, moment)
                waiting.append(event)
                gone.add(number)
            elif number not in gone:
                yield event
            continue
        if size_bytes > 0:
            yield from _freed(waiting)
        yield event
    yield from _freed(waiting)


def _freed(waiting: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    while waiting:
        size_bytes, number, _, moment = waiting.pop()
        yield (-size_bytes, number, _TEMPORARIES, moment)


def segment_of(trace: Trace, rates: Rates) -> Segment:
    """A trace as a single stretch, as it is."""
    return TracedPass(rates, trace, trace.samples).segment(trace.samples)


def _between(one: int, other: int, share: float) -> int:
    return one if one == other else round(one + share * (other - one))
