"""`SessionParts`: what the two hooks of a session share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memlab.rescue.rescuer import Rescuer
from memlab.runtime.workload import Workload
from memlab.session.log import Log
from memlab.session.observers import Observers
from memlab.session.position import Position
from memlab.session.switching import Switching
from memlab.session.usage import Usage
from memlab.techniques import Technique


@dataclass(frozen=True)
class SessionParts:
    """Parts of a session.

    Args:
        workload: the live objects.
        switching: the plan in force, which may change at a step boundary or be taken back.
        position: where the loop is.
        observers: who is told of calls and steps.
        log: where it is noted what is done otherwise than asked, and steps are counted.
        usage: what is known of how the loop uses the model.
        rescuing: gives who recovers from out-of-memory errors, or None.
    """

    workload: Workload
    switching: Switching
    position: Position
    observers: Observers
    log: Log
    usage: Usage
    rescuing: Callable[[], Rescuer | None]

    @property
    def techniques(self) -> list[Technique]:
        """The techniques in force."""
        return self.switching.in_force.techniques
