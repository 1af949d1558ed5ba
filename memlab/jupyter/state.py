"""What `%memfit` says about a session, and what to try when memory ran out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from memlab.jupyter.history import History
from memlab.plan import Plan
from memlab.session import Session
from memlab.units import format_bytes
from memlab.workload import unwrap_model

_MOST_LOG_ENTRIES = 8


def state_text(session: Session, history: History, namespace: Mapping[str, Any], capacity: str) -> str:
    """The plan in force on a model, what it needs, and what happened."""
    workload = session.workload
    rows = {
        "plan in force": session.plan.label,
        "pending": session.pending.label if session.pending is not None else "",
        "steps": str(session.steps),
        "peak allocated": _peak(session.plan, history),
        "on host": format_bytes(session.host_bytes) if session.host_bytes else "",
        "capacity": capacity,
    }
    lines = [f"memfit · {workload.describe()}"]
    lines += [f"{name:<16}{value}" for name, value in rows.items() if value]
    lines += [f"{'note':<16}{note}" for note in session.notes]
    lines += [f"{'log':<16}{entry}" for entry in session.log[-_MOST_LOG_ENTRIES:]]
    if not is_in(namespace, workload.model):
        lines.append(
            f"{workload.name} is in no variable of this notebook any more: %memfit undo takes the plan off and lets it go"
        )
    return "\n".join(lines)


def is_in(namespace: Mapping[str, Any], model: nn.Module) -> bool:
    """Whether a variable holds a model, itself or as part of what it holds (a Trainer, a wrapper)."""
    return any(_holds(value, model) for name, value in namespace.items() if not name.startswith("_"))


def _holds(value: Any, model: nn.Module) -> bool:
    if isinstance(value, nn.Module):
        return unwrap_model(value) is model or any(part is model for part in value.modules())
    return getattr(value, "__dict__", {}).get("model") is model


def _peak(plan: Plan, history: History) -> str:
    measured = history.measured(plan.label)
    return f"{format_bytes(measured.peak_allocated_bytes)} on {measured.device}" if measured else "not measured yet"


def out_of_memory_advice(plan: Plan) -> str:
    """One line: the first thing to try that the plan does not do already.

    Example:
        >>> out_of_memory_advice(Plan())
        'memfit: out of memory under as written. Try next: %%memfit --accumulate 2'
    """
    return f"memfit: out of memory under {plan.label}. Try next: %%memfit {_next_plan(plan)}"


def _next_plan(plan: Plan) -> Plan:
    if plan.accumulation < 4:
        return replace(plan, accumulation=2 * plan.accumulation)
    if plan.checkpointing == "off":
        return replace(plan, checkpointing="full")
    return replace(plan, accumulation=2 * plan.accumulation)
