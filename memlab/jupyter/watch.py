"""`CellWatch`: plan, session and meter for the duration of one cell.

1. The model is found before the cell runs, or when the cell first trains one. Where several train (a GAN, an actor and
   its critic), each is taken when it is first trained; the plan is applied to each, and one meter measures all.
2. The plan is applied there and then and stays; session and workload belong to the user's objects, so
   the watch keeps them no longer than the cell runs.
3. The meter observes while the cell runs and is closed however the cell ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from memlab.errors import MemlabError, RefusalError, WorkloadError
from memlab.jupyter.first_call import FirstTrainingCall
from memlab.jupyter.history import History
from memlab.jupyter.live import Progress
from memlab.live.control import Control
from memlab.measuring.device import Device, device_for
from memlab.measuring.ledger import tensors_in
from memlab.measuring.runs import row_of_failure
from memlab.measuring.steps import Meter
from memlab.observer import Observer
from memlab.plan import FIELDS, Plan
from memlab.records import Measurement
from memlab.rescue.rescuer import Rescuer
from memlab.rescue.thrash import ThrashWatch
from memlab.session import Session, fit, session_of
from memlab.shortage import is_out_of_memory
from memlab.workload import Batch, Workload, describe_all, live_optimizers, optimizers_of, steps_some_of, unwrap_model

# a loop that accumulates by hand calls its model several times before the first step; after so many, no other is expected
_MOST_CALLS_OF_A_STEP = 64
# views draw four times a second
_LEAST_SECONDS_BETWEEN = 0.02


class CellWatch:
    """Applies a plan where a cell trains, and measures the cell.

    Args:
        plan: the plan to apply; None keeps the one in force.
        capacity_bytes: size the device is to behave as, or None.
        progress: shows steps while they happen; None for silence.
        choose: called once with the workload and its batch at the first training step; the plan it returns is
            applied to that very step. None applies `plan` at once.
        rescue: makes what rescues a workload on a device of so many bytes; None lets the cell fail.
        control_of: what follows and steers the run of a model; None for nothing.

    Attributes:
        sessions: of the models that the cell trains, in the order in which they were found.
        refused: what memlab has refused in the middle of the cell, last; None for nothing.
        passed_over: class of a model that was called and that no optimizer trains; empty for none.
    """

    def __init__(
        self,
        plan: Plan | None,
        capacity_bytes: int | None,
        progress: Progress | None,
        choose: Callable[[Workload], Plan] | None = None,
        rescue: Callable[[Workload, int | None], Rescuer] | None = None,
        control_of: Callable[[nn.Module], Control] | None = None,
    ) -> None:
        self.sessions: list[Session] = []
        self.refused: MemlabError | None = None
        self.passed_over = ""
        self._plan = plan
        self._capacity_bytes = capacity_bytes
        self._progress = progress
        self._choose = choose
        self._rescue = rescue
        self._control_of = control_of
        self._control: Control | None = None
        self._device: Device | None = None
        self._thread: int | None = None  # whose training counts; None for any
        self._meter: Meter | None = None
        self._notes = _Notes(self._step_ended, self._broke_off)
        self._log_from: list[int] = []
        self._next_told_seconds = 0.0
        self._calls: dict[int, int] = {}  # how often a model was called while models were looked for
        self._looking: FirstTrainingCall | None = None
        self._known: set[int] = set()  # optimizers that were there before, or have been looked at
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._undo.close()
        if self._progress is not None:
            self._progress.end()

    def let_go(self) -> None:
        """Keep nothing of the user's any more."""
        self.sessions, self._meter, self._control, self._device = [], None, None, None
        self._notes = _Notes(self._step_ended, self._broke_off)

    @property
    def session(self) -> Session | None:
        """The session of the model that the cell trains, of several the first that has stepped; None until it is found."""
        return next((each for each in self.sessions if each.workload.optimizers), next(iter(self.sessions), None))

    def wait_for_model(self) -> None:
        """Attach to the models that the cell trains."""
        self._known |= {id(one) for one in live_optimizers()}
        self._look()

    def attach(self, workload: Workload, *, alone: bool = False) -> None:
        """Apply the plan to a workload and begin to observe.

        Args:
            workload: model and optimizers.
            alone: whether no other model counts, should the cell train one.

        Raises:
            RefusalError: a technique does not apply; everything is as it was.
        """
        _require_compatible(workload, self._plan, self.sessions)
        if self._choose is not None and self.sessions:
            raise WorkloadError(
                f"--budget chooses a plan for one model, and this cell trains {self.sessions[0].workload.name} and "
                f"{workload.name}; name one with --model"
            )
        attached = session_of(workload.model)
        if self._device is None:
            where = (attached.workload if attached is not None else workload).device
            self._device = device_for(where, self._capacity_bytes)
            self._undo.callback(self._device.close)
        session = _session_for(workload, None if self._choose is not None else self._plan)
        self.sessions.append(session)
        self._log_from.append(len(session.log))
        if self._meter is None:
            self._observe(session, self._device)
            self._let_steer(session)
            if not alone:
                self._undo.callback(register_optimizer_step_pre_hook(self._stepped).remove)
        else:
            self._observe_beside(session, self._meter)
        if _shared(workload, self.sessions[:-1]) is None:
            # an optimizer is stepped by one rescuer
            self._keep_alive(session, self._device)

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look for a further model when an optimizer steps that updates none of those found."""
        if id(optimizer) in self._known or self._thread not in (None, threading.get_ident()):
            return
        self._known.add(id(optimizer))
        if not any(steps_some_of(optimizer, each.workload.model) for each in self.sessions):
            # hooks of steps are being run: none can join them
            self._look(expects_closures=False)

    def _look(self, *, expects_closures: bool = True) -> None:
        """Look at what is called, until every model of a step has been seen."""
        if self._looking is None:
            looking = FirstTrainingCall(self._found, self._thread, expects_closures=expects_closures)
            self._looking = self._undo.enter_context(looking)

    def _found(self, model: nn.Module) -> bool:
        """Attach to a model that is called; True when there is no other one to expect."""
        called = unwrap_model(model)
        calls = self._calls[id(called)] = self._calls.get(id(called), 0) + 1
        holder = next(
            (each for each in self.sessions if any(part is called for part in each.workload.model.modules())), None
        )
        if holder is not None:
            is_over = holder.workload.model is called and (holder.steps > 0 or calls > _MOST_CALLS_OF_A_STEP)
            if is_over:
                self._looking = None
            return is_over
        optimizers = optimizers_of(called)
        if not optimizers and (self.sessions or (calls == 1 and self._has_made_optimizers())):
            # a teacher or a loss with weights, unless it is called again and nothing else trains
            self.passed_over = type(called).__name__
            return False
        try:
            session = session_of(called)
            self.attach(session.workload if session is not None else Workload(called, optimizers))
        except MemlabError as refusal:
            self._broke_off(refusal)
            raise
        return False

    def _has_made_optimizers(self) -> bool:
        return any(id(one) not in self._known for one in live_optimizers())

    def _broke_off(self, error: BaseException) -> None:
        if isinstance(error, MemlabError):
            error.in_loop = True
            self.refused = error

    def _observe(self, session: Session, device: Device) -> None:
        live = session.workload
        sessions = self.sessions
        meter = Meter(
            live.model,
            live.optimizers,
            device,
            lambda: sum(each.host_bytes for each in sessions),
            lambda: (tensor for each in sessions for tensor in each.held_tensors),
        )
        self._meter = meter
        # callbacks run in reverse: first nobody calls the meter any more, then it closes
        self._undo.callback(meter.close)
        # the one that chooses comes first: what it takes is no part of the first step
        watching: list[Observer] = [_Chooser(session, self._choose)] if self._choose is not None else []
        watching += [meter, self._notes, ThrashWatch(session.note)]
        for observer in watching:
            session.observers.append(observer)
            self._undo.callback(session.leave, observer)
            observer.plan_changed(session.plan)

    def _observe_beside(self, session: Session, meter: Meter) -> None:
        """Have the meter of the first model measure another one as well."""
        meter.take_in(session.workload.model)
        for optimizer in session.workload.optimizers:
            meter.optimizer_found(optimizer)
        beside = _Beside(meter, self._notes)
        session.observers.append(beside)
        self._undo.callback(session.leave, beside)

    def _keep_alive(self, session: Session, device: Device) -> None:
        """Have the loop rescued while the cell runs, unless whoever made the session has seen to it."""
        if self._rescue is not None and session.rescuer is None:
            session.accept(self._rescue(session.workload, device.capacity_bytes))
            self._undo.callback(session.dismiss)

    def _let_steer(self, session: Session) -> None:
        """Have panels follow the cell, and whoever uses them steer it."""
        if self._control_of is None or self._meter is None:
            return
        self._control = control = self._control_of(session.workload.model)
        if self._progress is not None:
            self._undo.callback(control.watch(self._progress.draw, self._progress.AFTER_SECONDS))
        control.training_begins(session, self._meter)
        self._undo.callback(control.training_ended)
        self._undo.callback(control.stepped)

    def _step_ended(self) -> None:
        """Have views follow; many short steps are taken in at once."""
        if self._control is not None and perf_counter() >= self._next_told_seconds:
            self._control.stepped()
            self._next_told_seconds = perf_counter() + _LEAST_SECONDS_BETWEEN

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans that were in force during the cell, the last one last."""
        return tuple(self._notes.plans)

    def keep(self, history: History, error: BaseException | None = None) -> int:
        """Put what was measured into a history, once the cell is over.

        Args:
            history: of the model that was trained.
            error: what ended the cell, if anything; a plan that ran out of memory gets a row that says so.

        Returns:
            How many steps ended in the cell.
        """
        session, meter = self.session, self._meter
        if session is None or meter is None:
            return 0
        if error is not None:
            session.loop_was_left()
        measurements = [m for plan in self._notes.plans if (m := _measured(meter, plan)) is not None]
        steps = meter.steps
        if self._notes.batch is not None and session.attached and len(self.sessions) == 1:
            history.batch = without_graph(self._notes.batch)
        notes = tuple(dict.fromkeys(note for each in self.sessions for note in each.notes))
        if measurements and notes:
            measurements[-1] = replace(measurements[-1], notes=(*measurements[-1].notes, *notes))
        if error is not None and is_out_of_memory(error):
            measurements = [m for m in measurements if m.plan != session.plan.label]
            measurements.append(row_of_failure(session.plan, meter.device, str(error)))
        history.add_steps(steps)
        history.add(self._title(meter, len(steps)), measurements, self._events())
        return len(steps)

    def _events(self) -> tuple[str, ...]:
        """Return what was done to the models meanwhile, in words."""
        several = len(self.sessions) > 1
        return tuple(
            f"{each.workload.name}: {entry}" if several else str(entry)
            for each, before in zip(self.sessions, self._log_from, strict=True)
            for entry in each.log[before:]
        )

    def _title(self, meter: Meter, steps: int) -> str:
        sizes = shape_of(self._notes.batch)
        batch = [f"batch {' × '.join(map(str, sizes))}"] if sizes else []
        counted = f"{steps} step{'' if steps == 1 else 's'}"
        described = describe_all([each.workload for each in self.sessions])
        return " · ".join(["memfit", described, *batch, meter.device.name, counted])


