"""`measure` and `compare`: real training steps under a plan, with everything put back afterwards."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memlab.errors import WorkloadError
from memlab.measuring.device import Device, device_for
from memlab.measuring.loop_meter import CompanionObserver, meter_of
from memlab.measuring.times import OBSERVED_IN_A_ROW
from memlab.plan import Plan
from memlab.records import Measurement, out_of_memory
from memlab.records.comparison import Comparison
from memlab.runtime.batch import Batch
from memlab.runtime.hooks import loss_of as scalar_loss_of
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.out_of_memory import collect, is_out_of_memory
from memlab.runtime.own_steps import own_steps
from memlab.runtime.ownership import needs_closure
from memlab.runtime.workload import Workload, describe_all
from memlab.session import Session, fit, session_of
from memlab.session.replay import Replay
from memlab.session.snapshot import Snapshot
from memlab.session.tape import Tape, own_step_of, tape_of

_SILENT_SECONDS = 2.0


Workloads = Workload | Sequence[Workload]


def measure(
    workload: Workloads, plan: Plan | str = "", steps: int = 5, *, keep: bool = False, device: Device | None = None
) -> Measurement:
    """Run training steps of a workload under a plan and measure memory and speed.

    Two more steps are run first, observed in detail for the breakdown; the timed ones follow.

    Args:
        workload: with an optimizer and a batch (and a `loss_fn` when the model returns no loss). Several that train
            together make their steps in turn; one of them that has no loss gets the mean of its outputs.
        plan: a plan, or its flags.
        steps: steps to time, 1 or more.
        keep: keep what the steps trained. By default weights, moments, gradients, scheduler and random
            state are put back bit for bit.
        device: what to count memory on, with its capacity; by default that of the model.

    Returns:
        The measurement, with the loss of every step.

    Raises:
        WorkloadError: no batch or no optimizer, or the model gives no loss.
        RefusalError: a technique of the plan does not apply.
        torch.OutOfMemoryError: the plan does not fit.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=(torch.zeros(3, 4), torch.zeros(3, 2)),
        ...                     loss_fn=torch.nn.functional.mse_loss)
        >>> measure(workload, steps=1).samples_per_step
        3.0
    """
    wanted = Plan.of(plan)
    require_steps(steps)
    workloads = each_of(workload)
    with given_or_for(device, workloads[0]) as counted_on, _rehearsals(workloads, wanted, keep=keep) as sessions:
        return _measured_in(sessions, workloads, _recorded_step(workloads, keep=keep), wanted, steps, counted_on)


def given_or_for(device: Device | None, workload: Workload) -> AbstractContextManager[Device]:
    """A device that was given, which stays open, or the workload's own for as long as it is needed."""
    return nullcontext(device) if device is not None else closing(device_for(workload.device))


def each_of(workload: Workloads) -> list[Workload]:
    """One workload, or several that train together, as a list."""
    return [workload] if isinstance(workload, Workload) else list(workload)


@contextmanager
def _rehearsals(workloads: Sequence[Workload], plan: Plan, *, keep: bool) -> Iterator[list[Session]]:
    for each in workloads:
        require_complete(each)
    # all before any is changed: they may share an optimizer
    before = [] if keep else [Snapshot(each) for each in workloads]
    sessions = [] if keep else [session for each in workloads if (session := session_of(each.model)) is not None]
    logged = [(each.log, each.log.steps, len(each.log)) for each in sessions]
    try:
        with ExitStack() as rehearsals:
            yield [rehearsals.enter_context(_in_force(each, plan)) for each in workloads]
    finally:
        with deferred_interrupts():
            for snapshot in before:
                snapshot.restore()
            for log, steps, entries in logged:  # steps that are put back are none of the loop's
                log.steps = steps
                del log[entries:]


@contextmanager
def rehearsal(workload: Workload, plan: Plan) -> Iterator[Session]:
    """A plan in force, for steps that leave nothing behind: gradients dropped, train mode, nobody watching yet.

    Yields:
        The session; who is to watch the steps goes into its `observers`. Those before come back, and so does
        the plan before.
    """
    with _rehearsals([workload], plan, keep=False) as (session,):
        yield session


