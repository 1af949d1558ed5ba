"""Ctrl-C held back while live objects are changed, and delivered when they are whole again.

Python runs signal handlers between any two bytecodes of the main thread, so a `KeyboardInterrupt` can
arise in the middle of a `finally` as well; no order of statements is safe from it. Here the handler is
exchanged for one that only takes note. Whichever handler was installed is called later, as it would have
been: Python's own, which raises, or that of a kernel, of an event loop, of a library.

Rules:

1. memlab's code that stands between the loop and torch runs `deferred_interrupts`; the user's code that it calls (the
   model's own forward, a closure) runs `interruptible`, so that a Ctrl-C arises there and in none of memlab's frames.
2. What begins in one call and ends in another (the hooks before and after a step) holds back from `hold_back` to
   `HeldBack.end`, or until the function that calls both is over.
3. What must know that the loop was left there listens (`Listener`) and holds nothing back.

Known limitations: other threads are never interrupted by signals, so nothing is done there. Exceptions
that another thread injects with ``PyThreadState_SetAsyncExc``, and handlers of other signals that raise,
are not held back.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

# `signal.getsignal` looks handlers up among the signal numbers, which takes longer than all else at a model call
_getsignal: Callable[[int], Any] = _signal.getsignal


class _Layer:
    """A handler of Ctrl-C over the one that was there, which is called in the end."""

    def __init__(self, previous: Handler) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.previous(number, frame)

    def is_spent(self, frame: FrameType | None) -> bool:
        """Return whether nobody waits for it any more, seen from a frame."""
        return False

    def remove(self) -> None:
        """Take it out, also from under others; harmless when done, or when somebody has put in another handler."""
        layer: Any = signal.getsignal(signal.SIGINT)
        if layer is self and _is_main_thread():
            signal.signal(signal.SIGINT, self.previous)
        while isinstance(layer, _Layer):
            if layer.previous is self:
                layer.previous = self.previous
            layer = layer.previous
        _handler()  # others may have come to light that nobody has removed


class Interrupts(_Layer):
    """Takes note of Ctrl-C."""

    def __init__(self, previous: Handler = lambda _number, _frame: None) -> None:
        super().__init__(previous)
        self.came = False

    def deliver(self) -> None:
        """Let the handler that was there before have what came, here; it may raise."""
        if self.came:
            self.came = False
            self.previous(signal.SIGINT, sys._getframe(1))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True


class Caller:
    """A function that runs, told from others of the same name; the frame itself would keep all variables below it alive."""

    __slots__ = ("_mark",)

    def __init__(self, frame: FrameType) -> None:
        self._mark = id(frame), id(frame.f_code)

    def is_over(self, frame: FrameType | None) -> bool:
        """Return whether it runs no longer."""
        own, code = self._mark
        while frame is not None and not (id(frame) == own and id(frame.f_code) == code):  # some hundred times a step
            frame = frame.f_back
        return frame is None


class HeldBack(Interrupts):
    """Ctrl-C held back from one call to another, as long as the function that makes both runs."""

    def __init__(self, previous: Handler, caller: FrameType) -> None:
        super().__init__(previous)
        self.caller = Caller(caller)

    def is_spent(self, frame: FrameType | None) -> bool:
        return self.caller.is_over(frame)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_spent(frame):
            self.remove()
            self.previous(number, frame)
        else:
            self.came = True

    def end(self) -> None:
        """Hold back no longer, and deliver what came; it may raise. Harmless when done."""
        self.remove()
        self.deliver()


class Listener(_Layer):
    """Calls a method with what delivers a Ctrl-C to the loop, which it may put off; it goes with its object."""

    def __init__(self, previous: Handler, heard: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(previous)
        self._heard: Callable[[], Any] = weakref.WeakMethod(heard, lambda _: self.remove())

    def is_spent(self, frame: FrameType | None) -> bool:
        return self._heard() is None

    def remove(self) -> None:
        """Take it out; on another thread, autograd's say, it hears no more, and goes when the main thread next looks."""
        self._heard = _nobody
        super().remove()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        heard = self._heard()
        if heard is None:
            self.remove()
            self.previous(number, frame)
        else:
            heard(lambda: self.previous(number, frame))


