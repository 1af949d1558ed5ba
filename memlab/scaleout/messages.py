"""Messages from ranks to the process that started them: one JSON line each, appended to a file of the rank's own.

A file survives the rank that wrote it, and needs neither a port nor a thread. What was heard says of a failed run which
rank failed, in which step, and how.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlab.errors import ScaleError
from memlab.records import StepRecord

STARTED, STEP, SAID, DONE, FAILED = "started", "step", "said", "done", "failed"


@dataclass(frozen=True)
class Message:
    """One message."""

    rank: int  # who sent it
    kind: str  # STARTED, STEP, SAID, DONE or FAILED
    at: float  # when, in seconds since 1970
    content: dict[str, Any] = field(default_factory=dict)  # what it says, by name; plain values


class Sender:
    """A rank's way to say something."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")

    def say(self, kind: str, **content: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "at": time.time(), **content}) + "\n")
        self._file.flush()


class MessageReader:
    """Reads what all ranks have said since it was last asked."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._paths = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
        self._read = [0] * ranks

    def news(self) -> Iterator[Message]:
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                lines = file.read()
            complete = lines[: lines.rfind(b"\n") + 1]
            self._read[rank] += len(complete)
            for line in complete.splitlines():
                content = json.loads(line)
                yield Message(rank, content.pop("kind"), content.pop("at"), content)


_MOST_LINES = 12
_UNCHANGED = "nothing here has changed"


@dataclass
class RunStatus:
    """Messages of the ranks so far."""

    started: set[int] = field(default_factory=set)
    steps: list[StepRecord] = field(default_factory=list)
    reached: dict[int, int] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failed: list[Message] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)


def failure(status: RunStatus, nproc: int, log: str) -> ScaleError:
    """The error of a run in which not all ranks were done; `log` is what they have printed."""
    # ranks that lose a peer fail as well, and some say so before anybody knows that the peer is dead
    said = {message.rank for message in status.failed}
    silent = {rank: code for rank, code in status.exit_codes.items() if rank not in said | status.done}
    if not silent:
        return _said_failure(min(status.failed, key=lambda message: message.at), status, nproc)
    rank = min(silent)
    error = ScaleError(f"rank {rank} of {nproc} {_ended_with(silent[rank])}{_at_step(status, rank)}; {_UNCHANGED}")
    error.add_note("\n".join(log.strip().splitlines()[-_MOST_LINES:]))
    return error


def _said_failure(first: Message, status: RunStatus, nproc: int) -> ScaleError:
    how = "ran out of memory" if first.content["ran_out"] else "failed"
    error = ScaleError(
        f"rank {first.rank} of {nproc} {how}{_at_step(status, first.rank)}: {first.content['error']}: "
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


def _at_step(status: RunStatus, rank: int) -> str:
    reached = status.reached.get(rank, 0)
    return f" in step {reached + 1}" if reached else " before its first step ended"


def hung(status: RunStatus, nproc: int, hang_seconds: float) -> str:
    """Return what is said of a run that was given up since all ranks were silent for so long."""
    if not status.started:
        return f"no rank has started within {hang_seconds:g} s; {_UNCHANGED}"
    slowest = min(range(nproc), key=lambda rank: status.reached.get(rank, 0))
    steps = ", ".join(f"rank {rank}: {status.reached.get(rank, 0)}" for rank in range(nproc))
    return (
        f"all ranks have been silent for {hang_seconds:g} s and were ended (steps done: {steps}): rank {slowest} may wait "
        f"for the others in code that only some ranks run, or a step takes longer: raise hang_seconds; {_UNCHANGED}"
    )
