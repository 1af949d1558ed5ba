"""What holds after every step of any program, in both modes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.allocator import Action, Allocator, Block, Change, MemorySegment, Settings
from memlab.allocator.sizes import round_size
from memlab.units import KIB, MIB

CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "expandable_segments:True,max_split_size_mb:32",
    "roundup_power2_divisions:[4:4,>:2],large_segment_size_mb:24",
)
EVERY = pytest.mark.parametrize("text", CONFIGURATIONS)

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(256 * KIB, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(9 * MIB, 80 * MIB),
)
# a step is a request (size, stream), the number of a block to free, or the cache given back
STEPS = st.lists(
    st.one_of(
        # twice, so that programs hold on to more than they free
        st.tuples(SIZES, st.integers(0, 1)),
        st.tuples(SIZES, st.just(0)),
        st.integers(0, 40),
        st.just("empty cache"),
    ),
    min_size=10,
    max_size=60,
)


def run(simulated: Allocator, steps: list[object]) -> list[tuple[Block, int]]:
    """Do the steps; after each one everything must hold. Returns the blocks in use with what was asked for."""
    live: list[tuple[Block, int]] = []
    for step in steps:
        if isinstance(step, tuple):
            live.append((simulated.malloc(*step), step[0]))
        elif isinstance(step, int) and live:
            simulated.free(live.pop(step % len(live))[0])
        elif step == "empty cache":
            simulated.empty_cache()
        check(simulated, live)
    return live


def check(simulated: Allocator, live: list[tuple[Block, int]]) -> None:
    segments = simulated.snapshot()
    check_layout(segments)
    check_live_blocks(segments, live)
    assert simulated.reserved_bytes == sum(segment.size for segment in segments)
    assert simulated.allocated_bytes == sum(block.size for block, _ in live)
    assert simulated.peak_reserved_bytes >= simulated.reserved_bytes >= simulated.allocated_bytes
    assert simulated.peak_reserved_bytes >= simulated.peak_allocated_bytes >= simulated.allocated_bytes


def check_layout(segments: tuple[MemorySegment, ...]) -> None:
    for one, other in pairwise(segments):
        assert one.address + one.size <= other.address
    for segment in segments:
        for block, following in pairwise(segment.blocks):
            assert block.address + block.size == following.address
            assert block.allocated or following.allocated, "two free neighbours that did not merge"
        assert all(block.size > 0 and block.size % 512 == 0 for block in segment.blocks)


def check_live_blocks(segments: tuple[MemorySegment, ...], live: list[tuple[Block, int]]) -> None:
    in_use = {block.address: block for segment in segments for block in segment.blocks if block.allocated}
    assert len(in_use) == len(live)
    for block, requested in live:
        assert in_use[block.address].size == block.size >= requested
        assert in_use[block.address].requested == requested


@EVERY
@given(steps=STEPS)
@settings(max_examples=60)
def test_any_program(text: str, steps: list[object]) -> None:
    simulated = Allocator(Settings.parse(text))
    live = run(simulated, steps)
    for block, _ in live:
        simulated.free(block)
    check(simulated, [])
    simulated.empty_cache()
    assert simulated.snapshot() == ()
    assert simulated.reserved_bytes == simulated.allocated_bytes == 0


@EVERY
@given(steps=STEPS)
@settings(max_examples=30)
def test_the_history_tells_the_whole_story(text: str, steps: list[object]) -> None:
    """Bytes added up from the entries alone are what the allocator says, and the most of them is the peak."""
    simulated = Allocator(Settings.parse(text), history=True)
    live = run(simulated, steps)
    signs = {
        Action.SEGMENT_ALLOC: 1, Action.SEGMENT_MAP: 1, Action.SEGMENT_FREE: -1, Action.SEGMENT_UNMAP: -1,
    }  # fmt: skip
    reserved = [0]
    requested = 0
    for entry in simulated.history:
        reserved.append(reserved[-1] + signs.get(entry.action, 0) * entry.size)
        requested += {Action.ALLOC: 1, Action.FREE_COMPLETED: -1}.get(entry.action, 0) * entry.size
    assert reserved[-1] == simulated.reserved_bytes
    assert max(reserved) == simulated.peak_reserved_bytes
    assert requested == sum(size for _, size in live)


@given(steps=STEPS, size=SIZES)
@settings(max_examples=60)
def test_the_best_fit_is_found(steps: list[object], size: int) -> None:
    """What a search through all blocks finds is what the ordered lists find."""
    simulated = Allocator()
    run(simulated, steps)
    rounded = round_size(size, simulated.settings.roundup_power2_divisions)
    fitting = [
        (block.size, block.address)
        for segment in simulated.snapshot()
        if segment.stream == 0 and segment.is_small == (rounded <= MIB)
        for block in segment.blocks
        if not block.allocated and block.size >= rounded
    ]
    known = {segment.address for segment in simulated.snapshot()}
    block = simulated.malloc(size)
    assert block.address == min(fitting)[1] if fitting else block.address not in known


@EVERY
@given(steps=STEPS)
@settings(max_examples=20)
def test_the_same_program_gives_the_same_numbers(text: str, steps: list[object]) -> None:
    first, second = (Allocator(Settings.parse(text)) for _ in range(2))
    run(first, steps)
    run(second, steps)
    assert first.peak_reserved_bytes == second.peak_reserved_bytes
    assert first.snapshot() == second.snapshot()


@given(steps=STEPS, before=st.lists(st.integers(MIB + 1, 40 * MIB), max_size=8), kept=st.sets(st.integers(0, 3)))
@settings(max_examples=60)
def test_what_was_done_to_the_same_free_memory_is_done_again(
    steps: list[object], before: list[int], kept: set[int]
) -> None:
    """Counters, layout and what comes afterwards are as if every request had been served."""
    served, changed = Allocator(), Allocator()
    for each in (served, changed):
        blocks = [each.malloc(size) for size in before]
        for block in blocks[::2]:
            each.free(block)
    free, allocated, reserved = served.free_memory, served.allocated_bytes, served.reserved_bytes
    assert changed.free_memory == free
    served.reset_peaks()
    changed.reset_peaks()
    blocks = [served.malloc(size * MIB) for size in (3, 30, 2, 7)]
    for number, block in enumerate(blocks):
        if number not in kept:
            served.free(block)
    born = [block for number, block in enumerate(blocks) if number in kept]
    told = tuple((block.address, block.size, block.requested) for block in born)
    most = served.peak_allocated_bytes - allocated
    again = changed.change(Change(served.free_memory, told, served.reserved_bytes - reserved, most))
    assert changed.free_memory == served.free_memory
    assert [block.address for block in again] == [block.address for block in born]
    for each, own in ((served, born), (changed, again)):
        live = [(block, block.requested) for block in own]
        for step in steps:
            if isinstance(step, tuple):
                live.append((each.malloc(*step), step[0]))
            elif isinstance(step, int) and live:
                each.free(live.pop(step % len(live))[0])
            elif step == "empty cache":
                each.empty_cache()
    assert changed.snapshot() == served.snapshot()
    assert changed.allocated_bytes == served.allocated_bytes
    assert changed.peak_allocated_bytes == served.peak_allocated_bytes
    assert changed.peak_reserved_bytes == served.peak_reserved_bytes