class _Chooser(Observer):
    """Chooses the plan at the first training forward of a cell, when the batch is known, and applies it to it.

    A session looks at its techniques after its observers were told of a forward, so the forward that begins
    runs under the new plan already.

    Args:
        session: of the model that is trained.
        choose: called with the workload and its batch.
    """

    def __init__(self, session: Session, choose: Callable[[Workload], Plan]) -> None:
        self._session = session
        self._choose: Callable[[Workload], Plan] | None = choose

    def forward_begins(self, batch: Batch) -> None:
        choose, self._choose = self._choose, None
        if choose is not None:
            live = self._session.workload
            plan = choose(Workload(live.model, live.optimizers, without_graph(batch), name=live.name))
            self._session.switch(plan, now=True)


class _Notes(Observer):
    """Notes which plans were in force during a cell, and its largest batch, the last of several.

    Args:
        step_ended: called after each step.
        broke_off: called with what a forward or a step has raised.
    """

    def __init__(self, step_ended: Callable[[], None], broke_off: Callable[[BaseException], None]) -> None:
        self.plans: list[Plan] = []
        self.batch: Batch | None = None
        self._most_elements = 0
        self._step_ended = step_ended
        self._broke_off = broke_off

    def plan_changed(self, plan: Plan) -> None:
        self.plans = [*(known for known in self.plans if known != plan), plan]

    def forward_begins(self, batch: Batch) -> None:
        elements = _elements(batch)
        if elements >= self._most_elements:
            self.batch, self._most_elements = batch, elements

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._step_ended()

    def interrupted(self) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self._broke_off(error)


