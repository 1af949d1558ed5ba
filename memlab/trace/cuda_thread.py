"""The GPU that the current thread traces for, and changes of the process that apply to that thread only.

A traced step needs a few of torch's functions and kernels to answer as they would on CUDA. They are
exchanged for the time of the trace, in numbered rules:

1. Each exchanged function first asks `current_gpu()`. In a thread that traces nothing it does what the
   original does, so training in another thread goes on as before.
2. Threads may trace at the same time: the exchange is made by the first and taken back by the last.
3. What is taken back is put back exactly; when a name does not exist in this torch, nothing is exchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memlab.errors import MemlabError
from memlab.hardware.gpus import Gpu


class _Thread(threading.local):
    """Target that a thread traces for."""

    gpu: Gpu | None = None


_thread = _Thread()


def current_gpu() -> Gpu | None:
    """The GPU that the current thread traces for; None outside of a trace."""
    return _thread.gpu


@contextmanager
def tracing_for(gpu: Gpu) -> Iterator[None]:
    """Make this thread one that traces for a GPU."""
    before, _thread.gpu = _thread.gpu, gpu
    try:
        yield
    finally:
        _thread.gpu = before


class SharedExchange:
    """A change of the process that several threads may hold at once."""

    def __init__(self, make: Callable[[ExitStack], None]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._holders = 0
        self._undo = ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the change in force, made by the first holder and taken back by the last."""
        with self._lock:
            if self._holders == 0:
                with ExitStack() as undo:
                    self._make(undo)
                    self._undo = undo.pop_all()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._undo.close()


def exchange(owner: Any, name: str, replacement: Callable[[Any], Any], undo: ExitStack) -> None:
    """Replace an attribute by what is made of it. Raises `MemlabError`: this torch has no such attribute."""
    if name not in vars(owner):
        raise missing(f"{owner.__name__}.{name}")
    original = vars(owner)[name]
    undo.callback(setattr, owner, name, original)
    setattr(owner, name, replacement(original))


def missing(name: str) -> MemlabError:
    """The error for a private name of torch that memlab needs and this version lacks."""
    return MemlabError(
        f"torch {torch.__version__} has no {name}, which memlab needs to trace a training step as CUDA runs it; "
        "install the torch of memlab's constraints.txt, or measure instead of predicting"
    )
