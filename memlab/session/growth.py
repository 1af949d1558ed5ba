"""`Growth`: device memory that grows from call to call of an evaluation, as of predictions that the loop keeps there.

Read between calls number 4, 8, 16 and so on without a training call between them, and so at next to no cost. What grows by as much with
each call over three such spans is kept by the loop (not a cache that fills, nor what goes to the host every few calls). It is said
once it takes a tenth of what this process can have, or when memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from memlab.units import format_bytes

_FIRST = 4
_SPANS = 3
_NOTEWORTHY = 0.1  # of what this process can have
_TIMES = (1.5, 2.6)  # growth over a span, relative to the one before, which had half the calls


class Growth:
    """Bytes on the device while a model is called without gradients.

    Example:
        >>> kept = iter(range(0, 10_000, 300))
        >>> growth = Growth(lambda: 1000 * next(kept), lambda: 5_000_000)
        >>> [said for said in (growth.called() for _ in range(64)) if said]
        []
        >>> growth = Growth(lambda: 1_000_000 * growth.calls, lambda: 200_000_000)
        >>> [said for said in (growth.called() for _ in range(64)) if said]
        ['an evaluation keeps 26.7 MiB on the device after 32 calls, 976.6 KiB more with each: move what it keeps to the host \
(.cpu(), or argmax first), with Trainer by eval_accumulation_steps=8']
    """

    def __init__(
        self,
        live_bytes: Callable[[], int],  # on the device at this moment
        limit_bytes: Callable[[], int],  # that this process can have
    ) -> None:
        self._live_bytes, self._limit_bytes = live_bytes, limit_bytes
        self.calls = 0  # since the model was last trained
        self._read: list[int] = []  # before calls number 4, 8, 16 and so on
        self._is_said = False

    def trained(self) -> None:
        """Note a training call."""
        if self.calls:
            self.calls, self._read = 0, []

    def called(self) -> str:
        """Count a call without gradients that begins; return what is to be said of those before, if anything."""
        self.calls += 1
        if self.calls < _FIRST or self.calls & (self.calls - 1):
            return ""
        self._read.append(self._live_bytes())
        text = "" if self._is_said else self.text(_SPANS)
        self._is_said |= bool(text) and self._read[-1] - self._read[0] >= _NOTEWORTHY * self._limit_bytes()
        return text if self._is_said else ""

    def text(self, spans: int = _SPANS - 1) -> str:
        """Return what has grown over so many spans; empty where nothing is known to."""
        grown = [after - before for before, after in pairwise(self._read)]
        if len(grown) < spans or min(grown) < 0:
            return ""
        if not all(0 < _TIMES[0] * a <= b <= _TIMES[1] * a for a, b in pairwise(grown[-spans:])):
            return ""
        calls = _FIRST << (len(self._read) - 1)
        kept = self._read[-1] - self._read[0]
        return (
            f"an evaluation keeps {format_bytes(kept)} on the device after {calls} calls, "
            f"{format_bytes(kept / (calls - _FIRST))} more with each: move what it keeps to the host (.cpu(), or argmax first), "
            "with Trainer by eval_accumulation_steps=8"
        )
