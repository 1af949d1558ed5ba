"""Traces recorded on a GPU, replayed through the allocator's simulator.

A recording has what the program asked for (alloc, free) and what torch's allocator did about it (segments): the
first is replayed, the second is what the simulator is held to. Without recordings in the repository, a trace made by
the simulator itself shows that the replay can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memlab.allocator import Action, Allocator, Block, Settings
from tests.golden.record import STEPS, read, recordings

MIB = 2**20

Recorded = Sequence[Any]
needs_recordings = pytest.mark.skipif(
    not recordings(), reason="no trace of a GPU in tests/golden: run `python -m tests.golden.record` on one"
)


def replayed(events: Sequence[Recorded], settings: Settings) -> Allocator:
    """Serve what a recording asked for."""
    allocator = Allocator(settings, history=True)
    live: dict[int, Block] = {}
    for action, address, size_bytes, stream in events:
        if action == Action.ALLOC:
            live[address] = allocator.malloc(size_bytes, stream)
        elif action == Action.FREE_COMPLETED:
            allocator.free(live.pop(address))
    return allocator


def segments_in(events: Sequence[Recorded]) -> list[tuple[str, int]]:
    """Segments taken from the driver and given back, in order."""
    return [(str(action), size) for action, _, size, _ in events if str(action).startswith("segment_")]


def assert_simulated(recorded: dict[str, Any]) -> None:
    """Hold the simulator to a recording."""
    settings = Settings.parse(recorded["settings"])
    allocator = replayed(recorded["events"], settings)
    counters = recorded["counters"][-1]
    assert allocator.peak_allocated_bytes == counters["allocated_bytes.all.peak"]
    assert allocator.peak_reserved_bytes == counters["reserved_bytes.all.peak"]
    mine = segments_in([(entry.action, entry.address, entry.size, entry.stream) for entry in allocator.history])
    assert mine == segments_in(recorded["events"])


@needs_recordings
@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_simulator_does_what_the_gpu_did(path: Path) -> None:
    recorded = read(path)
    assert len(recorded["counters"]) == STEPS
    assert recorded["versions"]["torch"]
    assert_simulated(recorded)


# -- the replay itself, on a trace of the simulator --------------------------------------------


def made_up() -> dict[str, Any]:
    """A recording as torch would write it, of a program with splits, a freed segment and reuse."""
    allocator = Allocator(history=True)
    sizes = [300, 3 * MIB, 15 * MIB, 700_000, 30 * MIB, 5 * MIB]
    for _ in range(2):
        blocks = [allocator.malloc(size_bytes) for size_bytes in sizes]
        for block in blocks[::2]:
            allocator.free(block)
        blocks[::2] = [allocator.malloc(size_bytes) for size_bytes in (2 * MIB, 12 * MIB, 25 * MIB)]
        for block in blocks:
            allocator.free(block)
    peaks = {
        "allocated_bytes.all.peak": allocator.peak_allocated_bytes,
        "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
    }
    events = [[str(entry.action), entry.address, entry.size, entry.stream] for entry in allocator.history]
    return {"settings": "", "counters": [peaks], "events": events}


def test_a_recording_of_the_simulator_is_repeated() -> None:
    assert_simulated(made_up())


@pytest.mark.parametrize("counter", ["allocated_bytes.all.peak", "reserved_bytes.all.peak"])
def test_another_peak_is_noticed(counter: str) -> None:
    recorded = made_up()
    recorded["counters"][-1][counter] += 512
    with pytest.raises(AssertionError):
        assert_simulated(recorded)


def test_another_order_of_segments_is_noticed() -> None:
    recorded = made_up()
    places = [place for place, event in enumerate(recorded["events"]) if event[0] == "segment_alloc"]
    events = recorded["events"]
    events[places[0]], events[places[-1]] = events[places[-1]], events[places[0]]
    with pytest.raises(AssertionError):
        assert_simulated(recorded)
