"""`Pace`: how often a view is drawn, so that drawing stays a small share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable

_LEAST_SECONDS_BETWEEN = 0.25
# share of the time that drawing may take
_DRAWING_SHARE = 0.005


class Pace:
    """Says when to draw next: four times a second at most, and for at most half a percent of the time.

    The first drawing counts no more than a cheap one: it loads what the later ones only use, and would silence a view for
    minutes.

    Args:
        clock: tells the time, in seconds.
        first_after_seconds: how long to wait with the first drawing.
        share: of the time that drawing may take.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        first_after_seconds: float = 0.0,
        share: float = _DRAWING_SHARE,
    ) -> None:
        self._clock = clock
        self._share = share
        self._due_seconds = clock() + first_after_seconds
        self._last_seconds: float | None = None

    def is_due(self) -> bool:
        """Return whether it is time to draw; costs next to nothing."""
        return self._clock() >= self._due_seconds

    def spent(self, seconds: float) -> None:
        """Note that a drawing has just been done."""
        counted = 0.0 if self._last_seconds is None else seconds
        self._last_seconds = self._clock()
        self._due_seconds = self._last_seconds + max(_LEAST_SECONDS_BETWEEN, counted / self._share)

    def hurry(self) -> None:
        """Draw what someone waits for as soon as a quarter of a second has passed since the last drawing."""
        if self._last_seconds is not None:
            self._due_seconds = min(self._due_seconds, self._last_seconds + _LEAST_SECONDS_BETWEEN)
