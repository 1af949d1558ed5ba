"""`CastOutputs`: outputs that the loop has in another number format than the model, and whose gradients it asks for.

Two outputs of one call are cast side by side, although one may be computed from the other within the call (features and a loss).
What the loop asks of the one (`retain_grad`, `register_hook`, `torch.autograd.grad`) would miss what comes through the other, so it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memlab.errors import RefusalError
from memlab.runtime.dispatch import HALF
from memlab.runtime.graphs import asks_for_gradient, nodes_of
from memlab.runtime.lazy import LAZY_FROM_BYTES, LazyTensor
from memlab.runtime.tree import in_leaves, tensors_in

_MOST_NODES = 2  # a change of the number format, and the loss scale


class CastOutputs:
    """Outputs of calls since the last backward pass."""

    def __init__(self) -> None:
        # with the number of nodes between each and what the model made
        self._known: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._waiting: list[weakref.ref[LazyTensor]] = []  # those that are cast when the loop looks at them

    def cast(self, change: Callable[[Any], Any], output: Any, *, waits: bool = False) -> Any:
        """Return the output of a call with its leaves cast.

        Args:
            change: casts one.
            output: what the call returns.
            waits: whether large ones beside a loss are cast when the loop looks at them, which most loops never do.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        waits = waits and any(map(_is_loss, tensors_in([output])))

        def changed(leaf: Any) -> Any:
            made = LazyTensor.cast(leaf, torch.float32, change) if waits and _is_large(leaf) else change(leaf)
            if type(leaf) is torch.Tensor and leaf.grad_fn is not None:
                pairs.append((leaf, made))
            return made

        result = in_leaves(changed, output)
        self._known = [each for each in self._known if each[0]() is not None]
        self._waiting = [each for each in self._waiting if each() is not None]
        for leaf, made in pairs if len(pairs) > 1 else ():
            if made is not leaf and leaf.retains_grad:
                made.retain_grad()  # which the loop reads
            if isinstance(made, LazyTensor):
                self._waiting.append(weakref.ref(made))
            elif made is not leaf and (nodes := _nodes_between(made, leaf)):
                self._known.append((weakref.ref(made), nodes))
        return result

    @contextmanager
    def around(self, roots: Sequence[Any], inputs: Sequence[Any] | None) -> Iterator[None]:
        """Context of a backward pass. Raises `RefusalError`: a gradient that is asked for would be another one."""
        alive = [(tensor, nodes) for ref, nodes in self._known if (tensor := ref()) is not None]
        waiting = [lazy for ref in self._waiting if (lazy := ref()) is not None]
        seen = [(lazy.computed, lazy.made_of) for lazy in waiting if lazy.computed is not None]
        alive += [(made, _nodes_between(made, leaf)) for made, leaf in seen if leaf is not None]
        for tensor, nodes in alive:
            if (by := asks_for_gradient(tensor, inputs)) and _is_passed(tensor, nodes, roots):
                raise RefusalError(
                    "precision",
                    f"the loop asks for the gradient of an output from which the model computes another one ({by}), and each is "
                    "cast by itself",
                    "leave its precision as it is",
                    in_loop=True,
                )
        yield


def _is_loss(leaf: torch.Tensor) -> bool:
    return type(leaf) is torch.Tensor and leaf.numel() == 1 and leaf.requires_grad


def _is_large(leaf: Any) -> bool:
    """Return whether an output is worth waiting for: one in half precision that nobody has asked for its gradient yet."""
    is_ours = type(leaf) is torch.Tensor and leaf.dtype in HALF and leaf.grad_fn is not None
    return is_ours and leaf.nbytes > LAZY_FROM_BYTES and not leaf.retains_grad and not leaf._backward_hooks


def _nodes_between(made: torch.Tensor, leaf: torch.Tensor) -> int:
    """Return how many nodes stand between an output and what it was cast from; 0 where it is a tensor of the caller's."""
    node: Any = made.grad_fn
    for count in range(_MOST_NODES + 1):
        if node is None or node is leaf.grad_fn:
            return 0 if node is None else count
        node = next((following for following, _ in node.next_functions), None)
    return 0


def _is_passed(tensor: torch.Tensor, nodes: int, roots: Sequence[Any]) -> bool:
    """Return whether gradients come to what a tensor was cast from by a way past the tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        own = inner = tensor.grad_fn
        for _ in range(nodes):
            inner = None if inner is None else inner.next_functions[0][0]
        return inner is not None and inner in nodes_of(roots, but=own)