@contextmanager
def _in_force(workload: Workload, plan: Plan) -> Iterator[Session]:
    with own_steps(), _session_for(workload) as session:
        workload.model.train()
        for optimizer in workload.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with session.observers.away():
            session.switch(plan, now=True)
            yield session


def compare(
    workload: Workloads,
    plans: Iterable[Plan | str],
    steps: int = 5,
    *,
    device: Device | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Measure several plans from the same starting point; the first is what the others are compared with.

    Args:
        workload: as for `measure`.
        plans: plans or their flags; the plan that changes nothing is put first when it is missing.
        steps: steps to time for each plan.
        device: what to count memory on.
        progress: called with a line before each plan is run; by default lines go to standard error once
            the work takes longer than two seconds.

    Returns:
        The comparison; print it with `memlab.report.text.table`. A plan that runs out of memory gets a row
        that says so.

    Raises:
        WorkloadError: as for `measure`.
        RefusalError: as for `measure`.
    """
    wanted = [Plan.of(plan) for plan in plans]
    if Plan() not in wanted:
        wanted.insert(0, Plan())
    report = progress or say_when_long("measuring")
    measurements = []
    for number, plan in enumerate(wanted, 1):
        report(f"{number} of {len(wanted)}: {plan.label}")
        measurements.append(measured_row(workload, plan, steps, device))
    return Comparison(describe_all(each_of(workload)), tuple(measurements))


def measured_row(workload: Workloads, plan: Plan, steps: int, device: Device | None) -> Measurement:
    """The measurement of a plan, or the row that says it ran out of memory."""
    try:
        return measure(workload, plan, steps, device=device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        words = str(error)
    # out of the handler: until here the traceback held the failed step's tensors
    collect()
    return row_of_failure(plan, device or device_for(each_of(workload)[0].device), words)


def row_of_failure(plan: Plan, device: Device, words: str) -> Measurement:
    """The row of a plan that ran out of memory."""
    capacity_bytes = device.capacity_bytes
    if capacity_bytes is None:
        capacity_bytes = device.total_bytes
    asked = words.split(". ")[1] if ". " in words else words
    return out_of_memory(plan, device.name, capacity_bytes, asked)


def say_when_long(doing: str) -> Callable[[str], None]:
    """Progress on standard error, from two seconds on and at most once in two seconds."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last > _SILENT_SECONDS:
            last = time.monotonic()
            sys.stderr.write(f"memlab: {doing} {line}\n")

    return say


def training_step(workload: Workload, *, needs_loss: bool = True) -> float:
    """One step of the workload on its batch: forward, backward, update, gradients dropped.

    Where no loss is needed and the model has none, the mean of its outputs stands for it.
    """

    def evaluated() -> torch.Tensor:
        output = output_of(workload)
        try:
            loss = loss_in(workload, output)
        except WorkloadError:
            if needs_loss:
                raise
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
            loss = torch.stack([tensor.float().mean() for tensor in tensors]).sum()
        del output
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def evaluated_anew() -> Any:
        for optimizer in workload.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return evaluated()

    if any(map(needs_closure, workload.optimizers)):
        losses: list[Any] = [optimizer.step(evaluated_anew) for optimizer in workload.optimizers]
    else:
        losses = [evaluated()]
        for optimizer in workload.optimizers:
            optimizer.step()
    for optimizer in workload.optimizers:
        optimizer.zero_grad(set_to_none=True)
    return float(losses[0].detach())


@contextmanager
def _session_for(workload: Workload) -> Iterator[Session]:
    """The session of a workload's model, whose plan comes back, or one for the time being."""
    session = session_of(workload.model)
    if session is None:
        with fit(workload) as session:
            yield session
        return
    before = session.plan
    with session.switching.aside():
        try:
            yield session
        finally:
            session.switch(before, now=True)


def _recorded_step(workloads: Sequence[Workload], *, keep: bool) -> Tape | None:
    """Return the step of the loop to run again, where workloads make none by themselves.

    That of one model has stand-ins for numbers of the loop's, and trains nothing that is to be kept.
    """
    if len(workloads) > 1:
        return tape_of(workloads)
    return None if keep else own_step_of(workloads[0])


def _measured_in(
    sessions: Sequence[Session],
    workloads: Sequence[Workload],
    tape: Tape | None,
    plan: Plan,
    steps: int,
    device: Device,
) -> Measurement:
    meter = meter_of(lambda: sessions, device)
    sessions[0].observers.only([meter])
    for number, (session, workload) in enumerate(zip(sessions[1:], workloads[1:], strict=True), 2):
        meter.take_in(number, workload.model, [each.name for each in workloads])
        session.observers.only([CompanionObserver(meter, number)])
        for optimizer in workload.optimizers:
            meter.optimizer_found(optimizer)
    meter.tape = tape

    def in_turn() -> float:
        return sum(training_step(each, needs_loss=len(workloads) == 1) for each in workloads)

    step = in_turn if tape is None else replayed(workloads, tape)
    try:
        meter.plan_changed(plan)
        # those that are observed in detail are not timed
        losses = [step() for _ in range(OBSERVED_IN_A_ROW + len(workloads) - 1 + steps)]
        measurement = meter.measurement(plan)
    finally:
        meter.close()
    notes = (note for each in sessions for note in each.notes)
    return replace(measurement, losses=tuple(filter(math.isfinite, losses)), notes=(*measurement.notes, *notes))


def replayed(workloads: Sequence[Workload], tape: Tape) -> Callable[[], float]:
    """Return what runs the step of a loop as it was recorded; which of its numbers is a loss is not known."""
    replay = Replay(
        tape,
        {id(each.model): each.model for each in workloads},
        {id(optimizer): optimizer for each in workloads for optimizer in each.optimizers},
        batch=call_of(workloads[0]) if len(workloads) == 1 else None,
    )
    replay.begin()

    def step() -> float:
        replay.step()
        return math.nan

    return step


def output_of(workload: Workload) -> Any:
    """Return what the model of a workload returns for its batch."""
    call = call_of(workload).copied
    return workload.model(*call.args, **call.kwargs)


def call_of(workload: Workload) -> Batch:
    """The model call within the batch of a workload."""
    return Batch.of(workload.batch if workload.loss_fn is None else workload.batch[0])


def rows_of(workload: Workload) -> int | None:
    """Rows of the batch; None when it cannot be told."""
    return None if workload.batch is None else call_of(workload).rows or None


def loss_in(workload: Workload, output: Any) -> torch.Tensor:
    """The loss in an output of the model, or computed from it."""
    if workload.loss_fn is not None:
        loss: Any = workload.loss_fn(output, workload.batch[1])
    else:
        loss = scalar_loss_of(output)
        if loss is None:  # one of a single element is as good here, where the output is known to be trained on
            first = output[0] if isinstance(output, tuple) and output else output
            loss = output.get("loss") if isinstance(output, Mapping) else first
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise WorkloadError(
            f"{workload.name} returned no loss: pass loss_fn=…, run a %%memfit cell of two steps or more, of which one is recorded, or put the labels into the batch"
        )
    return loss


def require_steps(steps: int) -> None:
    """Refuse to time no step."""
    if steps < 1:
        raise WorkloadError(f"steps={steps}: at least one step must be timed")


def require_complete(workload: Workload, wanted: str = "measuring") -> None:
    """Make sure that a workload can be trained; `wanted` begins the error."""
    if workload.batch is None:
        raise WorkloadError(f"{wanted} needs a batch to train on: Workload(model, optimizer, batch={{…}})")
    if not workload.optimizers:
        raise WorkloadError(f"{wanted} needs the optimizer: Workload(model, optimizer, batch={{…}})")
