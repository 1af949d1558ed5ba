"""Actions of the allocator (`Entry`), as torch records them."""

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


@dataclass(frozen=True, slots=True)
class Context:
    """Origin of a request."""

    frames: tuple[str, ...] = ()  # names that stand where the viewer shows functions, the innermost first
    label: str = ""  # words of the caller's own, shown by the viewer as user metadata


NO_CONTEXT = Context()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the history."""

    action: Action  # what happened
    address: int  # where
    size: int  # requested bytes of a block, all bytes of a segment or of pages
    stream: int  # on which stream
    seconds: float  # when, as `Allocator.set_time` says it
    context: Context  # where the request came from


class EventHistory:
    """Entries in order; does nothing unless it is switched on."""

    __slots__ = ("entries", "on", "seconds")

    def __init__(self, on: bool) -> None:
        self.on = on
        self.seconds = 0.0
        self.entries: list[Entry] = []

    def add(self, action: Action, address: int, size: int, stream: int, context: Context = NO_CONTEXT) -> None:
        if self.on:
            self.entries.append(Entry(action, address, size, stream, self.seconds, context))
