"""A replay in the format of torch's memory viewer, as `torch.cuda.memory._dump_snapshot` writes it.

The file opens at https://docs.pytorch.org/memory_viz and with the functions of `torch.cuda._memory_viz`. Its shape
is that of `torch/csrc/cuda/memory_snapshot.cpp`, function `_memory_snapshot_pickled`.
"""

from __future__ import annotations

from typing import Any

from memlab.allocator.allocator import Allocator
from memlab.allocator.blocks import MemorySegment, SegmentBlock
from memlab.allocator.history import Context, Entry
from memlab.allocator.settings import Settings
from memlab.allocator.sizes import UNLIMITED_BYTES

_DEFAULT_POOL = (0, 0)
_NO_COMPILE_CONTEXT = "N/A"


def memory_viz(allocator: Allocator) -> dict[str, Any]:
    """The allocator's segments and history as the memory viewer's dictionary.

    Args:
        allocator: made with `history=True`, or the viewer has no timeline to show.
    """
    return {
        "segments": [_segment(segment) for segment in allocator.snapshot()],
        "device_traces": [[_entry(entry) for entry in allocator.history]],
        "allocator_settings": _settings(allocator.settings),
        "external_annotations": [],
    }


def _segment(segment: MemorySegment) -> dict[str, Any]:
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": segment.allocated,
        "active_size": segment.allocated,
        "requested_size": segment.requested,
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": _DEFAULT_POOL,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [_block(block) for block in segment.blocks],
    }


def _block(block: SegmentBlock) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": "active_allocated" if block.allocated else "inactive",
        "frames": _frames(block.context),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "action": str(entry.action),
        "addr": entry.address,
        "size": entry.size,
        "stream": entry.stream,
        "compile_context": _NO_COMPILE_CONTEXT,
        "user_metadata": entry.context.label,
        "frames": _frames(entry.context),
        "time_us": round(entry.seconds * 1_000_000),
        "pool_id": _DEFAULT_POOL,
    }


def _frames(context: Context) -> list[dict[str, Any]]:
    return [{"filename": "memlab", "line": 0, "name": name} for name in context.frames]


def _settings(settings: Settings) -> dict[str, Any]:
    split = settings.max_split_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.text,
        "max_split_size": -1 if split == UNLIMITED_BYTES else split,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {
            str(1 << interval): parts for interval, parts in enumerate(settings.roundup_power2_divisions)
        },
    }
