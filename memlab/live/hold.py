"""`Hold`: holds or ends the loop that trains, between two steps."""

from __future__ import annotations

import threading

_LOOK_SECONDS = 0.1


class Cancelled(KeyboardInterrupt):
    """Training was cancelled from a panel, between two steps.

    It is a `KeyboardInterrupt`, so that every loop ends by it as it does by Ctrl-C.
    """


class Hold:
    """What the loop is to do at the next step boundary; set from any thread.

    Attributes:
        is_cancelled: whether the loop is to end there.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._go = threading.Event()
        self._go.set()

    @property
    def is_held(self) -> bool:
        """Return whether the loop is to stand still."""
        return not self._go.is_set()

    @property
    def is_off(self) -> bool:
        """Return whether the loop just goes on."""
        return self._go.is_set() and not self.is_cancelled

    def begin(self) -> None:
        self._go.clear()

    def end(self) -> None:
        self._go.set()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._go.set()

    def reset(self) -> None:
        self.is_cancelled = False
        self._go.set()

    def wait(self) -> None:
        """Stand still until released or cancelled."""
        while not self._go.wait(_LOOK_SECONDS):  # short, so that Ctrl-C is noticed everywhere
            pass

    def end_if_cancelled(self, step: int) -> None:
        """Raise `Cancelled` where that was asked for, once."""
        if self.is_cancelled:
            self.is_cancelled = False
            raise Cancelled(f"cancelled from the panel after step {step}")
