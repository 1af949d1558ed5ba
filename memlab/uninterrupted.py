"""Ctrl-C held back while live objects are changed, and delivered when they are whole again.

Python runs signal handlers between any two bytecodes of the main thread, so a `KeyboardInterrupt` can
arise in the middle of a `finally` as well; no order of statements is safe from it. Here the handler is
exchanged for one that only takes note. Whichever handler was installed is called later, as it would have
been: Python's own, which raises, or that of a kernel, of an event loop, of a library.

Known limitations: other threads are never interrupted by signals, so nothing is done there. Exceptions
that another thread injects with ``PyThreadState_SetAsyncExc``, and handlers of other signals that raise,
are not held back.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Takes note of Ctrl-C.

    Attributes:
        came: whether one has come and waits for its delivery.
    """

    def __init__(self) -> None:
        self.came = False
        self._previous: Handler | None = None

    def deliver(self) -> None:
        """Let the handler that was there before have what came, here; it may raise."""
        if self.came and self._previous is not None:
            self.came = False
            self._previous(signal.SIGINT, sys._getframe(1))

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True


_current: Interrupts | None = None


@contextmanager
def uninterrupted() -> Iterator[Interrupts]:
    """Hold back Ctrl-C until the end of the block.

    Blocks may be nested: what came is delivered at the end of the outermost.

    Yields:
        What came meanwhile; its `deliver` is for a point within the block at which raising does no harm.

    Example:
        >>> reached = []
        >>> try:
        ...     with uninterrupted():
        ...         signal.raise_signal(signal.SIGINT)
        ...         reached.append("the end")
        ... except KeyboardInterrupt:
        ...     print(reached)
        ['the end']
    """
    if _current is not None and _is_main_thread():
        yield _current
    elif _is_main_thread() and callable(handler := signal.getsignal(signal.SIGINT)):
        yield from _holding_back(handler)
    else:  # another thread, or a Ctrl-C that is ignored or ends the process
        yield Interrupts()


def _holding_back(handler: Handler) -> Iterator[Interrupts]:
    global _current
    interrupts = Interrupts()
    interrupts._previous = handler
    try:
        # from here on nothing is raised between two bytecodes
        signal.signal(signal.SIGINT, interrupts._note)
        _current = interrupts
        yield interrupts
    finally:
        _current = None
        # somebody may have put in another handler since, and then that one stays
        if signal.getsignal(signal.SIGINT) == interrupts._note:
            signal.signal(signal.SIGINT, handler)
        interrupts.deliver()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