class _Beside(Observer):
    """Tells the meter of one model what happens to another one of the same loop.

    Calls of the other model within a call of the first are part of that call, and steps of a shared optimizer are
    told by the first.
    """

    def __init__(self, meter: Meter, notes: _Notes) -> None:
        self._meter = meter
        self._notes = notes
        self._is_inner = False

    def plan_changed(self, plan: Plan) -> None:
        if plan not in self._notes.plans:
            self._meter.plan_changed(plan)
            self._notes.plan_changed(plan)

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        self._meter.optimizer_found(optimizer)

    def forward_begins(self, batch: Batch) -> None:
        self._is_inner = self._meter.in_forward
        if not self._is_inner:
            self._meter.forward_begins(batch)

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        if not self._is_inner:
            self._meter.forward_ended(loss)

    def gradients_complete(self) -> None:
        self._meter.gradients_complete()

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        self._meter.storage_resized(storage)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._meter.step_begins(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._meter.step_ended(optimizer, skipped)
        self._notes.step_ended(optimizer, skipped)

    def interrupted(self) -> None:
        self._meter.interrupted()
        self._notes.interrupted()


def without_graph(batch: Batch) -> Batch:
    """The same batch, whose tensors keep no graph alive (that of a generator, say) and share their memory."""

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        return value.detach().requires_grad_()

    args, kwargs = tree_map(cut, (batch.args, dict(batch.kwargs)))
    return Batch(args, kwargs)


def _elements(batch: Batch) -> int:
    """Elements of all tensors of a batch."""
    return sum(tensor.numel() for tensor in tensors_in((batch.args, batch.kwargs)))


def shape_of(batch: Batch | None) -> tuple[int, ...]:
    """Sizes of the first tensor of a batch; empty without one."""
    tensors = tensors_in((batch.args, batch.kwargs)) if batch is not None else iter(())
    return tuple(next((tensor.shape for tensor in tensors if tensor.dim()), ()))


def _session_for(workload: Workload, plan: Plan | None) -> Session:
    session = session_of(workload.model)
    if session is None:
        return fit(workload, plan or Plan())
    if _made_anew(workload, session):
        # the old optimizer, and the moments it keeps, must not live on in the session
        kept = session.plan
        session.undo()
        return fit(workload, kept if plan is None else plan)
    if plan is not None:
        session.switch(plan, now=True)
    return session


# settings that concern the model call alone, so that models whose parameters one optimizer holds can have each its own
_OF_CALLS = ("accumulation", "batchnorm", "checkpointing", "tiling", "loss")


def _require_compatible(workload: Workload, plan: Plan | None, others: Sequence[Session]) -> None:
    """Refuse settings that one of several models cannot have by itself.

    Raises:
        RefusalError: two models share an optimizer, or gradients of one belong to the loss of another.
    """
    if plan is None or not others:
        return
    shared = next(
        (one for each in others for one in each.workload.optimizers if steps_some_of(one, workload.model)), None
    )
    names = f"{others[0].workload.name} and {workload.name}"
    asked = {spec.name for spec in FIELDS if getattr(plan, spec.name) != getattr(Plan(), spec.name)}
    if "gradients" in asked or plan.precision == "fp16":
        raise RefusalError(
            "session",
            f"this cell trains {names}, and {plan.label} treats the gradients of each as those of its own loss",
            "leave out --release-grads and --fp16, or name one model with --model",
        )
    is_of_calls = asked <= {*_OF_CALLS, "precision", "offload"} and plan.precision in (Plan().precision, "bf16")
    if shared is not None and not (is_of_calls and set(plan.offload or ()) <= {"activations"}):
        raise RefusalError(
            "session",
            f"one {type(shared).__name__} updates {names}, so {plan.label} cannot be applied to each by itself",
            "give each its own optimizer, or use settings of the model call: --accumulate, --checkpoint, --bf16, "
            "--offload activations",
        )


def _shared(workload: Workload, others: Sequence[Session]) -> torch.optim.Optimizer | None:
    """An optimizer that updates parameters of this model and of another one."""
    known = (one for each in others for one in each.workload.optimizers)
    return next((one for one in known if steps_some_of(one, workload.model)), None)


def _made_anew(workload: Workload, session: Session) -> bool:
    known = {id(optimizer) for optimizer in session.workload.optimizers}
    return bool(known) and any(id(optimizer) not in known for optimizer in workload.optimizers)


def _measured(meter: Meter, plan: Plan) -> Measurement | None:
    try:
        return meter.measurement(plan)
    except MemlabError:
        # the plan was in force, but no step ended under it
        return None