class _Deferred:
    """See `deferred_interrupts`. No generator: one that is interrupted between its call and its code would end who knows when."""

    def __enter__(self) -> Interrupts:
        handler = _handler()
        self._own: Interrupts | None = None
        if handler is None:  # another thread, or a Ctrl-C that is ignored or ends the process
            return Interrupts()
        if isinstance(handler, Interrupts):
            return handler
        self._own = own = Interrupts(handler)
        # from here on nothing is raised between two bytecodes
        signal.signal(signal.SIGINT, own)
        return own

    def __exit__(self, *_exc: object) -> None:
        if self._own is not None:
            # somebody may have put in another handler since, and then that one stays
            self._own.remove()
            self._own.deliver()


class _Interruptible:
    """See `interruptible`."""

    def __enter__(self) -> None:
        handler = _handler()
        self._held = handler if isinstance(handler, Interrupts) else None
        if self._held is not None:
            self._held.deliver()
            signal.signal(signal.SIGINT, self._held.previous)

    def __exit__(self, *_exc: object) -> None:
        if (held := self._held) is None:
            return
        layer = handler = _handler()
        # the one that was there may have gone since, and a listener may have come
        while isinstance(held.previous, _Layer) and held.previous.is_spent(sys._getframe()):
            held.previous = held.previous.previous
        while isinstance(layer, _Layer) and layer is not held.previous:
            layer = layer.previous
        if handler is not None and layer is held.previous:
            held.previous = handler
            signal.signal(signal.SIGINT, held)


def deferred_interrupts() -> AbstractContextManager[Interrupts]:
    """Hold back Ctrl-C until the end of the block.

    Blocks may be nested: what came is delivered at the end of the outermost.

    Returns:
        A context; it gives what came meanwhile, whose `deliver` is for a point within the block at which raising does
        no harm.

    Example:
        >>> reached = []
        >>> try:
        ...     with deferred_interrupts():
        ...         signal.raise_signal(signal.SIGINT)
        ...         reached.append("the end")
        ... except KeyboardInterrupt:
        ...     print(reached)
        ['the end']
    """
    return _Deferred()


def interruptible() -> AbstractContextManager[None]:
    """Let Ctrl-C through within a block that holds it back: the user's own code runs here.

    Example:
        >>> with deferred_interrupts():
        ...     try:
        ...         with interruptible():
        ...             signal.raise_signal(signal.SIGINT)
        ...     except KeyboardInterrupt:
        ...         print("at once")
        at once
    """
    return _Interruptible()


def hold_back(caller: FrameType) -> HeldBack | None:
    """Hold back Ctrl-C until `HeldBack.end`, or until a function is over; None where it is held back already, or nothing is to be."""
    handler = _handler()
    if handler is None or isinstance(handler, Interrupts):
        return None
    held = HeldBack(handler, caller)
    signal.signal(signal.SIGINT, held)
    return held


def listen(heard: Callable[[Callable[[], None]], None]) -> Listener | None:
    """Hear of every Ctrl-C before the loop does, until the listener is removed.

    What holds Ctrl-C back meanwhile stays in force.

    Args:
        heard: a method, called with what delivers it; it may put that off. It keeps its object no longer alive.

    Returns:
        The listener; None on threads that signals do not reach, or where Python does not handle them.
    """
    handler = _handler()
    if handler is None:
        return None
    if not isinstance(handler, Interrupts):
        listener = Listener(handler, heard)
        signal.signal(signal.SIGINT, listener)
    else:
        listener = Listener(handler.previous, heard)
        handler.previous = listener
    return listener


def listen_no_more() -> None:
    """Take out all listeners: the loops are over for now, and the handler of Ctrl-C is the user's own again."""
    layer: Any = _handler()
    while isinstance(layer, _Layer):
        if isinstance(layer, Listener):
            layer.remove()
        layer = layer.previous


def _nobody() -> None:
    pass


def _is_main_thread() -> bool:
    """Return whether this is the thread whose handlers Python lets one exchange."""
    return threading.get_ident() == threading.main_thread().ident


def _handler() -> Handler | None:
    """Python's handler of Ctrl-C on this thread; None where there is none to exchange."""
    if not _is_main_thread():
        return None
    handler = _getsignal(signal.SIGINT)
    if isinstance(handler, _Layer) and handler.is_spent(sys._getframe(1)):
        handler.remove()
        return _handler()
    return handler if callable(handler) else None
