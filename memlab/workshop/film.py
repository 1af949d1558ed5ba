"""`Film`: live bytes from operator to operator, over as many steps as one likes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from time import perf_counter

import torch

from memlab.measuring.ledger import Ledger, parameters_of, state_of


class Film:
    """Live bytes over time.

    Attributes:
        began: the moment it began, on the clock of `time.perf_counter`.
        seconds: times of all births and deaths since then.
        live_bytes: what was alive after each of them.
    """

    def __init__(self) -> None:
        self.began = 0.0
        self.seconds: list[float] = []
        self.live_bytes: list[int] = []

    def peaks(self, ends: Iterable[float]) -> list[int]:
        """The highest bytes of each stretch.

        Example:
            >>> film = Film()
            >>> film.seconds, film.live_bytes = [0.0, 0.1, 0.2, 0.3], [4, 9, 6, 7]
            >>> film.peaks([0.15, 0.4])
            [9, 7]
        """
        moments = zip(self.seconds, self.live_bytes, strict=True)
        found, waiting = [], next(moments, None)
        for end in ends:
            highest = 0
            while waiting is not None and self.began + waiting[0] <= end:
                highest = max(highest, waiting[1])
                waiting = next(moments, None)
            found.append(highest)
        return found


@contextmanager
def film(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Film]:
    """Watch a training run, failed attempts and all.

    Args:
        model: whose device is watched; its parameters are there from the beginning.
        optimizer: whose state is, as far as it has any.

    Yields:
        A film that is filled when the block ends, however it ends.

    Example:
        >>> layer = torch.nn.Linear(4, 1, bias=False)
        >>> with film(layer, torch.optim.SGD(layer.parameters())) as seen:
        ...     ones = torch.ones(100)
        ...     del ones
        >>> seen.live_bytes
        [16, 416, 16]
    """
    device = next(model.parameters()).device
    ledger, taken = Ledger(device.type), Film()
    taken.began = perf_counter()
    ledger.begin(chain(parameters_of(model), state_of([optimizer])))
    try:
        with ledger:
            yield taken
    finally:
        seen = ledger.finish()
        ledger.close()
        live = sum(seen.baseline.values())
        taken.seconds, taken.live_bytes = [0.0], [live]
        for event in seen.events:
            live += event.size_bytes
            taken.seconds.append(event.seconds)
            taken.live_bytes.append(live)
