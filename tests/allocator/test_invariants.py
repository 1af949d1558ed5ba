"""What holds after every step of any program, in both modes, with and without a limit."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.allocator import Action, Allocator, Block, DoesNotFitError, MemorySegment, Settings
from memlab.allocator.sizes import round_size
from memlab.units import KIB, MIB

CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "expandable_segments:True,max_split_size_mb:32",
    "roundup_power2_divisions:[4:4,>:2],large_segment_size_mb:24",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
    "expandable_segments:True,garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
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
CAPACITIES = st.none() | st.integers(20, 200).map(lambda mebibytes: mebibytes * MIB)


def run(simulated: Allocator, steps: list[object]) -> list[tuple[Block, int]]:
    """Do the steps; after each one everything must hold. Returns the blocks in use with what was asked for."""
    live: list[tuple[Block, int]] = []
    for step in steps:
        if isinstance(step, tuple):
            with contextlib.suppress(DoesNotFitError):
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
    check_statistics(simulated, segments, live)


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


def check_statistics(simulated: Allocator, segments: tuple[MemorySegment, ...], live: list[tuple[Block, int]]) -> None:
    statistics = simulated.stats()
    assert statistics.reserved_bytes == sum(segment.size for segment in segments)
    assert statistics.allocated_bytes == sum(block.size for block, _ in live)
    assert statistics["requested_bytes.all.current"] == sum(requested for _, requested in live)
    assert statistics.reserved_bytes >= statistics.allocated_bytes >= statistics["requested_bytes.all.current"]
    assert statistics["allocation.all.current"] == statistics["active.all.current"] == len(live)
    if not simulated.settings.expandable_segments:
        idle = [block for s in segments for block in s.blocks if not block.allocated and len(s.blocks) > 1]
        assert statistics["inactive_split_bytes.all.current"] == sum(block.size for block in idle)
        assert statistics["inactive_split.all.current"] == len(idle)
        assert statistics["segment.all.current"] == len(segments)
    check_sums(statistics.values)


def check_sums(values: dict[str, int]) -> None:
    parts: dict[str, dict[str, int]] = defaultdict(dict)
    for name, value in values.items():
        statistic, _, part = name.rpartition(".")
        parts[statistic][part] = value
    for statistic, numbers in parts.items():
        if statistic:
            assert numbers["current"] == numbers["allocated"] - numbers["freed"]
            assert 0 <= numbers["current"] <= numbers["peak"] <= numbers["allocated"]
        if statistic.endswith(".all"):
            pools = [parts[f"{statistic.removesuffix('all')}{pool}_pool"] for pool in ("small", "large")]
            assert numbers["current"] == sum(pool["current"] for pool in pools)
            assert max(pool["peak"] for pool in pools) <= numbers["peak"] <= sum(pool["peak"] for pool in pools)


@EVERY
@given(steps=STEPS, capacity=CAPACITIES)
@settings(max_examples=60)
def test_any_program(text: str, steps: list[object], capacity: int | None) -> None:
    simulated = Allocator(Settings.parse(text), capacity)
    live = run(simulated, steps)
    assert capacity is None or simulated.stats().peak_reserved_bytes <= capacity
    for block, _ in live:
        simulated.free(block)
    check(simulated, [])
    simulated.empty_cache()
    assert simulated.snapshot() == ()
    assert simulated.stats().reserved_bytes == simulated.stats().allocated_bytes == 0
    assert simulated.stats()["num_device_alloc"] == 0 or simulated.stats()["num_device_free"] > 0


@EVERY
@given(steps=STEPS, capacity=CAPACITIES)
@settings(max_examples=30)
def test_the_history_tells_the_whole_story(text: str, steps: list[object], capacity: int | None) -> None:
    """Bytes added up from the entries alone are what the statistics say, and the most of them is the peak."""
    simulated = Allocator(Settings.parse(text), capacity, history=True)
    run(simulated, steps)
    signs = {
        Action.SEGMENT_ALLOC: 1, Action.SEGMENT_MAP: 1, Action.SEGMENT_FREE: -1, Action.SEGMENT_UNMAP: -1,
    }  # fmt: skip
    reserved = [0]
    requested = 0
    for entry in simulated.history:
        reserved.append(reserved[-1] + signs.get(entry.action, 0) * entry.size)
        requested += {Action.ALLOC: 1, Action.FREE_COMPLETED: -1}.get(entry.action, 0) * entry.size
    statistics = simulated.stats()
    assert reserved[-1] == statistics.reserved_bytes
    assert max(reserved) == statistics.peak_reserved_bytes
    assert requested == statistics["requested_bytes.all.current"]
    assert sum(entry.action is Action.OOM for entry in simulated.history) == statistics["num_ooms"]


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
    first, second = (Allocator(Settings.parse(text), 150 * MIB) for _ in range(2))
    run(first, steps)
    run(second, steps)
    assert first.stats() == second.stats()
    assert first.snapshot() == second.snapshot()
