"""What was measured, per model, across cells: the rows of the receipt."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field, replace
from importlib import metadata

from memlab.errors import MemlabError
from memlab.records import Comparison, Measurement, RunRecord, StepRecord
from memlab.workload import Batch

_VERSIONS_OF = ("torch", "transformers", "bitsandbytes")


@dataclass
class History:
    """Settings tried on one model.

    Args:
        comparison: the receipt; None before the first measured step.
        steps: every step of the measured cells, in order.
        batch: the last batch that was trained on, until the plan is undone.
    """

    comparison: Comparison | None = None
    steps: list[StepRecord] = field(default_factory=list)
    batch: Batch | None = None

    def add(self, title: str, measurements: list[Measurement], events: tuple[str, ...]) -> None:
        """Take in what a cell measured; a plan measured again replaces its old row."""
        for measurement in measurements:
            # cells go on training, each from where the one before stopped: their losses are no drift
            row = replace(measurement, losses=())
            self.comparison = self.comparison.add(row) if self.comparison else Comparison(title, (row,))
        if self.comparison is not None:
            self.comparison = replace(self.comparison, title=title, events=events)

    def add_steps(self, steps: list[StepRecord]) -> None:
        """Append a cell's steps, numbered on from the last one."""
        done = len(self.steps)
        self.steps += [replace(step, step=done + step.step) for step in steps]

    def measured(self, plan: str) -> Measurement | None:
        """The row of a plan, if there is one."""
        rows = self.comparison.measurements if self.comparison else ()
        return next((row for row in rows if row.plan == plan), None)

    def record(self) -> RunRecord:
        """Everything as one value to save.

        Raises:
            MemlabError: nothing was measured yet.
        """
        return RunRecord(self.require(), tuple(self.steps), versions())

    def require(self) -> Comparison:
        """The receipt.

        Raises:
            MemlabError: nothing was measured yet.
        """
        if self.comparison is None:
            raise MemlabError("nothing is measured yet: put %%memfit on the cell that trains, and run it")
        return self.comparison


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a step needs."""
    installed = {"python": platform.python_version()}
    for package in _VERSIONS_OF:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
