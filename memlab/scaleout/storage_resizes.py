"""Word of storages that are resized from Python, which no operator shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

Resized = Callable[[torch.UntypedStorage], None]
# one engine may begin before another has ended, so there is one stand-in for all
_resize = torch.UntypedStorage.resize_
_listeners: list[Resized] = []


def tell_resizes(resized: Resized, undo: ExitStack) -> None:
    """Have something told of every storage that is resized, until it is undone."""
    if not _listeners:
        torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign, assignment]
    _listeners.append(resized)
    undo.callback(_stop, resized)


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for resized in _listeners:
        resized(storage)
    return result


def _stop(resized: Resized) -> None:
    _listeners.remove(resized)
    if not _listeners:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
