"""Runs a command so that it cannot take the machine down.

1. The memory of the command and of all that it starts is added up ten times a second; beyond the limit all of them end.
2. No process of it may have more writable memory of its own than twice the limit (RLIMIT_DATA), so that a size read from
   garbage is refused before it is written to. Memory of emulated devices does not count there, and does under 1.
3. Where the kernel runs out of memory all the same, it ends these processes first.
4. What is left at the end is ended too; processes that left their session are still children of this one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 2**30
ENDED = 137  # exit status of a command that was ended, as a shell has it after SIGKILL
_SECONDS_BETWEEN_LOOKS = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_CHILD_SUBREAPER = 36
_WORST_SCORE = "1000"


def guarded(
    command: Sequence[str], environment: Mapping[str, str], limit_bytes: int, seconds: float
) -> tuple[int, str]:
    """Run a command; returns its exit status and, where it was ended, why in words.

    Args:
        command: with its arguments.
        environment: variables it is given.
        limit_bytes: what it and its descendants may take together.
        seconds: how long it may run.

    Raises:
        FileNotFoundError: no such command.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # what this process started before is not the command's
    others = frozenset(descendants(os.getpid()))

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 * limit_bytes, 2 * limit_bytes))
        Path("/proc/self/oom_score_adj").write_text(_WORST_SCORE)

    end = time.monotonic() + seconds
    process = subprocess.Popen(command, env=dict(environment), preexec_fn=bounded)
    why = ""
    try:
        while process.poll() is None:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            used_bytes = bytes_of(descendants(os.getpid(), others), limit_bytes)
            if used_bytes > limit_bytes:
                why = f"took {used_bytes / GIB:.2f} GiB of memory, allowed are {limit_bytes / GIB:.2f} GiB (--host-gib)"
            elif time.monotonic() > end:
                why = f"took longer than {seconds / 60:g} minutes (--minutes)"
            if why:
                break
    finally:
        _end(descendants(os.getpid(), others))
        process.wait()
    return (ENDED, why) if why else (_status(process.returncode), "")


def descendants(root: int, without: frozenset[int] = frozenset()) -> list[int]:
    """Processes that a process started, and theirs; without some, and those that these started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has ended
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        of_one = [child for child in children.get(waiting.pop(), ()) if child not in without]
        found += of_one
        waiting += of_one
    return found


def bytes_of(processes: Sequence[int], limit_bytes: int) -> int:
    """Resident memory of processes; pages they share are counted once where it matters, as telling them takes time."""
    resident_bytes = sum(_resident_bytes(process) for process in processes)
    return resident_bytes if resident_bytes <= limit_bytes else sum(_own_bytes(process) for process in processes)


def _resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _own_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _end(processes: Sequence[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in processes:
        try:
            os.waitpid(process, 0)
        except ChildProcessError:
            continue


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
