"""`CellWatch`: plan, session and meter for the duration of one cell.

1. The model is found before the cell runs, or when the cell first trains one.
2. The plan is applied there and then and stays; session and workload belong to the user's objects, so
   the watch keeps them no longer than the cell runs.
3. The meter observes while the cell runs and is closed however the cell ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memlab.errors import MemlabError
from memlab.jupyter.history import History
from memlab.jupyter.live import Progress
from memlab.live.control import Control
from memlab.measuring.device import Device, device_for
from memlab.measuring.ledger import tensors_in
from memlab.measuring.runs import row_of_failure
from memlab.measuring.steps import Meter
from memlab.observer import Observer
from memlab.plan import Plan
from memlab.records import Measurement
from memlab.rescue.rescuer import Rescuer
from memlab.rescue.thrash import ThrashWatch
from memlab.seams import FirstTrainingCall
from memlab.session import Session, fit, session_of
from memlab.shortage import is_out_of_memory
from memlab.workload import Batch, Workload, steps_some_of, unwrap_optimizer


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
        session: the session of the model the cell trains; None until it is found.
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
        self.session: Session | None = None
        self._plan = plan
        self._capacity_bytes = capacity_bytes
        self._progress = progress
        self._choose = choose
        self._rescue = rescue
        self._control_of = control_of
        self._control: Control | None = None
        self._thread: int | None = None  # whose training counts; None for any
        self._meter: Meter | None = None
        self._notes = _Notes(self._step_ended)
        self._log_from = 0
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._undo.close()
        if self._progress is not None:
            self._progress.end()

    def let_go(self) -> None:
        """Keep nothing of the user's any more."""
        self.session = self._meter = self._control = None
        self._notes = _Notes(self._step_ended)

    def wait_for_model(self) -> None:
        """Attach to the first model that the cell trains."""
        self._undo.enter_context(FirstTrainingCall(self._found, self._thread))

    def attach(self, workload: Workload) -> None:
        """Apply the plan to a workload and begin to observe.

        Raises:
            RefusalError: a technique does not apply; everything is as it was.
        """
        attached = session_of(workload.model)
        device = device_for((attached.workload if attached is not None else workload).device, self._capacity_bytes)
        self._undo.callback(device.close)
        session = _session_for(workload, None if self._choose is not None else self._plan)
        self.session = session
        self._log_from = len(session.log)
        self._observe(session, device)
        self._keep_alive(session, device)
        self._let_steer(session)

    def _found(self, model: nn.Module) -> None:
        session = session_of(model)
        self.attach(session.workload if session is not None else Workload(model, optimizers_of(model)))

    def _observe(self, session: Session, device: Device) -> None:
        live = session.workload
        meter = Meter(live.model, live.optimizers, device, lambda: session.host_bytes, lambda: session.held_tensors)
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
            self._undo.callback(control.watch(self._progress.draw))
        control.training_begins(session, self._meter)
        self._undo.callback(control.training_ended)

    def _step_ended(self) -> None:
        if self._control is not None:
            self._control.stepped()

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
        measurements = [m for plan in self._notes.plans if (m := _measured(meter, plan)) is not None]
        steps = meter.steps
        if self._notes.batch is not None and session.attached:
            history.batch = without_graph(self._notes.batch)
        if measurements and session.notes:
            measurements[-1] = replace(measurements[-1], notes=(*measurements[-1].notes, *session.notes))
        if error is not None and is_out_of_memory(error):
            measurements = [m for m in measurements if m.plan != session.plan.label]
            measurements.append(row_of_failure(session.plan, meter.device, str(error)))
        events = tuple(str(entry) for entry in session.log[self._log_from :])
        history.add_steps(steps)
        history.add(self._title(session, meter, len(steps)), measurements, events)
        return len(steps)

    def _title(self, session: Session, meter: Meter, steps: int) -> str:
        sizes = shape_of(self._notes.batch)
        batch = [f"batch {' × '.join(map(str, sizes))}"] if sizes else []
        counted = f"{steps} step{'' if steps == 1 else 's'}"
        return " · ".join(["memfit", session.workload.describe(), *batch, meter.device.name, counted])


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
    """

    def __init__(self, step_ended: Callable[[], None]) -> None:
        self.plans: list[Plan] = []
        self.batch: Batch | None = None
        self._most_elements = 0
        self._step_ended = step_ended

    def plan_changed(self, plan: Plan) -> None:
        self.plans = [*(known for known in self.plans if known != plan), plan]

    def forward_begins(self, batch: Batch) -> None:
        elements = _elements(batch)
        if elements >= self._most_elements:
            self.batch, self._most_elements = batch, elements

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._step_ended()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Every live optimizer that updates parameters of a model, wherever it is kept."""
    live = (value for value in gc.get_objects() if issubclass(type(value), torch.optim.Optimizer))
    distinct = {id(one): one for one in map(unwrap_optimizer, live)}
    return [optimizer for optimizer in distinct.values() if steps_some_of(optimizer, model)]


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


def was_raised_by_memlab(error: BaseException) -> bool:
    """Whether an error comes from a seam, and not from a call to memlab that stands in the user's code.

    Seams are called by torch (the model call, the optimizer step, backward); the user's own
    `memlab.fit(...)` is called by the user.
    """
    if not isinstance(error, MemlabError):
        return False
    before = ""
    for frame in _frames(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("memlab."):
            return before.startswith("torch.") or module == "memlab.seams"
        before = module
    return False


def _frames(traceback: TracebackType | None) -> Iterable[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


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


def _made_anew(workload: Workload, session: Session) -> bool:
    known = {id(optimizer) for optimizer in session.workload.optimizers}
    return bool(known) and any(id(optimizer) not in known for optimizer in workload.optimizers)


def _measured(meter: Meter, plan: Plan) -> Measurement | None:
    try:
        return meter.measurement(plan)
    except MemlabError:
        # the plan was in force, but no step ended under it
        return None
