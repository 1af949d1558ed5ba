"""What else on the machine explains that a GPU is full, or has room: other processes, idle GPUs, Windows.

torch's errors name the processes on a GPU. NVIDIA's own program is asked for the other GPUs, since torch would take memory
of each one that it looks at; only once memory has run out.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch

from memlab.runtime.out_of_memory import PRINTED_SIZE, printed_bytes
from memlab.units import MIB, format_bytes

_PROCESS = re.compile(rf"\bProcess (\d+) has {PRINTED_SIZE} memory in use")
_IDLE_SHARE = 0.9  # of a GPU that is free; displays take some
_SMI = ["nvidia-smi", "--query-gpu=uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]


def is_shared_with_windows() -> bool:
    """Return whether Windows manages the GPU, also for WSL: a full one goes on in the memory of the host, and reports nothing."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def other_processes(error: str) -> Mapping[int, int]:
    """Return the bytes of each other process on a GPU, by its number, as torch's out-of-memory error has them, the largest first.

    Example:
        >>> other_processes("GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. Process 42 has 6.00 GiB memory in use.")
        {42: 6442450944}
    """
    found = {int(number): printed_bytes(size) for number, size in _PROCESS.findall(error)}
    # under WSL sizes are not known, and the greatest number there is stands for them
    known = {number: size_bytes for number, size_bytes in found.items() if size_bytes < 2**50}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def held_by_others(error: str) -> str:
    """Return who else holds memory of the GPU that an error is about, in words; empty where torch names nobody.

    Example:
        >>> held_by_others("Process 42 has 6.00 GiB memory in use. Process 7 has 1.00 GiB memory in use.")
        'process 42 holds 6.00 GiB of this GPU, process 7 1.00 GiB'
    """
    held = [
        f"process {number} holds {format_bytes(size_bytes)}" for number, size_bytes in other_processes(error).items()
    ]
    if not held:
        return ""
    return ", ".join([f"{held[0]} of this GPU", *(each.replace(" holds", "") for each in held[1:])])


def idle_gpus(device: torch.device) -> Sequence[tuple[int, int]]:
    """Return the GPUs beside one that nobody uses, and their free bytes; none where NVIDIA's program is missing or does not answer."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return ()
    current = torch.cuda.current_device() if device.index is None else device.index
    free = _free_by_uuid()
    found = []
    for index in range(torch.cuda.device_count()):
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        free_bytes, total_bytes = free.get(uuid.removeprefix("GPU-"), (0, 1))
        if index != current and free_bytes >= _IDLE_SHARE * total_bytes:
            found.append((index, free_bytes))
    return found


def _free_by_uuid() -> Mapping[str, tuple[int, int]]:
    """Free and total bytes of each GPU of the machine."""
    try:
        answer = subprocess.run(_SMI, capture_output=True, text=True, timeout=5, check=True).stdout  # noqa: S603 - a constant
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in answer.splitlines():
        uuid, *sizes = (part.strip() for part in line.split(","))
        if len(sizes) == 2 and all(size.isdecimal() for size in sizes):
            used, total = sizes
            found[uuid.removeprefix("GPU-")] = ((int(total) - int(used)) * MIB, int(total) * MIB)
    return found


def room_elsewhere(device: torch.device) -> str:
    """Return which GPU beside a full one is idle, in words; empty for none."""
    idle = idle_gpus(device)
    if not idle:
        return ""
    index, free_bytes = max(idle, key=lambda each: each[1])
    return f"GPU {index} is idle ({format_bytes(free_bytes)} free): model.to('cuda:{index}') before its optimizer is made trains there"
