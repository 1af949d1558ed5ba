"""The contract of a technique, and the identity that every technique starts from.

A technique meets the training loop at the two hooks (the model call, the optimizer step) and
overrides only the moments it needs. Rules, in the order in which they matter:

1. `check` refuses before anything is touched; it never changes the workload.
2. `attach_model` and `attach_optimizer` change live objects and register each undo with `callback` of
   the `ExitStack` they are given, before or right after the change. They change nothing but what
   `memlab.session.rollback` remembers: a change of plans that fails half-way is taken back from there.
3. `forward` wraps every (micro-)forward of training; `evaluate` wraps forwards in eval mode or
   without gradients.
4. Optimizer state is *canonical* in the form the user's own optimizer keeps. A technique that keeps it in another form brings a
   `StateForm`. The session applies these in the order of the list of techniques, one parameter at a time, and uses the same
   pair for `optimizer.state_dict()` and `load_state_dict()`, so checkpoints stay in the user's own format. Data of parameters
   and buffers is replaced, not written: what a change that fails goes back to is the old data.
5. What few techniques need is no part of the contract: they bring it along (`memlab.runtime.mechanisms`).
6. Everything runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from memlab.errors import MemlabError
from memlab.plan import Plan

if TYPE_CHECKING:
    from memlab.runtime.workload import Workload


@dataclass(frozen=True)
class Description:
    """One setting of a technique in words.

    Example:
        >>> Description("--accumulate N", "activations ÷ N", "small kernels", "same gradient", "batches of one row").flags
        '--accumulate N'
    """

    flags: str  # what is typed for it
    saves: str  # which bytes on the device, and how many of them
    costs: str  # in time, or off the device
    exactness: str  # how its gradients, updates and losses relate to those of the loop as written
    gives_nothing: str  # where it does not lower the peak, or is refused


HOLDS_GRADIENTS = "the loop holds gradients beside its weights (in a list, or as views)"

ModelCall = Callable[..., Any]
_T = TypeVar("_T", bound="Technique")


@dataclass
class Host:
    """Channel by which techniques tell the session they are in, and ask it."""

    # all that are on the workload, in the order of their list
    techniques: Callable[[], Sequence[Technique]] = lambda: ()
    # gradients are complete in the middle of a backward pass, and about to go
    gradients_complete: Callable[[], None] = lambda: None
    # what was allocated since the step began was a trial, and is no peak of the plan
    only_tried: Callable[[], None] = lambda: None
    # steps so far are none of the plan's: in them the loop was only watched
    only_watched: Callable[[], None] = lambda: None
    # a storage got or lost memory without an operator
    storage_resized: Callable[[torch.UntypedStorage], None] = lambda _storage: None
    # how many aliases of each weight are kept meanwhile, to go back to
    aliases: Callable[[], int] = int
    on_trial: Callable[[], bool] = bool  # whether there is a plan to go back to, should this one turn out not to apply
    accumulates: Callable[[], bool] = bool  # whether the loop was seen to make several backward passes for a step
    # whether the graph of a call is kept for the case that memory runs out, and the loop gets outputs of a node in its place
    is_guarded: Callable[[], bool] = bool
    of_rescue: Callable[[], bool] = bool  # whether nobody asked for the plan: memory ran out under the one before
    # called instead of raising a refusal in the middle of the loop's own code or of a backward pass: True when the plan
    # before comes back at the next hook, and the technique does nothing until then
    # (where it has done nothing yet, `as_on_trial`, also a plan that is not on trial goes)
    withdraw: Callable[..., bool] = lambda _refusal, **_how: False
    # a refusal is about to be raised there
    refused: Callable[[MemlabError], None] = lambda _refusal: None
    # whether another session sees to the optimizers, and so to the techniques that work on them alone
    is_led: Callable[[], bool] = bool
    say: Callable[[str], None] = lambda _text: None  # for the log, by a technique that leaves
    coming: Callable[[], Plan] = Plan  # the plan that a change is about to bring

    def predecessor(self, technique: _T) -> _T | None:
        """Return the technique of the same kind that is in force, and makes way for one that is asked by `Technique.check`."""
        kind = type(technique)
        return next((each for each in self.techniques() if type(each) is kind), None)


class Reduces(StrEnum):
    """What techniques reduce, as a receipt has it; in the order of the cheat sheet."""

    ACTIVATIONS = "Activations"
    MODEL_STATES = "Moments, gradients, weights"
    FORMATS = "Number formats"
    ENGINES = "Engines"
    OTHER = "Other settings"


@dataclass(frozen=True)
class Traits:
    """Facts of a kind of technique, the same under all its settings."""

    reduces: Reduces = Reduces.OTHER
    # modules and parameters are others because of it: it is put in before the others, and these are put in anew when it
    # comes or goes
    comes_first: bool = False
    # it runs the model in a way of its own, beside which no other technique is put on the model
    is_engine: bool = False
    # it works on optimizers alone, so that it serves all models of a shared one at once
    is_of_optimizer: bool = False
    # it works within the model's modules, into which compiled code does not look again
    needs_uncompiled: bool = False


class Notes(list[str]):
    """Lines for the log and the receipt, in words."""

    def once(self, line: str) -> None:
        """Add a line, unless it is there."""
        if line not in self:
            self.append(line)


class Technique:
    """Identity technique: changes nothing at any moment.

    Args:
        plan: the plan it is made from; a technique reads only its own field, and what the fields it
            works together with say.

    Attributes:
        field: name of the plan's field it implements.
        descriptions: its settings in words, the plainest first.
        traits: what is known of it whatever its setting.
        host: the session it is in.
        notes: what it has to say.
    """

    field: ClassVar[str]
    descriptions: ClassVar[tuple[Description, ...]] = ()
    traits: ClassVar[Traits] = Traits()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.host = Host()
        self.notes = Notes()

    def brings(self) -> Iterable[object]:
        """Return the special mechanisms that it brings along, see `memlab.runtime.mechanisms`."""
        return (self,)

    # -- which plans it is in ---------------------------------------------------------------------

    @classmethod
    def wanted(cls, plan: Plan) -> bool:
        """Return whether the plan asks for this technique."""
        return cls.field in plan.changes()

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        """Return the part of the plan that `check` and what is attached depend on; equal settings are kept when a plan changes."""
        return getattr(plan, cls.field)

    # -- asked before anything is touched: each raises `RefusalError` with the reason and the nearest thing that works ---

    def check(self, workload: Workload) -> None:
        """Refuse what cannot work."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer this technique cannot serve."""

    # -- in and out -------------------------------------------------------------------------------

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        """Change the live model; register on `undo` what takes the change back."""

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
        """Change a live optimizer, now or when it is first seen; register the undo."""

    def close(self) -> None:
        """Drop what the undo had to leave, once it is out for good; where it never came in, what lies outside of the workload."""

    # -- while it is in ---------------------------------------------------------------------------

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one training forward."""
        return call(*args, **kwargs)

    def evaluate(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward in eval mode or without gradients."""
        return call(*args, **kwargs)

    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Act when the loop calls ``optimizer.step()``; nobody has looked at gradients yet."""

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        """Act after each update, skipped or not."""


def is_around_calls(technique: Technique) -> bool:
    """Return whether a technique does something in training calls of the model."""
    return type(technique).forward is not Technique.forward


def process_count() -> int:
    """Number of processes that train together."""
    distributed = torch.distributed
    is_on = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_on else 1
