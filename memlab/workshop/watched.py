"""`watched`: the memory that a piece of code takes at its peak, and what it leaves behind; `film`: live bytes over time; `held_by`: what a graph holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from memlab.measuring.holdings import parameters_of, state_of
from memlab.measuring.ledger import Ledger
from memlab.units import format_bytes


class Watched:
    """Memory of a piece of code, beyond what lived before it.

    Args:
        live: tells the bytes that live now.
        peak: tells the most bytes at any moment since the last `reset`.
        reset: has the peak counted anew.

    Attributes:
        peak_bytes: the most at any moment so far; of the whole block once it has ended.
        left_bytes: what lives now; at the end of the block once it has ended.
    """

    def __init__(self, live: Callable[[], int], peak: Callable[[], int], reset: Callable[[], None]) -> None:
        self._live, self._peak, self._reset = live, peak, reset
        self._is_over = False
        self._peak_bytes = 0
        self._left_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes if self._is_over else max(self._peak_bytes, self._peak())

    @property
    def left_bytes(self) -> int:
        return self._left_bytes if self._is_over else self._live()

    def lap(self) -> int:
        """The most at any moment since the last lap, in bytes; the next lap begins.

        Raises:
            ValueError: the block has ended.
        """
        if self._is_over:
            raise ValueError("lap: what is watched has ended; call it within the block")
        lap_bytes = self._peak()
        self._peak_bytes = self.peak_bytes
        self._reset()
        return lap_bytes

    def end(self) -> None:
        """Keep the numbers as they are now."""
        self._peak_bytes, self._left_bytes = self.peak_bytes, self.left_bytes
        self._is_over = True

    def __str__(self) -> str:
        return f"peak {format_bytes(self.peak_bytes)}, left behind {format_bytes(self.left_bytes)}"

    __repr__ = __str__


@contextmanager
def watched(device: torch.device | str = "cpu") -> Iterator[Watched]:
    """Count the memory that a block of code takes, in training, inference or any other work with tensors.

    Args:
        device: whose memory counts. On a CPU every tensor is counted that an operator of this thread makes, on a GPU what
            the allocator says.

    Yields:
        The numbers, which stay when the block has ended.

    Known limitations:
        On a CPU, tensors that lived before the block are not known: that they die in it lowers nothing.

    Example:
        >>> with watched() as seen:
        ...     kept = [torch.zeros(256)]
        ...     kept.append(torch.zeros(512) + 1)
        >>> seen
        peak 5.0 KiB, left behind 3.0 KiB
    """
    on = torch.device(device)
    with _of_gpu(on) if on.type == "cuda" else _of_cpu() as seen:
        try:
            yield seen
        finally:
            seen.end()


@contextmanager
def _of_cpu() -> Iterator[Watched]:
    ledger = Ledger()
    ledger.begin([])

    def reset() -> None:
        ledger.peak_bytes = ledger.live_bytes

    try:
        with ledger:
            yield Watched(lambda: ledger.live_bytes, lambda: ledger.peak_bytes, reset)
    finally:
        ledger.close()


@contextmanager
def _of_gpu(device: torch.device) -> Iterator[Watched]:
    before_bytes = torch.cuda.memory_allocated(device)

    def reset() -> None:
        torch.cuda.reset_peak_memory_stats(device)

    reset()
    yield Watched(
        lambda: torch.cuda.memory_allocated(device) - before_bytes,
        lambda: torch.cuda.max_memory_allocated(device) - before_bytes,
        reset,
    )


class Film:
    """Live bytes over time."""

    def __init__(self) -> None:
        self.began = 0.0  # the moment it began, on the clock of `time.perf_counter`
        self.seconds: list[float] = []  # times of all births and deaths since then
        self.live_bytes: list[int] = []  # what was alive after each of them

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
        for seconds, size_bytes, _, _ in seen.raw:
            live += size_bytes
            taken.seconds.append(seconds - seen.start)
            taken.live_bytes.append(live)


def held_by(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Results that are kept for a backward pass from some tensors, each memory once, parameters not among them.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> loss = (weight * torch.zeros(3)).exp().sum()
        >>> [tuple(tensor.shape) for tensor in held_by(loss)]
        [(3,), (3,)]
        >>> held_by(loss.detach())
        []
    """
    nodes = list(_nodes(tensor.grad_fn for tensor in tensors))
    # a linear layer saves a transposed view of its weight, so memories are compared, not tensors
    parameters = {_memory(node.variable) for node in nodes if hasattr(node, "variable")}
    found: dict[int, torch.Tensor] = {}
    for node in nodes:
        for saved in _saved(node):
            if _memory(saved) not in parameters:
                found.setdefault(_memory(saved), saved)
    return list(found.values())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    seen: set[Any] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [after for after, _ in node.next_functions if after is not None]


def _saved(node: Any) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if not (name.startswith("_saved_") or name == "saved_tensors"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:  # given back by a backward pass
            continue
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, torch.Tensor):
                yield each
