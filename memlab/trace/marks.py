"""Marks: when, among the births and deaths of a pass, modules run forward and backward and gradients are complete.

An engine that shards a model gathers and reduces at these moments. Hooks are laid as engines lay theirs: a module's
backward begins when a gradient of its output is there, and is over when those of all its inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from memlab.trace.recorder import Recorder


class MarkedEvents(StrEnum):
    """Events of a module or a parameter."""

    FORWARD_BEGINS = "forward begins"
    FORWARD_ENDS = "forward ends"
    BACKWARD_BEGINS = "backward begins"
    BACKWARD_ENDS = "backward ends"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a pass."""

    event: int  # number of births and deaths recorded before it
    moment: MarkedEvents  # what happens
    what: int  # number of the module, or of the parameter that got its gradient
    storage: int = 0  # number of the gradient's storage
    is_copy: bool = False  # whether autograd has copied the gradient, whose layout was none of the parameter's


@contextmanager
def marking(model: nn.Module, modules: Sequence[nn.Module], recorder: Recorder, marks: list[Mark]) -> Iterator[None]:
    """Let marks be made of some modules, and of the gradients of all parameters."""
    with ExitStack() as undo:
        for number, module in enumerate(modules):
            _watch(module, number, recorder, marks, undo)
        for number, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                came: list[int] = []
                note = partial(_came, recorder, came)
                settled = partial(_settled, number, recorder, marks, came)
                undo.callback(parameter.register_hook(note).remove)  # type: ignore[no-untyped-call]
                undo.callback(parameter.register_post_accumulate_grad_hook(settled).remove)  # type: ignore[no-untyped-call]
        yield


def _watch(module: nn.Module, number: int, recorder: Recorder, marks: list[Mark], undo: ExitStack) -> None:
    def mark(moment: MarkedEvents) -> None:
        marks.append(Mark(recorder.events, moment, number))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        mark(MarkedEvents.FORWARD_BEGINS)
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if places:
            passed = _Passed.apply(lambda: mark(MarkedEvents.BACKWARD_ENDS), *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
            for place, tensor in zip(places, passed, strict=True):
                leaves[place] = tensor
        return tree_unflatten(leaves, spec)  # type: ignore[no-any-return]

    def after(_: nn.Module, __: Any, output: Any) -> None:
        mark(MarkedEvents.FORWARD_ENDS)
        outputs = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        register_multi_grad_hook(outputs, lambda _: mark(MarkedEvents.BACKWARD_BEGINS), mode="any")

    undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(after).remove)


def _came(recorder: Recorder, came: list[int], gradient: torch.Tensor) -> None:
    came[:] = recorder.numbers_of([gradient])


def _settled(number: int, recorder: Recorder, marks: list[Mark], came: list[int], parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        (storage,) = recorder.numbers_of([parameter.grad]) or [0]
        is_copy = bool(came) and came != [storage]
        marks.append(Mark(recorder.events, MarkedEvents.SETTLED, number, storage, is_copy))


class _Passed(torch.autograd.Function):
    """Tensors as they are; tells when the gradients of all of them are there."""

    @staticmethod
    def forward(context: Any, tell: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context.tell = tell
        return tensors

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        context.tell()
        return None, *gradients
