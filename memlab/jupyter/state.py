"""Messages of `%memfit` about a session, and advice when memory ran out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.jupyter.history import History
from memlab.jupyter.shown_errors import entries
from memlab.plan import Plan
from memlab.rescue.fallback import Place, next_plans
from memlab.rescue.recovery import NothingFitsError, half_of
from memlab.runtime.batch import Batch
from memlab.runtime.callers import is_installed
from memlab.runtime.namespace import is_held
from memlab.runtime.workload import Workload
from memlab.session import Session, check
from memlab.units import format_bytes

IN_NO_VARIABLE = "{} is in no variable of this notebook any more: %memfit undo removes the plan and releases the model"
_MOST_LOG_ENTRIES = 8


def state_text(session: Session, history: History, namespace: Mapping[str, Any], capacity: str) -> str:
    """The plan in force on a model, what it needs, and what happened."""
    workload = session.workload
    rows = {
        "plan in force": session.plan.label,
        "pending": session.pending.label if session.pending is not None else "",
        "steps": str(session.steps),
        "peak allocated": _peak(session.plan, history),
        "offloaded": format_bytes(session.host_bytes) if session.host_bytes else "",
        "capacity": capacity,
    }
    lines = [f"memfit · {workload.describe()}"]
    lines += [f"{name:<16}{value}" for name, value in rows.items() if value]
    lines += [f"{'note':<16}{note}" for note in session.notes]
    lines += [f"{'log':<16}{entry}" for entry in session.log[-_MOST_LOG_ENTRIES:]]
    if not is_held(workload.model, namespace):
        lines.append(IN_NO_VARIABLE.format(workload.name))
    return "\n".join(lines)


def _peak(plan: Plan, history: History) -> str:
    measured = history.measured(plan.label)
    return f"{measured.peak_text} on {measured.device}" if measured else "not measured yet"


def out_of_memory_advice(
    error: BaseException, session: Session | None, batch: Batch | None, keep: Collection[str] = ()
) -> str:
    """Return why memory that ran out was not rescued, and what to try: the first fallback that applies here."""
    if session is None:
        return "memfit: out of memory before any model was trained under a plan."
    said = f"memfit: out of memory under {session.plan.label}"
    if session.growth is not None and (grown := session.growth.text()):
        return f"{said}: {grown}."
    if isinstance(error, NothingFitsError):
        return f"{said}."
    said += f": {session.log.not_rescued}." if session.log.not_rescued else "."
    place = Place.EVALUATION if session.usage.failed_evaluation == id(error) else _place(error)
    if place is Place.STEP:
        said += " The update had begun, and may be done for a part of the weights: load a checkpoint to go on."
    next_plan = _next_plan(session, batch, place, keep)
    if next_plan is None and place is Place.STEP:
        return f"{said} No plan makes this update smaller: take an optimizer that keeps less (--adam8bit, --optim)."
    if next_plan is None:
        return f"{said} No plan that needs less applies here: make the batch smaller or its sequences shorter."
    return f"{said} Try next: %%memfit {next_plan}"


_OF_STEPS = ("step", "wrapper")  # torch's wrapper calls hooks of steps


def _place(error: BaseException) -> Place:
    """Return where memory ran out, as far as the frames of an error tell: in an optimizer's update, or before it."""
    place = Place.FORWARD
    for entry in entries(error.__traceback__):
        this = entry.tb_frame.f_locals.get("self")
        name = entry.tb_frame.f_code.co_name
        if isinstance(this, torch.optim.Optimizer) and name in _OF_STEPS:
            place = Place.STEP
        elif isinstance(this, nn.Module) or name == "backward":  # called by a closure
            place = Place.FORWARD
    return place


def _next_plan(session: Session, batch: Batch | None, place: Place, keep: Collection[str]) -> Plan | None:
    """The first fallback that applies, as a rescue would find it; None without one."""
    rows = (batch.rows or 1) if batch is not None else 2 * session.plan.accumulation
    has_optimizer = bool(session.workload.optimizers)
    refused: set[Plan] = set()
    while True:
        fallbacks = next_plans(
            session.plan, place, rows=rows, keep=keep, has_optimizer=has_optimizer, refused=refused,
            half=half_of(session.workload.device),
        )  # fmt: skip
        plan = next((fallback.plan for fallback in fallbacks), None)
        if plan is None or _applies(session.workload, plan):
            return plan
        refused.add(plan)


def _applies(workload: Workload, plan: Plan) -> bool:
    try:
        check(workload, plan)
    except RefusalError:
        return False
    return True


def own_frames(shell: Any, error: BaseException) -> list[str]:
    """The lines of a traceback through the user's own code, without those of libraries; empty where there are none.

    `%tb` shows the whole of it.
    """
    own: TracebackType | None = None
    for each in reversed([*entries(error.__traceback__)]):
        if not is_installed(each.tb_frame.f_code.co_filename):
            own = TracebackType(own, each.tb_frame, each.tb_lasti, each.tb_lineno)
    if own is None:
        return []
    try:
        alone = type(error)(*error.args)  # without what it was raised from, which are steps of libraries
    except Exception:  # noqa: BLE001 - an error class of the user's may want other arguments
        return []
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(alone), alone, own, tb_offset=0)
    return lines
