"""`Rest`: short steps of which a session takes nothing over."""

from __future__ import annotations

from time import perf_counter

# steps of a rest are short, or it ends
_MOST_REST_SECONDS = 0.1


class Rest:
    """Steps of which a session takes nothing over.

    Args:
        most_steps: after how many it is over at the latest.

    Attributes:
        steps: how many have passed.
    """

    def __init__(self, most_steps: int) -> None:
        self.steps = 0
        self._most_steps = most_steps
        self._began_seconds = perf_counter()

    def is_over_after_a_step(self) -> bool:
        """Count a step, and return whether it was the last."""
        self.steps += 1
        return self.steps >= self._most_steps or perf_counter() - self._began_seconds > _MOST_REST_SECONDS
