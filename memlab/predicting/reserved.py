"""Reserved memory of the caching allocator: a step's allocations replayed through its simulator.

The order of things in the first steps is written down once, in `play_steps`. Who plays them may serve the requests by
an allocator, for its peaks (here), or note them down with times and labels (`memlab.predicting.snapshots`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from memlab.allocator import Allocator, Block, Change, Free, Settings
from memlab.allocator.sizes import MIN_BLOCK_BYTES, SMALL_BLOCK_BYTES, SMALL_SEGMENT_BYTES, round_up
from memlab.predicting.plan_predictor import Parts
from memlab.predicting.segments import ACTIVATIONS, OUTSIDE, PLACE, Event
from memlab.records import Category

_MOST_STEPS = 4  # state that the first makes, and what later ones replace, may take places that activations had
# the first pass differs from the second, which adds to gradients; all that follow are like the second
_MOST_PASSES = 3
_GRADIENTS, _WORKSPACES = PLACE[Category.GRADIENTS], PLACE[Category.WORKSPACES]
# numbers of workspaces among a stretch's storages, downwards
_FIRST_WORKSPACE = -(2**40)
# the stretch of what comes once
_LOOK = -1

Events = Sequence[Event]
# what libraries allocate: after which storage's birth (None for at once), and sizes in bytes
Workspaces = Sequence[tuple[int | None, int]]


class Player:
    """Serves the births and deaths of steps by an allocator."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def begin(self, step: int, stretch: int) -> None:
        """A stretch begins; what is born and dies until the next one belongs to it.

        Args:
            step: from 0.
            stretch: its place in the step, the update last; −1 for what comes once.
        """

    def born(self, size_bytes: int, place: int, moment: int = OUTSIDE) -> Any:
        """Give a storage memory; what is returned has `requested` bytes."""
        return self._allocator.malloc(size_bytes)

    def died(self, storage: Any) -> None:
        """Take its memory back."""
        self._allocator.free(storage)

    def begins_anew(self) -> None:
        """The plan is in force, or a split is judged: the cache has been given back, and peaks count from now on."""
        self.cache_emptied()
        self._allocator.reset_peaks()

    def cache_emptied(self) -> None:
        """What is reserved and not in use goes back to the device."""
        self._allocator.empty_cache()

    def made_of(self, events: Iterable[Event], made: Callable[..., Any], *more: Any) -> Any:
        """Return what is made of a stretch."""
        return made(events, *more)

    def play(self, events: Iterable[Event], live: dict[int, Any]) -> None:
        """Serve events in order; `live` holds what is in use, by number of the storage."""
        for size_bytes, number, place, moment in events:
            before = live.pop(number, None)
            # a storage that changes its size is given other memory
            now_bytes = size_bytes if before is None else before.requested + size_bytes
            if now_bytes > 0:
                live[number] = self.born(now_bytes, place, moment)
            if before is not None:
                self.died(before)


@dataclass(frozen=True)
class Script:
    """Requests of steps to the allocator."""

    parts: Parts  # the steps; sizes of what lives outside of the stretches are theirs
    passes: Sequence[Events]  # stretches of a step but the last
    last: Events  # the last stretch, which may replace what is owned
    # what libraries allocate once, by stretch of the first step
    workspaces: Mapping[int, Workspaces] = field(default_factory=dict)
    look: Events = ()  # what comes once, before or in the first step (`Parts.once`)
    counts_look: bool = True  # whether that is in peaks
    first: Events | None = None  # the last stretch of the first step, where it creates the optimizer's state


@dataclass(frozen=True)
class Reserved:
    """Peaks as torch's counters would show them."""

    allocated_bytes: int  # in blocks that hold tensors, with what rounding adds
    reserved_bytes: int  # in segments, live or not


def reserved_by(script: Script, settings: Settings, known: Known | None = None) -> Reserved:
    """Replay steps through the allocator, two at least and then as long as one reserves more than those before.

    What a pass did to the memory it met is `known` to later replays with the same settings: where another meets the same, as
    plans do that differ in their optimizers, and passes of a step that follow one another, it is not served again.

    Small requests have a pool of their own, whose segments are small as well: they are counted, and rounded up to whole
    segments, and what is replayed are the few large ones that make or break a plan.
    """
    script = replace(script, passes=_shortened(script.passes))
    counts_small = not (settings.expandable_segments or any(parts > 1 for parts in settings.roundup_power2_divisions))
    allocator = Allocator(settings)
    serving = _Serving(allocator, {} if known is None else known) if counts_small else _Counting(allocator, 0)
    play_steps(script, serving, _until_settled(allocator))
    segments_bytes = round_up(serving.most_small_bytes, SMALL_SEGMENT_BYTES)
    return Reserved(serving.peak_bytes, allocator.peak_reserved_bytes + segments_bytes)


