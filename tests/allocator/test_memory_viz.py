"""Saved replays have the shape of torch's snapshots, and torch's own viewer reads them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.cuda import _memory_viz

from memlab.allocator import Allocator, Context, Settings, memory_viz
from memlab.units import MIB

BOTH_MODES = pytest.mark.parametrize("text", ["", "expandable_segments:True"])


def replayed(text: str) -> Allocator:
    allocator = Allocator(Settings.parse(text), history=True)
    allocator.set_time(0.001)
    first = allocator.malloc(5 * MIB, context=Context(("forward",), "parameters"))
    allocator.malloc(700)
    allocator.malloc(30 * MIB, stream=7)
    allocator.free(first)
    allocator.malloc(40 * MIB)
    return allocator


@BOTH_MODES
def test_the_shape(text: str) -> None:
    viz = memory_viz(replayed(text))
    assert list(viz) == ["segments", "device_traces", "allocator_settings", "external_annotations"]
    assert len(viz["device_traces"]) == 1
    for segment in viz["segments"]:
        assert set(segment) == {
            "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream",
            "segment_type", "segment_pool_id", "is_expandable", "frames", "blocks",
        }  # fmt: skip
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert segment["is_expandable"] == bool(text)
        for block in segment["blocks"]:
            assert set(block) == {"address", "size", "requested_size", "state", "frames"}
            assert block["state"] in ("active_allocated", "inactive")
    addresses = [segment["address"] for segment in viz["segments"]]
    assert addresses == sorted(addresses)


def test_the_trace() -> None:
    trace = memory_viz(replayed(""))["device_traces"][0]
    assert [entry["action"] for entry in trace] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "segment_alloc", "alloc",
        "free_requested", "free_completed", "segment_alloc", "alloc",
    ]  # fmt: skip
    assert trace[1] == {
        "action": "alloc",
        "addr": trace[0]["addr"],
        "size": 5 * MIB,
        "stream": 0,
        "compile_context": "N/A",
        "user_metadata": "parameters",
        "frames": [{"filename": "memlab", "line": 0, "name": "forward"}],
        "time_us": 1000,
        "pool_id": (0, 0),
    }
    # blocks carry what was requested, segments all of their bytes
    assert (trace[2]["size"], trace[3]["size"]) == (2 * MIB, 700)
    assert trace[4]["stream"] == trace[5]["stream"] == 7
    assert trace[7]["frames"] == trace[1]["frames"]


def test_the_settings() -> None:
    allocator = Allocator(Settings.parse("max_split_size_mb:64,roundup_power2_divisions:[2:4,>:1]"))
    assert memory_viz(allocator)["allocator_settings"] == {
        "PYTORCH_CUDA_ALLOC_CONF": allocator.settings.text,
        "max_split_size": 64 * MIB,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {"1": 4, "2": 4} | {str(2**i): 1 for i in range(2, 16)},
    }
    assert memory_viz(Allocator())["allocator_settings"]["max_split_size"] == -1


def test_no_history_no_trace() -> None:
    allocator = Allocator()
    allocator.malloc(1)
    viz = memory_viz(allocator)
    assert viz["device_traces"] == [[]]
    assert len(viz["segments"]) == 1


@pytest.fixture(params=["", "expandable_segments:True"])
def saved(request: pytest.FixtureRequest) -> Any:
    return pickle.loads(pickle.dumps(memory_viz(replayed(request.param))))


def test_torch_sums_up_the_segments(saved: Any) -> None:
    summary = _memory_viz.segsum(saved)
    assert f"segments: {len(saved['segments'])}" in summary
    reserved = sum(segment["total_size"] for segment in saved["segments"])
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in summary
    in_use = 700 + 30 * MIB + 40 * MIB
    assert f"total_allocated: {_memory_viz.Bytes(in_use)}" in summary


def test_torch_prints_the_trace(saved: Any) -> None:
    printed = _memory_viz.trace(saved)
    assert f"{len(saved['device_traces'][0])} entries" in printed
    assert printed.count("free completed") == 1
    assert "del " in printed


def test_torch_plots_the_trace(saved: Any) -> None:
    for html in (
        _memory_viz.trace_plot(saved),
        _memory_viz.trace_plot(saved, plot_segments=True),
        _memory_viz.trace_plot(saved, filter_freed=True),
        _memory_viz.segment_plot(saved),
    ):
        assert "add_local_files" in html
