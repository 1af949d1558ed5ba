"""`Turns`: which optimizers take turns in one step of a loop."""

from __future__ import annotations

from collections.abc import Iterable


class Turns:
    """Order in which the optimizers of a loop step.

    Those that take turns (a GAN's) make one step once each has had a turn.
    """

    def __init__(self) -> None:
        self._forwards = 0
        # when an optimizer stepped, in forwards, and which have after a further forward
        self._since: dict[int, tuple[int, set[int]]] = {}
        self._between: dict[int, set[int]] = {}  # those that stepped between its last two steps

    def forward_begins(self) -> None:
        """Note that a model is called."""
        self._forwards += 1

    def stepped(self, optimizer: int) -> None:
        """Note that an optimizer of this number has stepped."""
        _, self._between[optimizer] = self._since.pop(optimizer, (0, set()))
        for forwards, others in self._since.values():
            if forwards < self._forwards:
                others.add(optimizer)
        self._since[optimizer] = (self._forwards, set())

    def are_open(self, stepped: Iterable[int]) -> bool:
        """Return whether optimizers that take turns with those that have stepped are still to come."""
        done = {*stepped}
        return any(self._between.get(each, set()) - done for each in done)