def script_of(parts: Parts, workspaces: Sequence[int]) -> Script:
    """Return what two steps of a plan ask for."""
    *passes, last = [segment.events for segment in parts.segments]
    look = () if parts.once is None else parts.once.events
    taken: dict[int, list[tuple[int | None, int]]] = {}
    for number, size_bytes in enumerate(workspaces):
        in_backward = 2 * number >= len(workspaces)
        # a thread takes its workspace when it first multiplies matrices, and after it has made room for the result
        place, stretch = 0, parts.segments[0]
        if parts.once is not None and in_backward in parts.once.products:
            place, stretch = _LOOK, parts.once
        taken.setdefault(place, []).append((stretch.products.get(in_backward), size_bytes))
    first = None if parts.first_update is None else parts.first_update.events
    counts_look = parts.probe is None or parts.once is not parts.probe
    return Script(parts, passes, last, taken, look, counts_look, first)


def _until_settled(allocator: Allocator) -> Iterator[int]:
    """Numbers of steps: two, and more as long as each reserves more than was reserved before it."""
    before_bytes = -1
    for step in range(_MOST_STEPS):
        yield step
        reserved_bytes = allocator.reserved_bytes
        if step and reserved_bytes == before_bytes:
            return
        before_bytes = reserved_bytes


def play_steps(script: Script, player: Player, steps: Iterable[int] = range(2)) -> None:
    """Let steps be served."""
    parts, applied = script.parts, script.parts.applied
    held = _born(player, parts.owned if applied is None else applied.before, Category.PARAMETERS)
    for size_bytes in filter(None, parts.inputs):
        player.born(size_bytes, ACTIVATIONS)
    if applied is not None:
        Player.play(player, applied.events, held)  # no stretch of a step, which takes time
        held = dict(zip(parts.owned, (held.pop(number) for number in applied.after), strict=True))
        player.begins_anew()
    if parts.has_state:
        held |= _born(player, parts.state, Category.OPTIMIZER_STATE)
    if script.look:
        player.begin(0, _LOOK)
        _end(player, _played(player, script.look, script.workspaces.get(_LOOK, ())).values())
        if not script.counts_look:
            player.begins_anew()
        elif parts.empties_cache:
            player.cache_emptied()
    carried: dict[int, Any] = {}
    for step in steps:
        left: list[Any] = []
        outputs: list[Any] = []
        for place, events in enumerate((*script.passes, script.last)):
            player.begin(step, place)
            if place == len(script.passes):
                break
            live = _played(player, events, () if step else script.workspaces.get(place, ()), {} if place else carried)
            if len(script.passes) > 1:
                # a split batch keeps its outputs until it is whole: see `accumulation.micro`
                outputs += [live.pop(number) for number in player.made_of(events, _outputs, frozenset(live))]
            left += live.values()
        _end(player, outputs)
        makes_state = step == 0 and not parts.has_state
        if makes_state and script.first is None:
            held |= _born(player, parts.state, Category.OPTIMIZER_STATE)
        last = script.first if makes_state and script.first is not None else script.last
        is_first = step == 0 and not script.passes
        held = _played(player, last, script.workspaces.get(0, ()) if is_first else (), held)
        # what an update leaves in place of what it found counts again from there
        held, gone = _renumbered(held, {**parts.owned, **parts.state})
        carried, left = _renumbered(dict(enumerate(left, -len(left))), parts.carried)
        _end(player, [*left, *gone])


def _shortened(passes: Sequence[Events]) -> Sequence[Events]:
    """The passes that can make a difference, and of those in between only what they leave."""
    if len(passes) <= _MOST_PASSES:
        return passes
    between = passes[_MOST_PASSES - 1 : -1]
    # passes of the same number of rows are the same object
    left = {id(events): _left_by(events) for events in {id(events): events for events in between}.values()}
    return [*passes[: _MOST_PASSES - 1], *(left[id(events)] for events in between if left[id(events)]), passes[-1]]


