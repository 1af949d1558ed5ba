"""A session for a model that was wrapped, or taken out of its wrapper, since another session was made: `fit_in_place_of`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memlab.errors import MemlabError
from memlab.plan import Plan
from memlab.runtime.workload import Workload
from memlab.session.session import Session, fit
from memlab.session.together import sessions, without


def fit_in_place_of(workload: Workload, plan: Plan | None, beside: Sequence[Session]) -> Session:
    """Make a session, and end those of the model's parts or of what it is a part of: two would work on the same layers.

    It keeps its model no longer than others do.

    Args:
        workload: what is trained now.
        plan: the plan to apply; None for the plan of the sessions that end, where it applies.
        beside: sessions that stay, as their models train in the same loop.

    Raises:
        MemlabError: the plan does not apply; all is as before.
    """
    model = workload.model
    others = [each for each in sessions() if each not in beside]
    earlier = [
        each for each in others if is_nested(each.workload.model, model) or is_nested(model, each.workload.model)
    ]
    plans = [each.plan for each in earlier]
    kept = next((each for each in plans if each != Plan()), Plan())
    try:
        for each in earlier:
            each.switch(Plan(), now=True)
        with without(earlier):
            session, refusal = _fit(workload, kept if plan is None else plan, is_needed=plan is not None)
    except BaseException:
        for each, before in zip(earlier, plans, strict=True):
            each.switch(before, now=True)
        raise
    for each in earlier:
        each.undo()
        session.log.note(f"in place of {each.workload.name}, which is {_how(each.workload.model, workload)}")
    if refusal is not None:
        session.log.note(f"without {kept.label}, the plan of {earlier[0].workload.name}: {refusal}")
    return session


def _fit(workload: Workload, plan: Plan, *, is_needed: bool) -> tuple[Session, MemlabError | None]:
    try:
        return fit(workload.held_weakly(), plan), None
    except MemlabError as refusal:
        if is_needed or plan == Plan():
            raise
        return fit(workload.held_weakly()), refusal.with_traceback(None)


def is_nested(part: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is a part of a model."""
    return part is not model and any(each is part for each in model.modules())


def _how(model: nn.Module, workload: Workload) -> str:
    is_part = is_nested(model, workload.model)
    return f"part of {workload.name}" if is_part else f"trained as its {workload.name} alone"
