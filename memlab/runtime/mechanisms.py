"""Special mechanisms of techniques: small objects, each of which is asked in one place.

A technique says which it brings along (`Technique.brings`): by default itself, so that one which has a mechanism all the time is
a subclass of its class; one that has it under some settings only brings an object. Who drives a mechanism asks for it by its
class (`brought`), and for no technique.

| mechanism | of a technique that |
|---|---|
| `StateForm` | keeps optimizer state in another form |
| `Updating` | does something around the update of some parameters, or makes it |
| `Visiting` | keeps parameters away from where they are updated |
| `Skipping` | leaves a step out |
| `WholeSteps` | makes a step in place of the optimizer |
| `Interruptible` | has something under way that the loop may leave |
| `EarlyUpdates` | updates parameters in the backward pass |
| `Turns` | shows the loop other parameters than the model has |
| `LoopChecks` | refuses what is seen in a loop that runs |
| `SeenInCalls` | learns from calls of the model |
| `ChangedParameters` | puts something else in the places of parameters |
| `ModulesBeside` | changes modules beside the model |
| `OwnMemory` | keeps bytes of its own |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, TypeVar

import torch

from memlab.runtime.state_entries import Optimizer, Parameter, State
from memlab.runtime.workload import Workload

Stepper = Callable[[Sequence[Parameter]], None]


class StateForm:
    """Another form in which the state of a parameter is kept between updates.

    Canonical is the form that the user's own optimizer keeps. Both mappings are pure: new dict out, old dict and its tensors untouched.

    Attributes:
        state_per_step: whether state is unpacked around each update; else the technique's own `Updating.stepper` works on it as it is.
    """

    state_per_step: bool = False

    def pack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        """Map the state of one parameter to the form that is kept between steps."""
        return state

    def unpack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        """Map the form that is kept of one parameter's state back."""
        return state


class Updating:
    """Work around the update of some parameters (a bucket); in the order in which these are called.

    Attributes:
        draws_in_update: whether it draws random numbers, so that buckets keep their order.
        changes_parameters: whether parameters are others within `around_update`.
    """

    draws_in_update: bool = False
    changes_parameters: bool = False

    def stepper(self, optimizer: Optimizer) -> Stepper | None:
        """Return what updates parameters in place of the user's optimizer; None to leave it to that one."""
        return None

    def bucket_coming(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Prepare an update of some parameters, which comes next, or as soon as those are updated that were announced before them."""

    def around_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> AbstractContextManager[None]:
        """Return the context in which a bucket of parameters is updated."""
        return nullcontext()

    def bucket_updated(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Act once some parameters have been updated, within a step."""

    def buckets_over(self, optimizer: Optimizer) -> None:
        """Act once no bucket is under way any more: the update is complete, or it was broken off."""


class Visiting:
    """Parameters that are kept elsewhere, and come to the device for an update, so that buckets are kept small."""

    def at_home(self, parameters: Sequence[Parameter], *, updates: bool = True) -> AbstractContextManager[None]:
        """Return the context in which parameters are on the device they are used on.

        Args:
            parameters: some of the model's.
            updates: whether they are updated within it, with their gradients beside them; else they are looked at, so
                that state is mapped to where they are used.
        """
        return nullcontext()


class Skipping:
    """Steps that are left out; a step with a closure is taken over, and the closure evaluated once."""

    def skips_step(self) -> bool:
        """Return whether this step's update must not happen (gradients that are not finite)."""
        return False


class WholeSteps:
    """Steps that are made in place of the user's optimizer."""

    def whole_step(self, optimizer: Optimizer) -> Callable[[], bool] | None:
        """Return what does a step, and says whether it has; None to leave it to the optimizer."""
        return None


class Interruptible:
    """Steps and calls that the loop may leave in the middle."""

    def broken_off(self) -> None:
        """Forget what is under way: the loop was left, and begins anew with its next forward."""


class EarlyUpdates(Interruptible):
    """Updates that come before the step, which is taken over for it.

    Attributes:
        updates_in_backward: whether a backward pass changes parameters, so that it cannot be run again.
        only_watches: whether the loop was only watched so far, and its memory is as without it.
    """

    updates_in_backward: bool = True
    only_watches: bool = False


class Turns:
    """What the loop sees of parameters, where it is not what the model computes with."""

    def taken_over(self) -> None:
        """Show the model's own: the loop calls the model, or the plan is about to change."""

    def handed_back(self) -> None:
        """Show the loop's own: the call or the change is over."""


class LoopChecks:
    """Refusals that need a loop; each raises `RefusalError`, as `Technique.check` does."""

    def check_modes(self, workload: Workload) -> None:
        """Refuse modes that modules are in now; a loop that has not begun may set others."""

    def check_loop(self, workload: Workload, frame: FrameType) -> None:
        """Refuse a loop that runs, by the code of its newest frame and those above: for a plan that is asked for from elsewhere."""

    def check_traced(self) -> None:
        """Refuse what a traced program of the model could not use, which holds the very weights."""


class SeenInCalls:
    """What calls of the model show of a technique.

    Attributes:
        applies: whether it is known to apply; one that decides by the first call does not know before it.
        learns_from_calls: whether the first training forward of a batch's shape decides how those after it are run.
        was_reached: whether it is at work where the loop calls parts of the model, and not the model itself.
    """

    applies: bool = True
    learns_from_calls: bool = False
    was_reached: bool = False

    def trial_over(self) -> None:
        """Forget how much forwards and backward passes since the step began took: they were a trial."""


@dataclass(frozen=True)
class AsWritten:
    """What a model and its optimizers have without a technique that has other modules and parameters in their places."""

    modules: Mapping[int, torch.nn.Module]  # the user's, by id of what is in its place
    trained: frozenset[int]  # ids of the parameters that require gradients without it
    groups: Mapping[int, Sequence[Parameter]]  # the parameters of each group of an optimizer, by its id
    attributes: frozenset[str]  # of the model that it has not


class ChangedParameters:
    """Parameters, or modules, that are others than the loop has made."""

    def canonical_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype a parameter or buffer had before; that of the tensor when it was not changed."""
        return tensor.dtype

    def as_written(self) -> AsWritten | None:
        """Return what the model and its optimizers have without it; None where nothing is in the places of theirs."""
        return None


class ModulesBeside:
    """Modules beside the model that are changed as well."""

    @property
    def beside(self) -> Sequence[tuple[torch.nn.Module, object]]:
        """Return them, each with what of memlab's own belongs to it."""
        return ()


class OwnMemory:
    """Bytes that are kept beside the model's own."""

    @property
    def held_tensors(self) -> Sequence[torch.Tensor]:
        """Return parts of parameters that are kept on the device."""
        return ()

    @property
    def host_bytes(self) -> int:
        """Return how many bytes are kept off the device."""
        return 0


class Bringing(Protocol):
    """What brings mechanisms along: a technique."""

    def brings(self) -> Iterable[object]:
        """Yield them."""
        ...


_M = TypeVar("_M")


def brought(techniques: Iterable[Bringing], kind: type[_M]) -> list[_M]:
    """Return the mechanisms of a kind that techniques bring along, in their order.

    Example:
        >>> class Halving(StateForm):
        ...     def brings(self):
        ...         return (self,)
        >>> [len(brought([Halving()], kind)) for kind in (StateForm, Visiting)]
        [1, 0]
    """
    return [each for technique in techniques for each in technique.brings() if isinstance(each, kind)]
