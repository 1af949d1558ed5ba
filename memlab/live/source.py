"""`Source`: what a view can see and ask, of a live run as of a recorded one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Flag, auto
from typing import Protocol

from memlab.records.live_state import Moment

# why a source cannot run or predict steps by itself
NEEDS_LOSS = (
    "the loop computes the loss itself: name a loss function, as in %memfit panel --batch inputs,target --loss-fn NAME"
)


class Can(Flag):
    """Actions that a source can do at present; a view disables the rest."""

    NOTHING = 0
    SWITCH = auto()
    RUN = auto()
    PAUSE = auto()
    RESUME = auto()
    CANCEL = auto()
    PREDICT = auto()
    FIND = auto()
    UNDO = auto()
    AS_RECORDED = auto()  # steps are run as one of the loop was recorded, and cannot be kept


class Source(Protocol):
    """A run that views look at and steer. Every method may be called from any thread, and returns at once.

    Nothing asked for here raises because of its value: what cannot be done becomes a refused toggle, with its reason.
    """

    def moment(self) -> Moment:
        """The run at this moment."""

    def can(self) -> Can:
        """Return what may be asked for now."""

    def ask(self, field: str, text: str) -> None:
        """Ask for one setting: a field of `plan.FIELDS`, and a text its `parse` reads."""

    def set_budget(self, budget_bytes: int | None) -> None:
        """Move the budget line."""

    def run(self, *, keep: bool, steps: int | None = None) -> None:
        """Run so many training steps on the batch at hand, or until cancelled; those that are not kept leave nothing behind."""

    def pause(self) -> None:
        """Hold the run at the next step boundary."""

    def resume(self) -> None:
        """Go on."""

    def cancel(self) -> None:
        """End the run at the next step boundary."""

    def find(self) -> None:
        """Ask for the fastest setting that is predicted to fit the budget."""

    def undo(self) -> None:
        """Give the workload back as it was."""

    def training(self) -> AbstractContextManager[None]:
        """Measure the steps that a loop makes within it, and show them."""

    def watch(self, drawn: Callable[[Moment], None]) -> Callable[[], None]:
        """Have a view drawn when something has changed; returns what ends that.

        The callable is held weakly where it is a method: a view that is dropped is drawn no more.
        """
