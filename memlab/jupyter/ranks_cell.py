"""`RanksCell`: ``%%memfit --nproc N --scale ENGINE``. The cell runs in other processes and leaves what it did here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError

from memlab.errors import ScaleError, WorkloadError
from memlab.jupyter import cells, prediction
from memlab.jupyter.display import show, tell
from memlab.jupyter.notebook import Notebook, one_line
from memlab.jupyter.parser import CellOptions, one_model
from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.records.comparison import Comparison
from memlab.runtime.workload import Workload
from memlab.scaleout.cell_code import CellChanges, CellCode
from memlab.scaleout.launching import Launched, launch

_ONE = "one process"
_NO_MODEL = (
    "no model found: a cell in several processes trains a model and an optimizer that are there before it; make them in "
    "a cell before"
)


class RanksCell:
    """Runs one cell."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def run(self, options: CellOptions, scale: Scale, source: cells.CellSource) -> None:
        with one_line():
            workload = self._workload(options, source)
            code = CellCode(source.python, self._notebook.shell.user_ns)
            launched = self._launch(options, scale, workload, code)
        self._take(launched.value)
        with cells.beside("the receipt"):
            self._show(workload, launched, scale, options.nproc)

    def _workload(self, options: CellOptions, source: cells.CellSource) -> Workload:
        variables = dict(self._notebook.shell.user_ns)
        found = Workload.find(
            variables,
            source.python,
            model=one_model(options.models, "a cell in several processes"),
            optimizer=options.optimizer,
        )
        if found is None:
            raise WorkloadError(_NO_MODEL)
        self._notebook.background.require_other(found.model)
        schedulers = [value for value in variables.values() if _steps(value, found)]
        found.scheduler = schedulers[0] if len(schedulers) == 1 else None
        if len(schedulers) > 1:
            raise WorkloadError(f"{len(schedulers)} schedulers change the rates of this optimizer: keep one of them")
        return found

    def _launch(self, options: CellOptions, scale: Scale, workload: Workload, code: CellCode) -> Launched:
        config = self._notebook.config
        with self._notebook.saying(quiet=options.quiet or config.quiet) as saying:
            saying(f"starting {options.nproc} processes under {scale}")
            try:
                return launch(
                    code, workload, scale, nproc=options.nproc, say=_print, progress=saying,
                    capacity_bytes=options.capacity_bytes or config.capacity_bytes,
                )  # fmt: skip
            except ScaleError as error:
                for note in getattr(error, "__notes__", ()):
                    print(note)  # noqa: T201 - where it failed
                raise UsageError(str(error)) from None

    def _take(self, brought: CellChanges) -> None:
        """Make the cell's variables what they would be had it run here."""
        variables = self._notebook.shell.user_ns
        for name, now in brought.contained.items():
            kept = variables[name]  # the same object, whoever else holds it
            kept.clear()
            kept.extend(now) if isinstance(kept, list) else kept.update(now)
        variables.update(brought.assigned)
        for name, reason in brought.left.items():
            tell(f"{name} stays on the ranks: {reason}")

    def _show(self, workload: Workload, launched: Launched, scale: Scale, nproc: int) -> None:
        self._notebook.remember(workload)
        seconds = launched.seconds
        tell(
            f"{len(launched.steps)} steps on {nproc} processes; {seconds['out']:.1f} s to send, "
            f"{seconds['there']:.1f} s there, {seconds['back']:.1f} s to return"
        )
        if launched.comparison is not None:
            show(self._receipt(workload, launched.comparison, scale))

    def _receipt(self, workload: Workload, ranks: Comparison, scale: Scale) -> Comparison:
        """The ranks below what the model needed in this process, where that was measured, and what was predicted."""
        history = self._notebook.histories.get(workload.model)
        if history is None:
            return ranks
        history.rank_peaks[str(scale), len(ranks.measurements)] = max(
            r.peak_allocated_bytes for r in ranks.measurements
        )
        if self._notebook.config.predict:
            with self._notebook.saying() as say:
                predicted = prediction.predicted_for_ranks(history, workload, scale, ranks, say)
            ranks = replace(ranks, events=(*ranks.events, *predicted))
        one = history.measured(Plan().label)
        if one is None:
            return ranks
        return replace(ranks, measurements=(replace(one, plan=_ONE), *ranks.measurements))


def _steps(value: Any, workload: Workload) -> bool:
    """Return whether a variable is a scheduler of the workload's optimizer."""
    has_its_shape = hasattr(value, "get_last_lr") and hasattr(value, "state_dict")
    return has_its_shape and any(getattr(value, "optimizer", None) is one for one in workload.optimizers)


def _print(text: str) -> None:
    print(text, end="")  # noqa: T201 - what the cell printed
