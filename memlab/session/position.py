"""`Position`: where the training loop is."""

from __future__ import annotations

import threading
from types import FrameType

from memlab.runtime.optimizer_step import OwnStep


class Position:
    """Position of the training loop, and its thread.

    Attributes:
        thread: number of the thread that trains.
        is_within_step: whether the model has been called and the step of its optimizer is not over.
        own_step: the step under way, where the optimizer makes it itself; else None.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_within_step = False
        self.own_step: OwnStep | None = None

    @property
    def is_on_this_thread(self) -> bool:
        """Return whether the thread that trains is the one that asks."""
        return threading.get_ident() == self.thread

    def own_step_around(self, frame: FrameType) -> OwnStep | None:
        """Return the step that an optimizer is making itself, around a frame; one that was broken off ends here."""
        if self.own_step is not None and not self.own_step.is_around(frame):
            self.end_own_step()
        return self.own_step

    def end_own_step(self) -> None:
        """End the step that an optimizer is making itself; do nothing when there is none."""
        own, self.own_step = self.own_step, None
        if own is not None:
            own.close()
