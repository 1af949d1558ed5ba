"""What this process can have of a CUDA device."""

from __future__ import annotations

import torch


def allowed_share(device: torch.device) -> float:
    """Return the share of a device that the allocator of this process may reserve; torch 2.6 cannot say, and 1 is returned."""
    return float(getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)(device))


def most_bytes(device: torch.device) -> int:
    """Return what the allocator of this process has reserved or could still reserve, in bytes."""
    # not `memory_reserved`: it flattens hundreds of counters on every call
    counters = torch.cuda.memory_stats_as_nested_dict(device)
    reserved: int = counters.get("reserved_bytes", {}).get("all", {}).get("current", 0)
    free, total = torch.cuda.mem_get_info(device)
    return int(min(reserved + free, allowed_share(device) * total))
