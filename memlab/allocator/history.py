"""The allocator's actions, entry by entry, as torch records them for its memory viewer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """Kinds of actions, in the words of a torch trace."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of code a request came from."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class Context:
    """Origin of a request.

    Args:
        frames: lines of code, the innermost first.
        label: words of the caller's own, shown by the viewer as user metadata.
    """

    frames: tuple[Frame, ...] = ()
    label: str = ""


NO_CONTEXT = Context()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the history.

    Args:
        action: what happened.
        address: where; for OOM the bytes the device had free.
        size: requested bytes of a block, all bytes of a segment or of pages, rounded bytes for OOM.
        stream: on which stream.
        seconds: when, on the clock of the events replayed.
        context: where the request came from.
    """

    action: Action
    address: int
    size: int
    stream: int
    seconds: float
    context: Context


class History:
    """Entries in order; does nothing unless it is switched on.

    Args:
        on: whether to keep entries.
    """

    __slots__ = ("entries", "on", "seconds")

    def __init__(self, on: bool) -> None:
        self.on = on
        self.seconds = 0.0
        self.entries: list[Entry] = []

    def add(self, action: Action, address: int, size: int, stream: int, context: Context = NO_CONTEXT) -> None:
        """Note what happened, at the present time."""
        if self.on:
            self.entries.append(Entry(action, address, size, stream, self.seconds, context))
