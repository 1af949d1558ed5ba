"""`TakenModels`: the models that a cell trains; and what it puts on record: their names, title, rows, notes and events."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from memlab.errors import MemlabError
from memlab.jupyter.cell_observers import Largest
from memlab.measuring.runs import row_of_failure
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.records import Measurement
from memlab.runtime.batch import Batch
from memlab.runtime.namespace import name_of
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.workload import Workload, describe_all
from memlab.session import Session


@dataclass
class Taken:
    """A model that the cell trains, and what belongs to it."""

    session: Session | None  # None once the loop has dropped the model
    model: nn.Module | None  # for the receipt; likewise
    is_fresh: bool  # whether this cell has made its session
    log_from: int  # entries of its log before the cell
    plan_before: Plan
    largest: Largest = field(default_factory=Largest)  # its largest batch
    number: int = 0  # for the meter; 0 where it trains on another thread, and is not measured
    undo: ExitStack = field(default_factory=ExitStack)  # of what observes it; refers to the session by this alone

    def wake(self) -> None:
        if self.session is not None:
            self.session.wake()

    def dismiss(self) -> None:
        if self.session is not None:
            self.session.dismiss()


class TakenModels:
    """The models that a cell trains, by their places: one may take the place of another that the loop has dropped."""

    def __init__(self) -> None:
        self.all: list[Taken] = []
        self._past_events: tuple[str, ...] = ()  # of models that the loop has dropped

    @property
    def sessions(self) -> list[Session]:
        """Sessions of the models, in the order in which they were found; not of those that the loop has dropped."""
        return [taken.session for taken in self.all if taken.session is not None]

    @property
    def session(self) -> Session | None:
        """The session of the model that the cell trains, of several the first that has stepped; None until it is found."""
        sessions = self.sessions
        return next((each for each in sessions if each.workload.optimizers), next(iter(sessions), None))

    @property
    def present(self) -> list[tuple[Session, Taken]]:
        """Sessions of the models that the loop has not dropped, as far as is known, with what belongs to them."""
        return [(taken.session, taken) for taken in self.all if taken.session is not None]

    @property
    def events(self) -> tuple[str, ...]:
        """Return in words what the cell has done to the models."""
        return (*self._past_events, *events_of(self.sessions, [taken.log_from for _, taken in self.present]))

    def take(self, session: Session, plan_before: Plan, *, is_fresh: bool) -> Taken:
        """Add a model that trains."""
        place = next((i for i, each in enumerate(self.all) if each.model is None), len(self.all))
        taken = Taken(session, session.workload.model, is_fresh, len(session.log), plan_before)
        taken.number = next((each.number for each in self.all[place : place + 1]), 0)
        self.all[place : place + 1] = [taken]
        return taken

    def forget_deleted(self) -> None:
        """Let go of models that the loop has dropped, as a search does with one before it goes on with the next.

        They are kept until another is called, for the receipt: many loops are functions, whose model goes when they end.
        """
        known = [
            (taken, weakref.ref(taken.model), weakref.ref(taken.session))
            for taken in self.all
            if taken.model is not None and taken.session is not None
        ]
        logs = [(session.log, session.workload.name) for session in self.sessions]
        has_plans = any(session.techniques for session in self.sessions)
        for taken, _, _ in known:
            taken.model = taken.session = None
        if has_plans:
            gc.collect()  # a model and the plan on it refer to each other
        for (taken, model, session), (log, name) in zip(known, logs, strict=True):
            taken.model, taken.session = model(), session()
            if taken.model is None:
                self._past_events += tuple(f"{name}: {entry}" for entry in log[taken.log_from :])
                taken.session = None
                taken.undo.close()


def tell_apart(workload: Workload, others: Sequence[Workload], variables: Callable[[], Mapping[str, Any]]) -> None:
    """Name models: from the second one on, each is called as it is in the notebook."""
    if not others:
        return
    for each in (*others, workload) if len(others) == 1 else (workload,):
        if each.name == type(each.model).__name__:
            each.name = name_of(each.model, variables())
    alike = [each.name for each in others if each.name.partition(" #")[0] == workload.name]
    if alike:
        workload.name = f"{workload.name} #{len(alike) + 1}"


def notes_of(sessions: Sequence[Session]) -> tuple[str, ...]:
    """Return the notes of techniques, each once; one that is not true of all models with the names of its own."""
    told = {note: [each.workload.name for each in sessions if note in each.notes] for s in sessions for note in s.notes}
    return tuple(note if len(of) == len(sessions) else f"{', '.join(of)}: {note}" for note, of in told.items())


def events_of(sessions: Sequence[Session], log_from: Sequence[int]) -> tuple[str, ...]:
    """Return in words the actions on the models since their logs had so many entries."""
    return tuple(
        f"{each.workload.name}: {entry}" if len(sessions) > 1 else str(entry)
        for each, before in zip(sessions, log_from, strict=True)
        for entry in each.log[before:]
    )


def title_of(sessions: Sequence[Session], batch: Batch | None, device: str, steps: int) -> str:
    """Return models, optimizers, the shape of a batch, the device and how many steps there were, in words."""
    sizes = next((tensor.shape for tensor in (batch.tensors if batch is not None else ()) if tensor.dim()), ())
    if batch is not None and sizes and batch.rows != sizes[0]:
        sizes = (batch.rows, *sizes)  # a list, of which the first is so large
    called_with = [f"batch {' × '.join(map(str, sizes))}"] if sizes else []
    counted = f"{steps} step{'' if steps == 1 else 's'}"
    described = describe_all([each.workload for each in sessions])
    return " · ".join(["memfit", described, *called_with, device, counted])


def measurements_of(
    meter: Meter, plans: Sequence[Plan], notes: tuple[str, ...], last: Plan, error: BaseException | None
) -> list[Measurement]:
    """Return what was measured under each plan; one that ran out of memory gets a row that says so."""
    found: list[Measurement] = []
    for plan in plans:
        with suppress(MemlabError):  # the plan was in force, but no step ended under it
            found.append(meter.measurement(plan))
    if found and notes:
        found[-1] = replace(found[-1], notes=(*found[-1].notes, *notes))
    if error is not None and is_out_of_memory(error):
        found = [each for each in found if each.plan != last.label]
        found.append(row_of_failure(last, meter.device, str(error)))
    return found
