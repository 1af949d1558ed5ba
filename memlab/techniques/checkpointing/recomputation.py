"""Context that a recomputation in the backward pass needs, and whether it gives what the first run gave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as module

from memlab.runtime.fingerprints import Saved, other_results
from memlab.runtime.modules import in_use

_CHECK = "memlab: values"
_running = threading.local()


class _Recomputation(AbstractContextManager[None]):
    """A block's forward is run past its hooks: what they would make ready is made ready here."""

    def __init__(self, block: nn.Module | None, inside: AbstractContextManager[None]) -> None:
        self._block = block  # that is recomputed, once for each backward pass through it; None where hooks run as well
        self._inside = inside  # a context that must see the block's operators only
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as entering:
            if self._block is not None:
                entering.enter_context(in_use(self._block))
            entering.enter_context(self._inside)
            self._entered.append(entering.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)


def contexts(
    block: nn.Module | None, inside: AbstractContextManager[None] | None = None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the forward of a part of a block, and its recomputation; arguments as of the latter."""
    return nullcontext(), _Recomputation(block, nullcontext() if inside is None else inside)


class RecomputationCheck:
    """Check that a part gives, when it runs again for a field of the plan, what its first run gave; runs are numbered from one."""

    def __init__(self, number: int, field: str, name: str) -> None:
        self._number, self._part = number, (field, name)
        self._stops = False

    @contextmanager
    def first(self) -> Iterator[str]:
        """Context of the first run, which gives torch's `determinism_check` for it."""
        self._stops = module._enable_checkpoint_early_stop is not False
        module._allowed_determinism_checks_to_fns.setdefault(_CHECK, _saved)  # there is no public way to add one
        before, _running.part = getattr(_running, "part", None), (self._number, *self._part)
        try:
            yield _CHECK
        finally:
            _running.part = before

    def twice(self, first: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
        """Return what torch is to run: a function that is `first` when it is called first, and `again` from then on.

        Raises:
            RefusalError: on calling, torch has not stopped a second run, as it does with the last tensor that the first has saved.
        """
        has_run = False

        def run(*args: Any) -> Any:
            nonlocal has_run
            if not has_run:
                has_run = True
                return first(*args)
            output = again(*args)
            if self._stops:
                raise other_results(*self._part)
            return output

        return run


def _saved(tensor: torch.Tensor) -> Saved | torch.Tensor:
    part = getattr(_running, "part", None)
    return tensor if part is None else Saved(tensor, *part)
