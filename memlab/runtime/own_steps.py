"""Training steps that memlab makes itself, to measure or to predict: none of the loop's rules are held against them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_are_own: ContextVar[bool] = ContextVar("_are_own", default=False)


@contextmanager
def own_steps() -> Iterator[None]:
    """Steps within are memlab's own: one forward, one backward, one update, and gradients dropped.

    Example:
        >>> with own_steps():
        ...     is_own_step()
        True
    """
    token = _are_own.set(True)
    try:
        yield
    finally:
        _are_own.reset(token)


def is_own_step() -> bool:
    """Return whether the steps that are being made are memlab's own."""
    return _are_own.get()
