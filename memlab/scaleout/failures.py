"""Messages of ranks, and the description of a run that failed: which rank, in which step, how."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from memlab.errors import ScaleError
from memlab.records import StepRecord
from memlab.scaleout.messages import Message

_MOST_LINES = 12
_UNCHANGED = "nothing here has changed"


@dataclass
class Told:
    """Messages of the ranks so far."""

    pids: dict[int, int] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failed: list[Message] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)


def failure(told: Told, nproc: int, log: str) -> ScaleError:
    """The error of a run in which not all ranks were done.

    Args:
        told: what they have said.
        nproc: how many they were.
        log: what the process that started them has printed.
    """
    # ranks that lose a peer fail as well, and some say so before anybody knows that the peer is dead
    said = {message.rank for message in told.failed}
    silent = {rank: code for rank, code in told.exit_codes.items() if rank not in said | told.done}
    killed = [rank for rank, code in silent.items() if code != -signal.SIGTERM]
    if killed or (silent and not said):
        rank = min(killed or silent)
        return ScaleError(f"rank {rank} of {nproc} {_ended_with(silent[rank])}{_at_step(told, rank)}; {_UNCHANGED}")
    if told.failed:
        return _said_failure(min(told.failed, key=lambda message: message.at), told, nproc)
    error = ScaleError(f"the ranks could not be started; {_UNCHANGED}")
    error.add_note(_last_lines(log))
    return error


def _said_failure(first: Message, told: Told, nproc: int) -> ScaleError:
    how = "ran out of memory" if first.content["ran_out"] else "failed"
    error = ScaleError(
        f"rank {first.rank} of {nproc} {how}{_at_step(told, first.rank)}: {first.content['error']}: "
        f"{first.content['text']}; {_UNCHANGED}"
    )
    error.add_note(f"on rank {first.rank}:\n{first.content['traceback']}")
    return error


def _ended_with(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL: the system does so when host memory runs out)"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _at_step(told: Told, rank: int) -> str:
    reached = told.reached.get(rank, 0)
    return f" in step {reached + 1}" if reached else " before its first step ended"


def hung(told: Told, nproc: int, hang_seconds: float) -> str:
    """Return what is said of a run that was given up.

    Args:
        told: what the ranks have said.
        nproc: how many they were.
        hang_seconds: for how long all were silent.
    """
    if not told.pids:
        return f"no rank has started within {hang_seconds:g} s; {_UNCHANGED}"
    slowest = min(range(nproc), key=lambda rank: told.reached.get(rank, 0))
    steps = ", ".join(f"rank {rank}: {told.reached.get(rank, 0)}" for rank in range(nproc))
    return (
        f"all ranks have been silent for {hang_seconds:g} s and were ended (steps done: {steps}): rank {slowest} may wait "
        f"for the others in code that only some ranks run, or a step takes longer: raise hang_seconds; {_UNCHANGED}"
    )


def _last_lines(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-_MOST_LINES:])
