"""Storages that are resized: FSDP2 keeps gathered blocks in storages that it resizes to nothing and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

Resized = Callable[[torch.UntypedStorage], None]


def tell_resizes(resized: Resized, undo: ExitStack) -> None:
    """Have something told of every storage that is resized from Python, which no operator shows.

    Args:
        resized: called with the storage, after it.
        undo: takes it back.

    Example:
        >>> seen = []
        >>> with ExitStack() as undo:
        ...     tell_resizes(seen.append, undo)
        ...     _ = torch.zeros(2).untyped_storage().resize_(0)
        >>> len(seen)
        1
    """
    resize = torch.UntypedStorage.resize_

    def told(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    undo.callback(setattr, torch.UntypedStorage, "resize_", resize)
    torch.UntypedStorage.resize_ = told  # type: ignore[method-assign, assignment]
