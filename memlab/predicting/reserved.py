"""What the caching allocator would hold: a step's births and deaths replayed through its simulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memlab.allocator import Allocator, Block, Settings

# the first pass differs from the second, which adds to gradients; all that follow are like the second
_MOST_PASSES = 3

# bytes, number of the storage, category, moment
Events = Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Reserved:
    """Peaks as torch's counters would show them.

    Args:
        allocated_bytes: in blocks that hold tensors, with what rounding adds.
        reserved_bytes: in segments, live or not.
    """

    allocated_bytes: int
    reserved_bytes: int


def reserved_by(
    inputs: Iterable[int],
    owned: Mapping[int, int],
    state: Mapping[int, int],
    passes: Sequence[Events],
    last: Events,
    workspaces: Iterable[int],
    settings: Settings,
) -> Reserved:
    """Replay two steps: the first without optimizer state, which appears in its update.

    Args:
        inputs: sizes of the batch's tensors, in bytes.
        owned: sizes of what lives throughout, by number in the last stretch.
        state: sizes of optimizer state, likewise.
        passes: stretches of a step but the last: bytes, number of the storage, category, moment of each event.
        last: the last stretch, which may replace what is owned.
        workspaces: sizes of what libraries allocate once, at the first pass.
        settings: of the allocator.
    """
    allocator = Allocator(settings)
    held = {number: [allocator.malloc(size_bytes)] for number, size_bytes in owned.items() if size_bytes}
    for size_bytes in inputs:
        _take(allocator, size_bytes)
    repeated = passes if len(passes) <= _MOST_PASSES else [*passes[: _MOST_PASSES - 1], passes[-1]]
    for step in range(2):
        if step == 0:
            for size_bytes in workspaces:
                _take(allocator, size_bytes)
        left: list[Block] = []
        for events in repeated:
            live: dict[int, list[Block]] = {}
            _replay(allocator, events, live)
            left += _blocks(live)
        if step == 0:
            held |= {number: [allocator.malloc(size_bytes)] for number, size_bytes in state.items() if size_bytes}
        _replay(allocator, last, held)
        if step == 0:
            # what an update leaves in place of what it found counts again from there
            held = _renumbered(held, {**owned, **state})
        for block in left:
            allocator.free(block)
    statistics = allocator.stats()
    return Reserved(statistics.peak_allocated_bytes, statistics.peak_reserved_bytes)


def _take(allocator: Allocator, size_bytes: int) -> None:
    if size_bytes:
        allocator.malloc(size_bytes)


def _replay(allocator: Allocator, events: Events, live: dict[int, list[Block]]) -> None:
    """Serve births and deaths; `live` holds the blocks in use, by number of the storage."""
    for size_bytes, number, _, _ in events:
        if size_bytes > 0:
            live.setdefault(number, []).append(allocator.malloc(size_bytes))
        elif live.get(number):
            allocator.free(live[number].pop())


def _blocks(live: Mapping[int, list[Block]]) -> Iterator[Block]:
    for blocks in live.values():
        yield from blocks


def _renumbered(held: Mapping[int, list[Block]], owned: Mapping[int, int]) -> dict[int, list[Block]]:
    """Give blocks that were born in an update the numbers of those of the same size that died in it."""
    found = {number: list(blocks) for number, blocks in held.items() if number in owned and blocks}
    free: dict[int, list[Block]] = {}
    for number, blocks in held.items():
        if number not in owned:
            for block in blocks:
                free.setdefault(block.requested, []).append(block)
    for number, size_bytes in owned.items():
        if number not in found and free.get(size_bytes):
            found[number] = [free[size_bytes].pop()]
    left = [block for blocks in free.values() for block in blocks]
    return found | {-1 - place: [block] for place, block in enumerate(left)}