def _left_by(events: Events) -> Events:
    """Births without a death."""
    left: dict[int, Event] = {}
    for event in events:
        if event[0] > 0:
            left[event[1]] = event
        else:
            left.pop(event[1], None)
    return list(left.values())


@dataclass(frozen=True, slots=True)
class _Small:
    """A small storage, which is only counted."""

    requested: int
    rounded: int


class _Counting(Player):
    """Counts requests up to a size beside the allocator, and notes nothing down but peaks.

    Attributes:
        peak_bytes: most that was allocated at once.
        most_small_bytes: most that was counted at once.
    """

    def __init__(self, allocator: Allocator, small_bytes: int) -> None:
        super().__init__(allocator)
        self._limit_bytes, self._small_bytes = small_bytes, 0
        self._smalls: dict[int, _Small] = {}  # by bytes requested
        self.peak_bytes = self.most_small_bytes = 0

    def begins_anew(self) -> None:
        super().begins_anew()
        self.most_small_bytes = self._small_bytes
        self.peak_bytes = self._allocator.allocated_bytes + self._small_bytes

    def born(self, size_bytes: int, place: int, moment: int = OUTSIDE) -> Any:
        given: Block | _Small | None
        if size_bytes > self._limit_bytes:
            given = self._allocator.malloc(size_bytes)
        else:
            given = self._smalls.get(size_bytes)
            if given is None:
                given = self._smalls[size_bytes] = _Small(size_bytes, round_up(size_bytes, MIN_BLOCK_BYTES))
            self._small_bytes += given.rounded
            if self._small_bytes > self.most_small_bytes:
                self.most_small_bytes = self._small_bytes
        if (live_bytes := self._allocator.allocated_bytes + self._small_bytes) > self.peak_bytes:
            self.peak_bytes = live_bytes
        return given

    def died(self, storage: Any) -> None:
        if type(storage) is _Small:
            self._small_bytes -= storage.rounded
        else:
            self._allocator.free(storage)


# what is made of events, by what that is and the ids of these; they are kept, so that no others have their ids
Known = dict[tuple[Any, ...], tuple[Iterable[Event], Any]]


@dataclass(slots=True)
class _Pass:
    """A stretch that finds nothing of its own alive, without the events of small storages."""

    # births and deaths of large ones: the number of each, its bytes (0 of a death), and the most that small ones come to until
    # the next; one of neither begins
    steps: list[tuple[int, int, int]]
    most_bytes: int  # that small ones come to
    end_bytes: int  # of those that stay
    left: dict[int, _Small | int]  # what stays, by number of the storage: small ones, and numbers of large ones
    changes: dict[Free, tuple[Change, int]]  # what it did, by what it met, and the most bytes of all that it came to


def _pass_of(events: Iterable[Event]) -> _Pass:
    live: dict[int, tuple[_Small, int | None]] = {}  # with the numbers of large ones
    steps: list[tuple[int, int, int]] = []
    now_bytes = most_bytes = top_bytes = births = 0
    last = (0, 0)
    for size_bytes, number, _, _ in events:
        before = live.pop(number, None)
        asked_bytes = size_bytes if before is None else before[0].requested + size_bytes
        if asked_bytes > 0:
            given = _Small(asked_bytes, round_up(asked_bytes, MIN_BLOCK_BYTES))
            if asked_bytes > SMALL_BLOCK_BYTES:
                births += 1
                steps.append((*last, top_bytes))
                last, top_bytes, live[number] = (births, asked_bytes), now_bytes, (given, births)
            else:
                now_bytes += given.rounded
                top_bytes, most_bytes, live[number] = (
                    max(top_bytes, now_bytes),
                    max(most_bytes, now_bytes),
                    (given, None),
                )
        if before is not None:
            small, large = before
            if large is None:
                now_bytes -= small.rounded
            else:
                steps.append((*last, top_bytes))
                last, top_bytes = (large, 0), now_bytes
    steps.append((*last, top_bytes))
    left = {number: given if large is None else large for number, (given, large) in live.items()}
    return _Pass(steps, most_bytes, now_bytes, left, {})


