"""Special mechanisms of techniques: small objects, each of which is asked in one place.

A technique says which it brings along (`Technique.brings`): by default itself, so that one which has a mechanism all the time is
a subclass of its class; one that has it under some settings only brings an object. Who drives a mechanism asks for it by its
class (`brought`), and for no technique.

| mechanism | of a technique that |
|---|---|
| `StateForm` | keeps optimizer state in another form |
| `Updating` | does something around the update of some parameters, or makes it |
| `Visiting` | keeps parameters away from where they are updated |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter
State = dict[str, Any]  # of one parameter
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
        """Some parameters will be updated next, or as soon as those are that were announced before them."""

    def around_update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> AbstractContextManager[None]:
        """Context in which a bucket of parameters is updated."""
        return nullcontext()

    def bucket_updated(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Some parameters have been updated, within a step."""

    def buckets_over(self, optimizer: Optimizer) -> None:
        """No bucket is under way any more: the update is complete, or it was broken off."""


class Visiting:
    """Parameters that are kept elsewhere, and come to the device for an update, so that buckets are kept small."""

    def at_home(self, parameters: Sequence[Parameter], *, updates: bool = True) -> AbstractContextManager[None]:
        """Context in which parameters are on the device they are used on.

        Args:
            parameters: some of the model's.
            updates: whether they are updated within it, with their gradients beside them; else they are looked at, so
                that state is mapped to where they are used.
        """
        return nullcontext()


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
