"""The stage on which a run makes its steps, and holding it.

`Stage`: where work that must not meet a running cell is done; in a notebook, the kernel's main thread. `Hold`: what a loop does,
and holding or ending it between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from memlab.errors import SessionError
from memlab.records.live_state import Activity

BESIDE_CELLS = "steps beside cells need a notebook's event loop; in a terminal, run them in a loop"
_LOOK_SECONDS = 0.1


class Playing(Protocol):
    """An iterator that is being advanced."""

    def pause(self) -> None:
        """Stand still after the step under way."""

    def resume(self) -> None:
        """Go on."""

    def cancel(self) -> None:
        """Close the iterator after the step under way, so that it puts back what it changed."""


class Stage:
    """Runner of tasks one after another, never while a cell runs. Every method may be called from any thread.

    This one has no notebook: everything is done there and then, in the calling thread.
    """

    @property
    def can_play(self) -> bool:
        """Return whether there is an event loop that advances iterators."""
        return False

    def when_idle(self, work: Callable[[], None]) -> None:
        """Do something as soon as no cell runs."""
        work()

    def play(
        self, steps: Iterator[Any], ended: Callable[[BaseException | None], None], after_seconds: float = 0.0
    ) -> Playing:
        """Advance an iterator by a step at a time while no cell runs, and call `ended` with its error or None; it is closed before the next cell."""
        raise SessionError(BESIDE_CELLS)


class Cancelled(KeyboardInterrupt):
    """Training was cancelled from a panel, between two steps.

    It is a `KeyboardInterrupt`, so that every loop ends by it as it does by Ctrl-C.
    """


class Hold:
    """Activity of a loop, and the pause or end that is asked of it for the next step boundary; set from any thread.

    The controls of models that train in one loop share it.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._doing = Activity.IDLE
        self._is_at_rest = False  # whether it stands still while it is held
        self._go = threading.Event()
        self._go.set()

    @property
    def activity(self) -> Activity:
        """Return what the loop does; never a pause that is over, whichever thread asked for it or ended it."""
        return (
            Activity.PAUSED if self._is_at_rest and self.is_held and self._doing is not Activity.IDLE else self._doing
        )

    @property
    def is_held(self) -> bool:
        """Return whether the loop is to stand still."""
        return not self._go.is_set()

    @property
    def is_off(self) -> bool:
        """Return whether the loop just goes on."""
        return self._go.is_set() and not self.is_cancelled

    def begin(self, *, is_at_rest: bool) -> None:
        """Have it stand still from its next step boundary on, or say that it does already."""
        self._is_at_rest |= is_at_rest
        self._go.clear()

    def end(self) -> None:
        self._is_at_rest = False
        self._go.set()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._go.set()

    def reset(self, activity: Activity) -> None:
        self.is_cancelled = False
        self.end()
        self._doing = activity

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Say that the loop stands still while it is held."""
        self._is_at_rest = True
        try:
            yield
        finally:
            self._is_at_rest = False

    def wait(self) -> None:
        """Wait until released or cancelled."""
        try:
            while not self._go.wait(_LOOK_SECONDS):  # short, so that Ctrl-C is noticed everywhere
                pass
        except KeyboardInterrupt as error:
            raise error.with_traceback(None) from None  # it is shown where the loop stands, and not in `wait`

    def end_if_cancelled(self, step: int) -> None:
        """Raise `Cancelled` where that was asked for, once."""
        if self.is_cancelled:
            self.is_cancelled = False
            raise Cancelled(f"cancelled from the panel after step {step}")
