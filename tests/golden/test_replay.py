"""Traces recorded on a GPU, replayed through the allocator's simulator.

A recording has what the program asked for (alloc, free) and what torch's allocator did about it (segments): the
first is replayed, the second is what the simulator is held to. Without recordings in the repository, a trace made by
the simulator itself shows that the replay can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from memlab.allocator import Action, Allocator, Block, Settings
from memlab.allocator.blocks import DeviceMemory
from tests.golden.record import STEPS, read, recordings

MIB = 2**20

Recorded = Sequence[Any]
_GIVEN_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
needs_recordings = pytest.mark.skipif(
    not recordings(), reason="no trace of a GPU in tests/golden: run `python -m tests.golden.record` on one"
)


def replayed(recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Serve what a recording asked for; before torch 2.13 in segments where the driver put them, as their order decides."""
    events, settings = recorded["events"], Settings.parse(recorded["settings"])
    addresses = iter([address for action, address, *_ in events if action == Action.SEGMENT_ALLOC])
    allocator, live, before = Allocator(settings, history=True), dict[int, Block](), ""
    with monkeypatch.context() as patch:
        if tuple(map(int, recorded["versions"]["torch"].split(".")[:2])) < (2, 13) and not settings.expandable_segments:
            patch.setattr(DeviceMemory, "new_addresses", lambda _device, _size: next(addresses))
        for action, address, size_bytes, stream in events:
            if action == Action.ALLOC:
                live[address] = allocator.malloc(size_bytes, stream)
            elif action == Action.FREE_COMPLETED:
                allocator.free(live.pop(address))
            elif (
                action in _GIVEN_BACK and before not in _GIVEN_BACK
            ):  # the first of those that `empty_cache` gives back
                allocator.empty_cache()
            before = action
    return allocator


def segments_in(events: Sequence[Recorded]) -> list[tuple[str, int]]:
    """Segments taken from the driver and given back, in order; those that go at once by size."""
    found = [(str(action), size) for action, _, size, _ in events if str(action).startswith("segment_")]
    together = (list(each) for _, each in groupby(found, key=lambda segment: segment[0]))
    return [segment for each in together for segment in (sorted(each) if each[0][0] in _GIVEN_BACK else each)]


def assert_simulated(recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the simulator to a recording."""
    allocator = replayed(recorded, monkeypatch)
    counters = recorded["counters"][-1]
    assert allocator.peak_allocated_bytes == counters["allocated_bytes.all.peak"]
    assert allocator.peak_reserved_bytes == counters["reserved_bytes.all.peak"]
    mine = segments_in([(entry.action, entry.address, entry.size, entry.stream) for entry in allocator.history])
    assert mine == segments_in(recorded["events"])


@needs_recordings
@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_simulator_does_what_the_gpu_did(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = read(path)
    assert len(recorded["counters"]) == STEPS
    assert recorded["versions"]["torch"]
    assert_simulated(recorded, monkeypatch)


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
    return {"settings": "", "versions": {"torch": "2.13.0"}, "counters": [peaks], "events": events}


def test_a_recording_of_the_simulator_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_simulated(made_up(), monkeypatch)


@pytest.mark.parametrize("counter", ["allocated_bytes.all.peak", "reserved_bytes.all.peak"])
def test_another_peak_is_noticed(counter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made_up()
    recorded["counters"][-1][counter] += 512
    with pytest.raises(AssertionError):
        assert_simulated(recorded, monkeypatch)


def test_another_order_of_segments_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made_up()
    places = [place for place, event in enumerate(recorded["events"]) if event[0] == "segment_alloc"]
    events = recorded["events"]
    events[places[0]], events[places[-1]] = events[places[-1]], events[places[0]]
    with pytest.raises(AssertionError):
        assert_simulated(recorded, monkeypatch)
