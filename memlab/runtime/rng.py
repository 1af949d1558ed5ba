"""States of all generators of random numbers that a model's forward may draw from.

Those of torch (the CPU's, and that of the model's GPU), of Python's `random` and of NumPy, and generators that modules,
hooks or arguments refer to.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memlab.runtime.aliases import RandomState


class Randomness:
    """States at a moment.

    Args:
        device: on which the model is run.
        generators: of its own, see `is_generator`.

    Attributes:
        torch: states of torch's generators, that of the device and that of the CPU.
    """

    def __init__(self, device: torch.device, generators: Iterable[Any] = ()) -> None:
        self._device = device
        self._generators = list(generators)
        self.torch = RandomState(device)
        # each with what puts its state back
        self._own = [(g, g.get_state()) for g in self._generators if isinstance(g, torch.Generator)]
        self._host = [
            (take(), put) for take, put in (_access(g) for g in (random, *_numpy(), *self._generators)) if take
        ]

    def taken_again(self) -> Randomness:
        """Return the states of the same generators now."""
        return Randomness(self._device, self._generators)

    def host_differs(self) -> bool:
        """Return whether a generator of Python or NumPy has been drawn from since."""
        return any(
            _differs(one, other) for (one, _), (other, _) in zip(self._host, self.taken_again()._host, strict=False)
        )

    def restore(self, *, host: bool = True) -> None:
        """Put them back.

        Args:
            host: those of Python and NumPy as well.
        """
        self.torch.restore()
        for generator, state in self._own:
            generator.set_state(state)
        if host:
            self.restore_host()

    def restore_host(self) -> None:
        """Put back those of Python and NumPy alone."""
        for state, put in self._host:
            put(state)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of random numbers.

    Example:
        >>> is_generator(torch.Generator()), is_generator(random.Random(1)), is_generator(random)
        (True, True, False)
    """
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.RandomState, numpy.random.Generator)
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


def _numpy() -> list[Any]:
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [numpy.random]


def _access(generator: Any) -> tuple[Callable[[], Any] | None, Callable[[Any], Any]]:
    """Return what reads and writes the state of a generator on the host."""
    if isinstance(generator, torch.Generator):
        return None, generator.set_state
    bits = getattr(generator, "bit_generator", None)
    if bits is not None and not hasattr(generator, "get_state"):
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    return generator.get_state, generator.set_state


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return any(_differs(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) != len(other) or any(map(_differs, one, other))
    return bool((one != other).any()) if hasattr(one, "any") else bool(one != other)