class _Serving(_Counting):
    """Serves the large requests of a pass, or does again what the pass did to the same free memory."""

    def __init__(self, allocator: Allocator, known: Known) -> None:
        super().__init__(allocator, SMALL_BLOCK_BYTES)
        self._known = known

    def made_of(self, events: Iterable[Event], made: Callable[..., Any], *more: Any) -> Any:
        key = (made, id(events), *more)
        if key not in self._known:
            self._known[key] = events, made(events, *more)
        return self._known[key][1]

    def play(self, events: Iterable[Event], live: dict[int, Any]) -> None:
        if live:
            super().play(events, live)
            return
        passed: _Pass = self.made_of(events, _pass_of)
        allocator, before_bytes = self._allocator, self._allocator.allocated_bytes
        free = allocator.free_memory
        if free not in passed.changes:
            blocks, passed.changes[free] = self._served(passed.steps)
        else:
            large = (each for each in passed.left.values() if type(each) is int)
            blocks = dict(zip(large, allocator.change(passed.changes[free][0]), strict=True))
        live |= {number: blocks[each] if type(each) is int else each for number, each in passed.left.items()}
        self.peak_bytes = max(self.peak_bytes, before_bytes + self._small_bytes + passed.changes[free][1])
        self.most_small_bytes = max(self.most_small_bytes, self._small_bytes + passed.most_bytes)
        self._small_bytes += passed.end_bytes

    def _served(self, steps: Iterable[tuple[int, int, int]]) -> tuple[dict[int, Block], tuple[Change, int]]:
        blocks: dict[int, Block] = {}
        allocator, malloc, free = self._allocator, self._allocator.malloc, self._allocator.free
        before_bytes, reserved_bytes = allocator.allocated_bytes, allocator.reserved_bytes
        highest_bytes = peak_bytes = before_bytes
        for number, size_bytes, top_bytes in steps:
            if size_bytes:
                blocks[number] = malloc(size_bytes)
                if allocator.allocated_bytes > highest_bytes:
                    highest_bytes = allocator.allocated_bytes
            elif number:
                free(blocks.pop(number))
            if allocator.allocated_bytes + top_bytes > peak_bytes:
                peak_bytes = allocator.allocated_bytes + top_bytes
        born = tuple((block.address, block.size, block.requested) for block in blocks.values())
        taken_bytes = allocator.reserved_bytes - reserved_bytes
        change = Change(allocator.free_memory, born, taken_bytes, highest_bytes - before_bytes)
        return blocks, (change, peak_bytes - before_bytes)


def _born(player: Player, sizes: Mapping[int, int], category: Category) -> dict[int, Any]:
    return {number: player.born(size_bytes, PLACE[category]) for number, size_bytes in sizes.items() if size_bytes}


def _played(
    player: Player,
    events: Events,
    workspaces: Workspaces,
    held: Mapping[int, Any] = MappingProxyType({}),
) -> dict[int, Any]:
    """Serve a stretch, and return what is held after it, without the workspaces that are taken in it: they stay."""
    live = dict(held)
    player.play(player.made_of(events, _with_workspaces, *workspaces) if workspaces else events, live)
    return {number: storage for number, storage in live.items() if number > _FIRST_WORKSPACE}


def _with_workspaces(events: Events, *workspaces: tuple[int | None, int]) -> Events:
    found = list(events)
    for number, (after, size_bytes) in enumerate(workspaces):
        births = (at for at, event in enumerate(found, 1) if event[1] == after and event[0] > 0)
        found.insert(next(births, 0), (size_bytes, _FIRST_WORKSPACE - number, _WORKSPACES, OUTSIDE))
    return found


def _outputs(events: Events, live: frozenset[int]) -> list[int]:
    """Numbers of what a pass leaves beside gradients, in order."""
    return sorted({number for _, number, category, _ in events if category != _GRADIENTS and number in live})


def _end(player: Player, storages: Iterable[Any]) -> None:
    for storage in storages:
        player.died(storage)


def _renumbered(held: Mapping[int, Any], owned: Mapping[int, int]) -> tuple[dict[int, Any], list[Any]]:
    """Give storages that were born in an update the numbers of those of the same size that died in it.

    Returns:
        What goes on living, and what was born and has no such place: it ends with the step.
    """
    found = {number: storage for number, storage in held.items() if number in owned}
    free: dict[int, list[Any]] = {}
    for number, storage in held.items():
        if number not in owned:
            free.setdefault(storage.requested, []).append(storage)
    for number, size_bytes in owned.items():
        if number not in found and free.get(size_bytes):
            found[number] = free[size_bytes].pop()
    return found, [storage for storages in free.values() for storage in storages]
