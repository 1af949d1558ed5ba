"""The contract of a technique, and the identity that every technique starts from.

A technique meets the training loop at the two hooks (the model call, the optimizer step) and
overrides only the moments it needs. Rules, in the order in which they matter:

1. `check` refuses before anything is touched; it never changes the workload.
2. `attach_model` and `attach_optimizer` change live objects and register each undo with `callback` of
   the `ExitStack` they are given, before or right after the change. They change nothing but what
   `memlab.session.rollback` remembers: a change of plans that fails half-way is taken back from there.
3. `forward` wraps every (micro-)forward of training; `evaluate` wraps forwards in eval mode or
   without gradients.
4. Optimizer state is *canonical* in the form the user's own optimizer keeps. A technique with
   `changes_state` maps the state of one parameter to a resident form (`pack_state`) and back
   (`unpack_state`); both are pure: new dict out, old dict and its tensors untouched. Data of parameters
   and buffers is replaced, not written, for the same reason. The session applies them in
   the order of the list of techniques, one parameter at a time, and uses the same pair for
   `optimizer.state_dict()` and `load_state_dict()`, so checkpoints stay in the user's own format.
5. With `state_per_step` the resident form is unpacked around each update of a bucket of
   parameters; without it, the technique's own `stepper` works on the resident form.
6. Everything runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from memlab.errors import MemlabError, RefusalError
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


@dataclass(frozen=True)
class AsWritten:
    """What a model and its optimizers have without a technique that has other modules and parameters in their places."""

    modules: Mapping[int, torch.nn.Module]  # the user's, by id of what is in its place
    trained: frozenset[int]  # ids of the parameters that require gradients without it
    groups: Mapping[int, Sequence[torch.nn.Parameter]]  # the parameters of each group of an optimizer, by its id
    attributes: frozenset[str]  # of the model that it has not


HOLDS_GRADIENTS = "the loop holds gradients beside its weights (in a list, or as views)"

ModelCall = Callable[..., Any]
State = dict[str, Any]
Stepper = Callable[[Sequence[torch.nn.Parameter]], None]
WholeStep = Callable[[], bool]


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


class Technique:
    """Identity technique: changes nothing at any moment.

    Args:
        plan: the plan it is made from; a technique reads only its own field, and what the fields it
            works together with say.

    Attributes:
        field: name of the plan's field it implements.
        descriptions: its settings in words, the plainest first.
        changes_state: whether `pack_state` and `unpack_state` do something.
        state_per_step: whether packed state must be unpacked for an update.
        may_skip: whether `skips_step` can say so; a step with a closure is then taken over, and the closure
            evaluated once.
        takes_step: whether the optimizer's step is to be taken over although nothing else says so.
        applies: whether it is known to apply; one that decides by the first call does not know before it.
        learns_from_calls: whether the first training forward of a batch's shape decides how those after it are run.
        draws_in_update: whether it draws random numbers in an update, so that buckets keep their order.
        updates_in_backward: whether a backward pass changes parameters, so that it cannot be run again.
        changes_modules: whether it works within the model's modules, which compiled code does not look into again.
        was_reached: whether it is at work where the loop calls parts of the model, and not the model itself.
        comes_first: whether modules and parameters are others because of it. It is put in before the others, and these are put in
            anew when it comes or goes.
        is_over: whether it was to do something once, and has done it: it is then in force no longer.
        is_engine: whether it runs the model in a way of its own, beside which no other technique is put on the model.
        is_of_optimizer: whether it works on optimizers alone, so that it serves all models of a shared one at once.
        only_watches: whether it has only watched the loop so far, whose memory is as without it.
        predecessor: while `check` runs, the technique of the same kind that is in force and would make way.
        host: the session it is in.
        notes: lines for the log and the receipt, in words.
    """

    field: ClassVar[str]
    descriptions: ClassVar[tuple[Description, ...]] = ()
    changes_state: bool = False
    state_per_step: bool = False
    may_skip: bool = False
    takes_step: bool = False
    applies: bool = True
    learns_from_calls: bool = False
    draws_in_update: bool = False
    updates_in_backward: bool = False
    changes_modules: bool = False
    was_reached: bool = False
    comes_first: bool = False
    is_over: bool = False
    is_engine: bool = False
    is_of_optimizer: bool = False
    only_watches: bool = False
    predecessor: Technique | None = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.host = Host()
        self.notes: list[str] = []

    def note_once(self, line: str) -> None:
        """Add a line to the notes, unless it is there."""
        if line not in self.notes:
            self.notes.append(line)

    # -- which plans it is in ---------------------------------------------------------------------

    @classmethod
    def wanted(cls, plan: Plan) -> bool:
        """Return whether the plan asks for this technique."""
        return cls.field in plan.changes()

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        """The part of the plan that `check` and what is attached depend on; equal settings are kept when a plan changes."""
        return getattr(plan, cls.field)

    # -- asked before anything is touched: each raises `RefusalError` with the reason and the nearest thing that works ---

    def check(self, workload: Workload) -> None:
        """Refuse what cannot work."""

    def check_compiled(self, workload: Workload) -> None:
        """Refuse what cannot work on a compiled model, in place of `check`, where it changes modules: all, by default."""
        raise RefusalError(
            self.field,
            f"{workload.name} is compiled, and compiled code does not look into its modules again",
            "put the plan on the model before torch.compile, or train it uncompiled",
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer this technique cannot serve."""

    def check_modes(self, workload: Workload) -> None:
        """Refuse modes that modules are in now; a loop that has not begun may set others."""

    def check_loop(self, workload: Workload, frame: FrameType) -> None:
        """Refuse a loop that runs, by the code of its newest frame and those above: for a plan that is asked for from elsewhere."""

    def check_traced(self) -> None:
        """Refuse what a traced program of the model could not use, which holds the very weights."""

    # -- in and out -------------------------------------------------------------------------------

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        """Change the live model; register on `undo` what takes the change back."""

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
        """Change a live optimizer, now or when it is first seen; register the undo."""

    def close(self) -> None:
        """The technique is out for good: drop what its undo had to leave, or, where it never came in, what lies outside of the workload."""

    # -- calls of the model -----------------------------------------------------------------------

    def taken_over(self) -> None:
        """The loop calls the model, or the plan is about to change: who looks at weights next is not the loop."""

    def handed_back(self) -> None:
        """The call or the change is over, and the loop goes on."""

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one training forward."""
        return call(*args, **kwargs)

    def evaluate(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward in eval mode or without gradients."""
        return call(*args, **kwargs)

    def trial_over(self) -> None:
        """Forwards and backward passes since the step began were a trial: forget how much they took."""

    def broken_off(self) -> None:
        """The loop was left in the middle of a step, and begins anew with its next forward."""

    # -- what it keeps ----------------------------------------------------------------------------

    def pack_state(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, state: State) -> State:
        """Map the state of one parameter to the form this technique keeps between steps."""
        return state

    def unpack_state(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, state: State) -> State:
        """Map the resident form of one parameter's state back."""
        return state

    def at_home(
        self, parameters: Sequence[torch.nn.Parameter], *, updates: bool = True
    ) -> AbstractContextManager[None]:
        """Context in which parameters are on the device they are used on.

        Args:
            parameters: some of the model's.
            updates: whether they are updated within it, with their gradients beside them; else they are looked at, so
                that state is mapped to where they are used.
        """
        return nullcontext()

    @property
    def parameters_visit(self) -> bool:
        """Return whether parameters come to the device for an update, so that buckets are kept small."""
        return type(self).at_home is not Technique.at_home

    def canonical_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype a parameter or buffer had before this technique; that of the tensor when it changed none."""
        return tensor.dtype

    def as_written(self) -> AsWritten | None:
        """What the model and its optimizers have without it; None where it has put nothing in the places of theirs."""
        return None

    @property
    def held_tensors(self) -> Sequence[torch.Tensor]:
        """Parts of parameters that this technique keeps on the device, beside the model."""
        return ()

    @property
    def beside(self) -> Sequence[tuple[torch.nn.Module, object]]:
        """Modules beside the model that it has changed, each with what of memlab's own belongs to it."""
        return ()

    @property
    def host_bytes(self) -> int:
        """Bytes kept off the device on behalf of this technique."""
        return 0

    # -- the optimizer's step, in the order in which these are called -------------------------------

    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """The loop calls ``optimizer.step()``; nobody has looked at gradients yet."""

    def skips_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this step's update must not happen (gradients that are not finite)."""
        return False

    def whole_step(self, optimizer: torch.optim.Optimizer) -> WholeStep | None:
        """Return what does a step in place of the user's optimizer, and says whether it has; None to leave it to that one."""
        return None

    def stepper(self, optimizer: torch.optim.Optimizer) -> Stepper | None:
        """Return what updates parameters in place of the user's optimizer; None to leave it to that one."""
        return None

    def bucket_coming(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Some parameters will be updated next, or as soon as those are that were announced before them."""

    def around_update(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
    ) -> AbstractContextManager[None]:
        """Context in which a bucket of parameters is updated."""
        return nullcontext()

    def bucket_updated(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Some parameters have been updated, within a step."""

    def buckets_over(self, optimizer: torch.optim.Optimizer) -> None:
        """No bucket is under way any more: the update is complete, or it was broken off."""

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        """Called after each update, skipped or not."""


def process_count() -> int:
    """Number of processes that train together."""
    distributed = torch.distributed
    is_on = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_on else 1
