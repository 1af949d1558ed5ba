"""Loops that treat all their items alike, of which a trace runs a few rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_told = threading.local()


def rounds(items: Sequence[_Item]) -> Iterator[_Item]:
    """Yield the items of a loop, all of which but the last are alike; to a trace (`rounds_told_to`), those that it asks for.

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
