"""Contexts around the backward passes of a loop, wherever it begins them.

`Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` have one function in common. It is exchanged while
somebody wants to know, and not otherwise: hooks on tensors come too late to say anything of the whole graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

# of what a pass begins with, and of the tensors whose gradients go to the loop (`torch.autograd.grad`); None where they go to leaves
Around = Callable[[Sequence[Any], Sequence[Any] | None], AbstractContextManager[None]]

_NAME = "_engine_run_backward"
_original: Callable[..., Any] = getattr(torch.autograd, _NAME)
# methods of what goes with its model, which are not to keep it; remembered by a change of plans, which may be taken back
around: list[weakref.WeakMethod[Around]] = []


def around_backward_passes(context: Around, undo: ExitStack) -> None:
    """Run each backward pass within a context, which a method makes, as long as what it is bound to lives."""
    undo.callback(_remove, context)
    around.append(weakref.WeakMethod(context))
    setattr(torch.autograd, _NAME, _run)


def _remove(context: Around) -> None:
    """Forget a context, and those that are gone; harmless when done."""
    around[:] = [each for each in around if each() not in (context, None)]


def _run(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not around and getattr(torch.autograd, _NAME) is _run:
        setattr(torch.autograd, _NAME, _original)
    # after roots: their gradients, whether the graph is kept, whether one is made, and inputs
    inputs = None if kwargs.get("accumulate_grad", True) else args[3]
    with ExitStack() as contexts:
        for context in [made for each in around if (made := each()) is not None]:
            contexts.enter_context(context(roots, inputs))
        return _original(roots, *args, **kwargs)


def gradients_of(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Return what `torch.autograd.grad` does, past all contexts: the pass is none of the loop's."""
    ones = (torch.ones_like(output),)
    found: Sequence[torch.Tensor | None] = _original(
        (output,), ones, False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def is_in_backward() -> bool:
    """Return whether this thread is within a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_added(node: Any) -> bool:
    """Return whether the backward pass under way adds a gradient at this node of a leaf; `torch.autograd.grad` adds none there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf that `torch.autograd.grad` was asked for
        return False
