"""Sessions that are attached to models now."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from memlab.runtime.workload import steps_some_of

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


def is_led(session: Session) -> bool:
    """Return whether a session that was there before has an optimizer of this one's model."""
    for earlier in sessions():
        if earlier is session:
            break
        if any(steps_some_of(one, session.workload.model) for one in earlier.workload.optimizers):
            return True
    return False
