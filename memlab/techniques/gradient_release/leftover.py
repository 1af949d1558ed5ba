"""Freed gradients that the loop had not dropped when the plan went: in plain torch a backward pass would add to them.

They are watched until they are dropped or zeroed, or the session is undone, which says so; a backward pass that comes before
is refused, and so is reading them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import SessionError
from memlab.runtime.backward import around_backward_passes
from memlab.runtime.graphs import leaves_of
from memlab.techniques.gradient_release import reasons
from memlab.techniques.gradient_release.watch import Gone, Watch

NOT_DROPPED = "gradients of the last step were freed and not dropped: call optimizer.zero_grad() before a backward pass that would add to them"


class Leftover:
    """Weights whose gradients of the last step were freed, and that no plan watches any more."""

    def __init__(self) -> None:
        self._weights: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
        self._watch = Watch(self._touched, self._written, self._differentiated)
        self._undo = ExitStack()
        self._thread = 0  # what is done with gradients in others is not seen

    def add(self, weights: Iterable[torch.Tensor]) -> None:
        """Watch some weights from now on."""
        self._weights.update((each, None) for each in weights)
        if self._weights:
            self._undo.close()
            self._thread = threading.get_ident()
            self._watch.begin()
            around_backward_passes(self._around_backward, self._undo)

    def forget(self, weights: Iterable[torch.Tensor]) -> bool:
        """Watch some weights no longer, as nothing of memlab's stays after an undo; return whether gradients of theirs were not dropped."""
        known = [each for each in weights if each in self._weights]
        for each in known:
            self._weights.pop(each, None)
        self.settle()
        return bool(known)

    def settle(self) -> None:
        """End the watch, where nothing is left to watch: between functions of torch's, as it is among those that hear of them."""
        if not self._weights:
            self._watch.end()
            self._undo.close()

    def _touched(self, tensor: torch.Tensor, written: tuple[Any, ...] | None) -> Gone | None:
        if tensor not in self._weights:
            return None
        if written is None or any(isinstance(value, Gone) for value in written):
            return Gone(tensor, id(tensor), weakref.ref(self))
        del self._weights[tensor]
        return None

    def _written(self, _tensors: Sequence[torch.Tensor]) -> None:
        """Weights may be written to."""

    def _differentiated(self, _outputs: Any) -> None:
        """Gradients that the loop asks for by name add to none."""

    @contextmanager
    def _around_backward(self, roots: Sequence[Any], inputs: Sequence[Any] | None) -> Iterator[None]:
        is_watched = inputs is None and bool(self._weights) and self._thread == threading.get_ident()
        if is_watched and any(leaf in self._weights for leaf in leaves_of(roots)):
            raise _refusal("the loop adds to gradients of the last step under --release-grads, which has freed them")
        yield

    def gone_zeroed(self, parameter: int) -> None:
        """The loop has zeroed a gradient that is gone."""
        for weight in [each for each in self._weights if id(each) == parameter]:
            weight.grad = torch.zeros_like(weight)
            del self._weights[weight]

    def gone_read(self) -> None:
        """The loop uses the values of a gradient that is gone."""
        raise _refusal(reasons.FREED)


def _refusal(reason: str) -> SessionError:
    error = SessionError(f"{reason}: drop them before (optimizer.zero_grad())")
    error.is_late = error.in_loop = True
    return error


leftover = Leftover()
