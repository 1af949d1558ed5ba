"""Training steps that a panel runs by itself, one at a time, on the batch at hand."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing

from memlab.measuring.runs import require_complete, training_step
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.workload import Workload
from memlab.session import Session
from memlab.session.snapshot import Snapshot


def measured_steps(
    workload: Workload,
    session: Session,
    meter: Meter,
    following: AbstractContextManager[Callable[[], None]],
    *,
    keep: bool,
) -> Iterator[float]:
    """Steps as of `steps_of`, measured and rescued as those of a cell.

    The meter and its device are closed in the end; `following` stands around the steps, and what it gives is called
    after each.
    """
    with ExitStack() as undo:
        undo.callback(meter.device.close)
        undo.callback(meter.close)
        session.listen(meter)
        undo.callback(session.leave, meter)
        meter.plan_changed(session.plan)
        if session.rescuer is None:
            session.accept(Rescuer(capacity_bytes=meter.device.capacity_bytes))
            undo.callback(session.dismiss)
        stepped = undo.enter_context(following)
        # last in, first out: what the steps changed is put back while everything else still stands
        for loss in undo.enter_context(closing(steps_of(workload, session, keep=keep))):
            stepped()
            yield loss


def steps_of(workload: Workload, session: Session, *, keep: bool) -> Generator[float]:
    """Train a workload on its batch, one step per `next`, until this is closed.

    Plans may be switched between steps; the one in force in the end stays.

    Args:
        workload: with an optimizer and a batch (and a `loss_fn` when the model returns no loss).
        session: of its model.
        keep: keep what the steps train; by default weights, moments, gradients, scheduler, modes and random state are
            put back bit for bit when this is closed, however it ends.

    Yields:
        The loss of each step.

    Raises:
        WorkloadError: no batch or no optimizer, or the model gives no loss.
    """
    require_complete(workload)
    start = session.plan
    before = None if keep else Snapshot(workload)
    # those of the loop's last step, where it drops them at the top
    for optimizer in workload.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if before is None:
        yield from _steps(workload)
        return
    try:
        yield from _steps(workload)
    finally:
        _put_back(session, before, start)


def _steps(workload: Workload) -> Generator[float]:
    modes = {module: module.training for module in workload.model.modules()}
    workload.model.train()
    try:
        while True:
            yield training_step(workload)
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def _put_back(session: Session, before: Snapshot, start: Plan) -> None:
    """Restore under the plan of the start: parameters and state have the form of the plan they were copied under."""
    if not session.attached:
        before.restore()
        return
    last, waiting = session.plan, session.pending
    watching, session.observers = session.observers, []
    try:
        session.switch(start, now=True)
        before.restore()
        session.switch(last, now=True, on_trial=True)
    finally:
        session.observers = watching
    session.ask(waiting)
