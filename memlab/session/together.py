"""Several models that train in one loop: a plan is for all of them or for none."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from memlab.errors import MemlabError, RefusalError
from memlab.plan import FIELDS, Plan, savings
from memlab.runtime.ownership import stepped_by, steps_some_of
from memlab.runtime.workload import Workload

if TYPE_CHECKING:
    from memlab.session.session import Session

# by the model's number, in the order in which they were made; so that a second session is refused instead of wrapping
# the first. The model's hook and the optimizer's hooks keep the session; when the user drops both, nothing here keeps
# the model in memory
by_model: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


def session_of(model: nn.Module) -> Session | None:
    """Return the session attached to a model, or None."""
    return by_model.get(id(model))


def sessions() -> tuple[Session, ...]:
    """Return every session that is attached now, in the order in which they were made."""
    return tuple(by_model.values())


@contextmanager
def without(leaving: Sequence[Session]) -> Iterator[None]:
    """Context for which some sessions, which are about to end, count as over."""
    before = [*by_model.items()]
    for each in leaving:
        by_model.pop(id(each.workload.model), None)
    try:
        yield
    finally:
        made = [*by_model.items()]
        by_model.clear()
        by_model.update(before)
        by_model.update(made)


def is_led(session: Session) -> bool:
    """Return whether a session that was there before has an optimizer of this one's model."""
    for earlier in sessions():
        if earlier is session:
            break
        if any(steps_some_of(one, session.workload.model) for one in earlier.workload.optimizers):
            return True
    return False


def sharing(workload: Workload) -> list[Session]:
    """Return the sessions of other models that an optimizer of a workload updates."""
    others = (each for each in sessions() if each.workload.model is not workload.model)
    return [each for each in others if any(steps_some_of(one, each.workload.model) for one in workload.optimizers)]


def switch_together(together: Sequence[Session], plan: Plan, *, now: bool = True) -> None:
    """Change the plan of models that train together: of all, or of none."""
    before = [each.plan for each in together]
    try:
        for each in together:
            each.switch(plan, now=now)
    except MemlabError:
        for each, earlier in zip(together, before, strict=True):
            each.switch(earlier, now=now)
        raise


def train_together(together: Sequence[Session]) -> None:
    """Note which models train in one loop: a plan that is asked for one of them is for all."""
    for each in together:
        each.train_with(other for other in together if other is not each)


def require_compatible(workload: Workload, plan: Plan, others: Sequence[Workload]) -> None:
    """Refuse settings that one of several models cannot have by itself."""
    changed = plan.changes()
    if not others or not changed:
        return
    names = f"{others[0].name} and {workload.name}"
    of_one_loss = {"gradients": "--release-grads", "precision": "--fp16"}
    for field in [
        each for each in of_one_loss if each in changed and (each == "gradients" or plan.precision == "fp16")
    ]:
        flag = of_one_loss[field]
        reason = f"this cell trains {names}, and {flag} treats the gradients of each as those of its own loss"
        raise RefusalError(field, reason, f"leave out {flag}, or name one model with --model")
    sharers = [each for each in others if any(steps_some_of(one, workload.model) for one in each.optimizers)]
    if not sharers:
        return
    offloaded = {str(what) for what, _ in plan.offload}
    is_of_optimizer = any(saving.is_of_optimizer for saving in savings.changed(Plan(), plan))
    of_calls = {spec.name for spec in FIELDS if spec.is_of_calls}
    is_of_calls = {*changed} <= {*of_calls, "precision", "offload", "optimizer"} and plan.precision in ("keep", "bf16")
    own, theirs = ({id(one) for one in each} for each in (workload.optimizers, sharers[0].optimizers))
    if is_of_calls and offloaded <= {"activations", "optimizer"} and (not is_of_optimizer or own == theirs):
        return
    shared = type(next(one for one in sharers[0].optimizers if steps_some_of(one, workload.model))).__name__
    if is_of_calls and own != theirs:
        reason = (
            f"one {shared} updates weights of {sharers[0].name} and of {workload.name}, and another optimizer the rest"
        )
        instead = "use one optimizer for both, or --accumulate, --checkpoint, --bf16 or --offload activations"
    else:
        reason = f"one {shared} updates {sharers[0].name} and {workload.name}"
        instead = "use --accumulate, --checkpoint, --bf16, --adam8bit or --offload activations,optimizer"
        mine, others_own = ({id(p) for p in each.model.parameters()} for each in (workload, sharers[0]))
        updated = [stepped_by(one) for one in sharers[0].optimizers]
        if any(each & (mine - others_own) and each & (others_own - mine) for each in updated):
            instead = f"give each its own optimizer, or {instead}"
        else:
            reason = f"{sharers[0].name} and {workload.name} share weights, which one {shared} updates for both"
    raise RefusalError("session", f"{reason}, so {plan.label} cannot be applied to each by itself", instead)
