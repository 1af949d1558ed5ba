"""Host memory that a GPU copies to and from.

Windows and WSL give a process little pinned memory (of some systems 1 GiB of 64), and report "CUDA error: out of memory"
beyond it: https://docs.nvidia.com/cuda/wsl-user-guide/#known-limitations-for-linux-cuda-apps. Copies to and from memory that is not pinned are as right,
but slower, and the host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.units import format_bytes


def pinned(size_bytes: int, say: Callable[[str], None] = lambda _line: None) -> torch.Tensor:
    """Return bytes of host memory, pinned as far as the system allows.

    Args:
        size_bytes: how many.
        say: told in a line where they are not pinned.

    Raises:
        RuntimeError: the host has no room for them either.
    """
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        if not is_out_of_memory(error) or size_bytes > _available_bytes():
            raise
    say(
        f"the system pins no more host memory ({format_bytes(size_bytes)} were asked for): what leaves the GPU goes to memory "
        "that is not pinned, and copies take longer"
    )
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def _available_bytes() -> float:
    """Bytes that the host can still give without taking them from others; unlimited where the system does not say."""
    # memory that was promised and is not there ends the process at its first use
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))
