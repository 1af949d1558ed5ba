"""`Waiting`: how long the training thread was ready to run and had no processor, because others had them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import perf_counter

# Linux's own count of it, of the thread that reads it: nanoseconds on a processor, nanoseconds waited, turns
_COUNTS = Path("/proc/thread-self/schedstat")
_LOOK_SECONDS = 0.1


class Waiting:
    """The share of the time for which the thread that calls `look` waited for a processor.

    Waiting for data, for files, for a GPU or in a pause is not counted: the thread is not ready then.

    Known limitations: only Linux tells; elsewhere the share is 0.
    """

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None

    def look(self) -> None:
        """Note how much it is by now; costs some microseconds, ten times a second at most."""
        now = perf_counter()
        if self._last is not None and now - self._last[0] < _LOOK_SECONDS:
            return
        with suppress(OSError, ValueError, IndexError):
            self._last = now, int(_COUNTS.read_text().split()[1]) / 1e9
            self._first = self._first or self._last

    @property
    def share(self) -> float:
        """Share of the time from the first look to the last."""
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return 0.0
        waited = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return min(1.0, max(0.0, waited))
