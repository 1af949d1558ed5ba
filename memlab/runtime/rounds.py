"""Loops that write to tensors piece by piece, all pieces but the last alike: a trace runs a few rounds of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_told = threading.local()


def rounds(items: Sequence[_Item]) -> Iterator[_Item]:
    """Yield the pieces; to a trace (`rounds_told_to`), those that it asks for. What a round makes must not be kept beyond the next.

    Example:
        >>> [*rounds([slice(0, 4), slice(4, 8), slice(8, 9)])]
        [slice(0, 4, None), slice(4, 8, None), slice(8, 9, None)]
    """
    choose = getattr(_told, "choose", None)
    yield from items if choose is None else choose(items)


@contextmanager
def rounds_told_to(choose: Callable[[Sequence[Any]], Iterator[Any]]) -> Iterator[None]:
    """Context in which somebody chooses, on this thread, which rounds are run, and knows what the others would do."""
    _told.choose = choose
    try:
        yield
    finally:
        _told.choose = None
