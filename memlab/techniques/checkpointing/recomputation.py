"""Context that a recomputation in the backward pass needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType

from torch import nn

from memlab.runtime.modules import in_use


class Recomputation(AbstractContextManager[None]):
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


def contexts_within(block: nn.Module | None) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the forward of a part of a block, and its recomputation; None for a part of no block."""
    return nullcontext(), nullcontext() if block is None else Recomputation(block, nullcontext())
