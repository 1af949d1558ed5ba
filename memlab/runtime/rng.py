"""States of all generators of random numbers that a model's forward may draw from.

Those of torch (of the CPU and of every accelerator: a model may lie on several), of Python's `random` and of NumPy, and generators that modules,
hooks or arguments refer to.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from memlab.runtime import accelerator


def drawn_on(args: Iterable[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device whose generator a function of torch draws from when it is called with these arguments.

    Example:
        >>> drawn_on((torch.ones(2), 0.5), {})
        device(type='cpu')
        >>> drawn_on(((2, 3),), {"device": "cuda:1"})
        device(type='cuda', index=1)
    """
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    tensors = (leaf for leaf in tree_iter((tuple(args), dict(kwargs))) if isinstance(leaf, torch.Tensor))
    tensor = next(tensors, None)
    return torch.get_default_device() if tensor is None else tensor.device


class _Thread(threading.local):
    """Flag of a thread: its random states are those of the CPU's generator alone."""

    cpu_alone = False


_thread = _Thread()


@contextmanager
def of_cpu_alone() -> Iterator[None]:
    """Context for tensors without values, which draw from no accelerator: another thread may train there."""
    before, _thread.cpu_alone = _thread.cpu_alone, True
    try:
        yield
    finally:
        _thread.cpu_alone = before


class RandomState:
    """State of torch's generators: that of the CPU, and those of the accelerators where any is in use."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._accelerators = () if _thread.cpu_alone else accelerator.random_states()

    def equals(self, other: RandomState) -> bool:
        """Return whether no random number was drawn between this state and another."""
        same_there = all(map(torch.equal, self._accelerators, other._accelerators))
        return torch.equal(self._cpu, other._cpu) and same_there

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        accelerator.set_random_states(self._accelerators)


class Randomness:
    """States at a moment."""

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self._generators = list(generators)
        self.torch = RandomState()
        # each with what puts its state back
        self._own = [(g, g.get_state()) for g in self._generators if isinstance(g, torch.Generator)]
        self._host = [
            (take(), put) for take, put in (_access(g) for g in (random, *_numpy(), *self._generators)) if take
        ]

    def taken_again(self) -> Randomness:
        """Return the states of the same generators now."""
        return Randomness(self._generators)

    def equals(self, other: Randomness) -> bool:
        """Return whether no random number was drawn between these states and others."""
        return self.torch.equals(other.torch) and not self._host_differs_from(other)

    def host_differs(self) -> bool:
        """Return whether a generator of Python or NumPy has been drawn from since."""
        return self._host_differs_from(self.taken_again())

    def _host_differs_from(self, other: Randomness) -> bool:
        return any(_differs(one, now) for (one, _), (now, _) in zip(self._host, other._host, strict=False))

    def restore(self, *, host: bool = True) -> None:
        """Put them back."""
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
