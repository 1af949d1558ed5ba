"""`Tape`: one step of a loop, recorded while it runs (`recording`), to be run again (`replay`) with other models in place of those it trains.

What a loop computes between its model calls (criteria, noise, penalties, clipping) is known to nobody but the loop. Rules of the tape:

1. It holds, in order, the calls of the models, the steps of their optimizers, and every function of torch that the loop itself
   calls, with numbers in place of tensors. Which way the loop went, and what it read from tensors, are the step's that was recorded.
2. It goes from the end of one step to the end of the next, so that a `zero_grad()` anywhere is on it.
3. A tensor is let go of where the loop did. What died in a backward pass was held by the graph alone, and is let go of before it.
   What outlives the step is replaced when the next one makes it again, as a variable is.
4. What the loop was given (batches) is kept by reference, parameters of other models weakly, and is there again in every step.
   What the step writes to, or may without a trace, is copied first where it is run for real. A tensor with a graph that comes from
   nowhere, a model call within an optimizer's step and a step of too many functions make a tape void, with the reason in words.
   The tape of one model is run on stand-ins alone: it keeps no more than shapes, and integers where they are few. Calls without
   gradients (a validation) make it void.
5. Where anything was compiled by ``torch.compile`` nothing is recorded (`memlab.runtime.loop_mode`).
6. What recording meets that it does not understand makes the tape void, and is no error of the loop's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memlab.errors import WorkloadError
from memlab.runtime.batch import Batch
from memlab.runtime.tree import Structure, flatten
from memlab.runtime.workload import Workload

# what reads the gradient of a tensor
GRADIENT = vars(torch._C.TensorBase)["grad"].__get__


@dataclass(frozen=True, slots=True)
class TapeValue:
    """A tensor that the loop has made, or was given."""

    number: int


@dataclass(frozen=True, slots=True)
class TapePart:
    """A parameter or buffer."""

    model: int
    place: int


@dataclass(frozen=True, slots=True)
class TapeCall:
    """A call of a model."""

    model: int
    is_training: bool


@dataclass(frozen=True, slots=True)
class TapeUpdate:
    """A step of an optimizer."""

    optimizer: int


@dataclass(frozen=True)
class TapeEntry:
    """One thing that the loop did."""

    what: Callable[..., Any] | TapeCall | TapeUpdate
    leaves: Sequence[Any]
    structure: Structure
    mode: tuple[bool, str, torch.dtype | None]  # whether graphs are made; device type and dtype of autocast, if any
    # numbers of the tensors that came out, by their places; -1 for parameters
    results: dict[Any, int] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)  # numbers of those that are let go of before it
    after: list[int] = field(default_factory=list)  # and after it


@dataclass(frozen=True)
class Tape:
    """A recorded step."""

    entries: Sequence[TapeEntry]
    given: Mapping[int, Callable[[], torch.Tensor | None]]  # what the loop was given, by number; None where it is gone
    written: Collection[int]  # numbers of those that it writes to
    gradients: Sequence[TapePart]  # parameters that have a gradient when it begins
    models: tuple[weakref.ref[nn.Module], ...]
    optimizers: tuple[weakref.ref[Optimizer], ...]
    rows: int  # of a step
    shapes: Any = ()  # of what a model was first called with, as `Batch.shapes`
    keeps_gradients: bool = False  # whether those of the step before are there when a model is first called
    # whether a step has one call, which gives the loss, and begins without gradients
    is_plain: bool = False
    has_own_loss: bool = False  # whether no call gives a loss: the loop computes it
    ends_with_update: bool = False  # whether no model is called after the first update
    problem: str = ""  # why it cannot be run again; empty when it can

    def is_of(self, workloads: Sequence[Workload]) -> bool:
        """Return whether it is of these models and optimizers, in any order."""
        optimizers = {id(optimizer) for each in workloads for optimizer in each.optimizers}
        return {id(model()) for model in self.models} == {id(each.model) for each in workloads} and optimizers == {
            id(optimizer()) for optimizer in self.optimizers
        }


def tape_of(workloads: Sequence[Workload]) -> Tape | None:
    """Return the recorded step of the loop that trains models; None without one, or where one model's batch says as much.

    Raises:
        WorkloadError: the step of several models cannot be run again.
    """
    tape = workloads[0].tape
    if tape is None or not tape.is_of(workloads):
        return None
    gone = "a model is gone whose parameters it used" if any(given() is None for given in tape.given.values()) else ""
    problem = tape.problem or gone
    if len(workloads) == 1:
        one = workloads[0]
        is_known = tape.is_plain or one.loss_fn is not None or tape.shapes != Batch.of(one.batch).shapes
        return None if problem or is_known else tape
    if problem:
        names = " and ".join(each.name for each in workloads)
        raise WorkloadError(
            f"a step of the loop that trains {names} cannot be run by itself: {problem}; measure plans in the loop, as in "
            "%%memfit --checkpoint"
        )
    return tape


def own_step_of(workload: Workload) -> Tape | None:
    """Return the recorded step that a workload trains by, where it has no loss but the loop's own; None where it has one."""
    tape = tape_of([workload])
    return tape if tape is not None and tape.has_own_loss else None


def by_place(output: Any) -> dict[Any, torch.Tensor]:
    """Tensors in what a model returned, by their places: name or number of an item, and number within it."""
    if isinstance(output, Mapping):
        items: Iterable[tuple[Any, Any]] = output.items()
    else:
        items = enumerate(output) if isinstance(output, tuple | list) else ((0, output),)
    found = {(name, place): leaf for name, item in items for place, leaf in enumerate(flatten(item)[0])}
    return {place: leaf for place, leaf in found.items() if isinstance(leaf, torch.Tensor)}
