"""Messages from ranks to the process that started them: one JSON line each, appended to a file of the rank's own.

A file survives the rank that wrote it, and needs neither a port nor a thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED, STEP, SAID, DONE, FAILED, ENDED = "started", "step", "said", "done", "failed", "ended"


@dataclass(frozen=True)
class Message:
    """One message.

    Args:
        rank: who sent it.
        kind: STARTED, STEP, SAID, DONE or FAILED; ENDED from the process that started the ranks, with their exit codes.
        at: when, in seconds since 1970.
        content: what it says, by name; plain values.
    """

    rank: int
    kind: str
    at: float
    content: dict[str, Any] = field(default_factory=dict)


class Sender:
    """A rank's way to say something.

    Args:
        folder: shared with the process that listens.
        rank: who speaks.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")

    def say(self, kind: str, **content: Any) -> None:
        """Send one message."""
        self._file.write(json.dumps({"kind": kind, "at": time.time(), **content}) + "\n")
        self._file.flush()


class Listener:
    """Reads what all ranks have said since it was last asked.

    Args:
        folder: shared with the ranks.
        ranks: how many there are; who started them speaks under the next number.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._paths = [folder / f"rank{rank}.jsonl" for rank in range(ranks + 1)]
        self._read = [0] * (ranks + 1)

    def news(self) -> Iterator[Message]:
        """Messages since the last call, rank by rank."""
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
