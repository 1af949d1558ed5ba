"""Measurements per model, across cells: the rows of the receipt."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from memlab.errors import MemlabError
from memlab.plan import Plan
from memlab.records import Measurement, Prediction, StepRecord
from memlab.records.comparison import Comparison, timed_anew
from memlab.records.live_state import Moment
from memlab.records.run_record import RunRecord
from memlab.runtime.batch import Batch
from memlab.session.tape import Tape

_VERSIONS_OF = ("torch", "transformers", "bitsandbytes")


@dataclass
class History:
    """Settings tried on one model."""

    comparison: Comparison | None = None  # the rows of the receipt; None before the first measured step
    latest: tuple[str, ...] = ()  # plans that the last cell ran
    steps: list[StepRecord] = field(default_factory=list)  # every step of the measured cells, in order
    # the largest batch of the last cell that trained, until the plan is undone. By reference: `compare` and `find`
    # train on it, and it is a variable of the loop as a rule. It holds no graph
    batch: Batch | None = None
    tape: Tape | None = None  # a step of the loop that trains it with other models, as long as its batch
    predicted: dict[str, Prediction] = field(default_factory=dict)  # what was predicted for the measured plans
    plan_space: tuple[Prediction, ...] = ()  # what was predicted last for all plans on the model's own device
    # the plan that was chosen for a budget, by what it was chosen for
    chosen: dict[Any, Plan] = field(default_factory=dict)
    # highest peak of a rank in bytes, by engine and plan and by number of processes
    rank_peaks: dict[tuple[str, int], int] = field(default_factory=dict)
    is_predicting: bool = True  # whether receipts show predictions; no more after one failed or took too long
    step_count: int = 0  # steps of all cells; those of a millisecond are recorded in part
    _optimizers: str = ""

    def add(self, title: str, measurements: list[Measurement], events: tuple[str, ...]) -> None:
        """Take in what a cell measured; a plan measured again replaces its old row, by the rules of `timed_anew`."""
        for measurement in measurements:
            before = self.measured(measurement.plan)
            if before is not None and _batch_of(before) != _batch_of(measurement):
                self.predicted.pop(measurement.plan, None)  # it was for batches of another size
            row, said = timed_anew(before, measurement)
            if said and self.comparison is not None and self.comparison.measurements[0] is before:
                events = (*events, said)
            # cells go on training, each from where the one before stopped: their losses are no drift
            row = replace(row, losses=())
            self.comparison = self.comparison.add(row) if self.comparison else Comparison(title, (row,))
        if self.comparison is not None and measurements:  # a cell that measured nothing is not what its title describes
            predictions = tuple(self.predicted.values())
            self.comparison = replace(self.comparison, title=title, events=events, predictions=predictions)
            self.latest = tuple(each.plan for each in measurements)

    def trained_by(self, optimizers: Iterable[Any]) -> None:
        """Drop what was measured and predicted with optimizers of other classes: such rows say nothing about these."""
        names = " and ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
        if names and self._optimizers not in ("", names):
            self.comparison, self.plan_space = None, ()
            self.predicted.clear()
            self.chosen.clear()
        self._optimizers = names or self._optimizers

    def say(self, *events: str) -> None:
        """Put lines below the receipt."""
        if self.comparison is not None:
            self.comparison = replace(self.comparison, events=(*self.comparison.events, *events))

    def keep_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Take in predictions of measured plans, for their rows."""
        self.predicted |= {each.plan: each for each in predictions}
        if self.comparison is not None:
            self.comparison = replace(self.comparison, predictions=tuple(self.predicted.values()))

    def add_steps(self, steps: list[StepRecord], count: int) -> None:
        """Append what is recorded of a cell's steps, numbered on from the last one of the cell before."""
        self.steps += [replace(step, step=self.step_count + step.step) for step in steps]
        self.step_count += count

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return self.comparison.measurements if self.comparison is not None else ()

    def measured(self, plan: str) -> Measurement | None:
        return next((row for row in self.measurements if row.plan == plan), None)

    def record(self, moment: Moment | None = None) -> RunRecord:
        """Return all of it as one value to save, with what a panel shows of the run, so that it can be replayed in one."""
        predicted = (*self.plan_space, *(moment.predictions if moment is not None else ()))
        considered = {each.plan: replace(each, timeline=()) for each in predicted}
        record = RunRecord(
            self.require(),
            tuple(self.steps),
            versions(),
            tuple(considered.values()),
            recorded_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        )
        if moment is None:
            return record
        return replace(
            record,
            title=moment.title,
            capacity_bytes=moment.capacity_bytes,
            budget_bytes=moment.budget_bytes,
            points=moment.points,
            changes=moment.changes,
            rescues=moment.rescues,
            events=moment.events,
        )

    def receipt(self) -> Comparison:
        """Return the receipt of a cell: every setting, with those marked that it ran."""
        return replace(self.require(), latest=self.latest)

    def require(self) -> Comparison:
        """Every setting side by side."""
        if self.comparison is None:
            raise MemlabError("nothing is measured yet: put %%memfit on the cell that trains, and run it")
        return self.comparison


def _batch_of(measurement: Measurement) -> tuple[float, float]:
    return measurement.samples_per_step, measurement.tokens_per_step


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a step needs."""
    installed = {"python": platform.python_version()}
    for package in _VERSIONS_OF:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
