"""Requests of a program to the allocator: storages that are made and freed."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.allocator.history import Frame


@dataclass(frozen=True, slots=True)
class Event:
    """A storage is born (positive bytes) or freed (negative bytes). Zero bytes never reach the allocator.

    Args:
        storage: number of the storage; its birth and its death carry the same one.
        size_bytes: bytes gained or lost.
        stream: number of the CUDA stream, 0 for the default one.
        seconds: when it happened.
        frames: lines of code it came from, the innermost first.
        label: words for the memory viewer, such as the category of the storage.
    """

    storage: int
    size_bytes: int
    stream: int = 0
    seconds: float = 0.0
    frames: tuple[Frame, ...] = ()
    label: str = ""
