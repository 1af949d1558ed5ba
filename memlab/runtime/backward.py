"""Contexts around the backward passes of a loop, wherever it begins them.

`Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` have one function in common. It is exchanged while
somebody wants to know, and not otherwise: hooks on tensors come too late to say anything of the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

Around = Callable[[Sequence[Any]], AbstractContextManager[None]]

_NAME = "_engine_run_backward"
_original: Callable[..., Any] = getattr(torch.autograd, _NAME)
_around: list[Around] = []


def around_backward_passes(context: Around, undo: ExitStack) -> None:
    """Run each backward pass within a context.

    Args:
        context: made with what is derived (tensors, or edges of a graph).
        undo: ends it.
    """
    _around.append(context)
    undo.callback(_remove, context)
    setattr(torch.autograd, _NAME, _run)


def _remove(context: Around) -> None:
    _around.remove(context)
    if not _around and getattr(torch.autograd, _NAME) is _run:
        setattr(torch.autograd, _NAME, _original)


def _run(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as contexts:
        for context in tuple(_around):
            contexts.enter_context(context(roots))
        return _original(roots, *args, **kwargs)
