"""`CellMagic`: `%%memfit`. It parses, lets a `CellWatch` measure, and shows the receipt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from IPython.core.error import UsageError

from memlab.errors import MemlabError, WorkloadError
from memlab.jupyter import cells, prediction, shown_errors
from memlab.jupyter.background import WAYS_OUT, CellPlace
from memlab.jupyter.display import is_rich, show, tell
from memlab.jupyter.flags import cell_help
from memlab.jupyter.freeing import calls_for_freeing, free, sentence
from memlab.jupyter.history import History
from memlab.jupyter.live import Line, Progress, Saying
from memlab.jupyter.notebook import Notebook, one_line
from memlab.jupyter.panel import bring_up_to_date
from memlab.jupyter.parser import CellOptions, cell_options
from memlab.jupyter.state import out_of_memory_advice, own_frames
from memlab.jupyter.watch import CellWatch
from memlab.live.stage import Cancelled
from memlab.plan import Offloaded, Plan
from memlab.plan.plan import BY_NAME
from memlab.rescue.evidence import Evidence
from memlab.rescue.recovery import NothingFitsError
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.namespace import SeveralModelsError, is_trained_by, stale_optimizers
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.ownership import WITHOUT_VALUES, is_made
from memlab.runtime.workload import Workload
from memlab.session import Session

_NO_MODEL = (
    "no model found: the cell names no torch.nn.Module with values to train, and trains none by calling it (calls within "
    "transforms of torch.func do not count); make the model first, or train it in this cell; for forward passes or "
    "generate() alone add --inference"
)
_UNCALLED = (
    "no model was measured: the cell trains without calling a model (it calls forward directly, parts of one, or what has no "
    "module); call the model itself, or name the part that is called with --model"
)
_NESTED = "%%memfit within a %%memfit cell: a cell has one; put all flags on its line, as in %%memfit --accumulate 4 --checkpoint"


class CellMagic:
    """Runs cells under a plan."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def run(self, line: str, cell: str) -> None:
        """Run a cell under a plan; see `cell_help`."""
        __tracebackhide__ = True
        if threading.get_ident() in self._notebook.running:
            raise UsageError(_NESTED)
        with one_line():
            options = cell_options(line)
            if options.help:
                print(cell_help())  # noqa: T201 - what was asked for
                return
        source = cells.read(self._notebook.shell, cell)
        broken = cells.syntax_error(self._notebook.shell, source)
        if broken is not None:
            cells.raise_shown(self._notebook.shell, broken)
        if options.inference:
            from memlab.jupyter.inference_cell import InferenceCell

            InferenceCell(self._notebook).run(options, source)
        elif options.scale is not None:
            from memlab.jupyter.ranks_cell import RanksCell  # torch's checkpoints are slow to import

            RanksCell(self._notebook).run(options, options.scale, source)
        elif options.background:
            self._run_in_background(options, source)
        else:
            self._run(options, source, CellPlace())

    def _run_in_background(self, options: CellOptions, source: cells.CellSource) -> None:
        def work(place: CellPlace) -> None:
            if not options.quiet:
                tell(f"runs in the background; {WAYS_OUT}")
            self._run(options, source, place)

        with one_line():
            self._notebook.background.start(self._notebook.shell, source, work, self._free_after)

    def _free_after(self, error: BaseException) -> None:
        """Let go of what a failed background cell held; for others IPython's hooks see to it."""
        if self._notebook.config.free and calls_for_freeing(error):
            print(sentence(free([error]), "failed", []))  # noqa: T201 - what happened to the variables

    def _run(self, options: CellOptions, source: cells.CellSource, place: CellPlace) -> None:
        __tracebackhide__ = True
        asked = self._with_defaults(options)
        line = self._notebook.line(quiet=asked.quiet)
        watch = place.watch(
            asked.plan,
            asked.capacity_bytes,
            None if asked.quiet else Progress(line, self._notebook.panels.any_open),
            None
            if asked.budget_bytes is None
            else prediction.choice(asked, self._history_of, self._variables, Saying(line)),
            self._rescue(asked, line) if asked.rescue else None,
            self._notebook.control_of,
            self._variables,
        )
        try:
            self._run_watched(watch, asked, source, place, line)
            self._require_model(watch, options)
        finally:
            # IPython keeps the error that ends a cell, and with it the variables of this function
            watch.forget()

    def _variables(self) -> Mapping[str, Any]:
        variables: dict[str, Any] = self._notebook.shell.user_ns
        return variables

    def _with_defaults(self, options: CellOptions) -> CellOptions:
        """The options of a cell that trains, with what is configured in place of what its line does not say."""
        config, says_plan = self._notebook.config, options.plan is not None
        return replace(
            options,
            plan=Plan.parse(config.plan) if config.plan and not says_plan else options.plan,
            # the configured one is for cells that say nothing about the plan
            budget_bytes=options.budget_bytes if says_plan else options.budget_bytes or config.budget_bytes,
            capacity_bytes=options.capacity_bytes or config.capacity_bytes,
            keep=options.keep or config.kept,
            rescue=options.rescue and config.rescue,
            quiet=options.quiet or config.quiet,
        )

    def _run_watched(
        self, watch: CellWatch, options: CellOptions, source: cells.CellSource, place: CellPlace, line: Line
    ) -> None:
        __tracebackhide__ = True
        with watch:
            with one_line():
                self._find(watch, options, source)
            self._notebook.cell_begins(watch)
            try:
                outcome = place.run(self._notebook.shell, source)
            finally:
                del self._notebook.running[threading.get_ident()]
        refusal = shown_errors.refusal_in(outcome.error)
        with cells.beside("the receipt"):
            steps = self._keep(watch, outcome.error)
            if steps and watch.models.session is not None:
                # whoever interrupted the cell does not wait for predictions
                plans = watch.measuring.plans if outcome.error is None else ()
                self._predict(watch.models.session, watch.models.sessions, plans, options.budget_bytes, line)
            # a refusal is one line
            if outcome.error is None or isinstance(outcome.error, KeyboardInterrupt) or (steps and refusal is None):
                self._show_receipt(watch, steps)
        refusal = watch.errors.refusal or refusal
        if refusal is not None:
            with cells.beside("going back to the plan before"):
                watch.give_up(refusal)
        if outcome.error is not None:
            self._raise(outcome, watch, place, options.keep)

    def _history_of(self, workload: Workload) -> History:
        history = self._notebook.history_of(workload.model)
        history.trained_by(workload.optimizers)
        return history

    def _rescue(self, options: CellOptions, line: Line) -> Callable[[Workload, int | None], Rescuer]:
        def say(text: str) -> None:
            line.clear()  # the one that shows progress; what is said stays above it
            tell(text)  # it is read while the cell runs

        def rescuer_of(workload: Workload, capacity_bytes: int | None) -> Rescuer:
            history = self._history_of(workload)
            return Rescuer(
                options.keep,
                {Plan.of_label(each.plan): each for each in history.plan_space},
                capacity_bytes,
                None if options.quiet else say,
                Evidence(workload.device, capacity_bytes),
            )

        return rescuer_of

    def _predict(
        self,
        session: Session,
        together: Sequence[Session],
        plans: tuple[Plan, ...],
        budget_bytes: int | None,
        line: Line,
    ) -> None:
        """Add what was predicted to what was measured."""
        history = self._notebook.histories[session.workload.model]
        live = session.workload
        is_known = history.batch is not None if len(together) == 1 else history.tape is not None
        if self._notebook.config.predict_cells and is_known and plans:
            with suppress(WorkloadError):
                workloads = [prediction.with_loop(each.workload, self._notebook.history_of) for each in together]
                prediction.predict_rows(history, workloads, plans, Saying(line))
            line.clear()
        if budget_bytes is not None:
            history.say(prediction.budget_line(history, session.plan, budget_bytes))
        control = self._notebook.control_of(live.model)
        bring_up_to_date(control, history)
        if control.views.any_open:
            control.predict()

    def _find(self, watch: CellWatch, options: CellOptions, source: cells.CellSource) -> None:
        # a copy: other cells may make variables meanwhile
        variables = dict(self._notebook.shell.user_ns)
        workloads = []
        with cells.beside("the search for the model among the variables"):
            for stale in stale_optimizers(variables, source.python):
                tell(stale)  # it trains nothing, which nobody notices in a long cell
                watch.search.stale.were_named = True
            workloads = self._named_in(variables, options, source)
        for workload in workloads or (None,):
            self._notebook.background.require_other(workload.model if workload is not None else None)
        try:
            for workload in workloads:
                if not is_made(workload.model):
                    raise WorkloadError(WITHOUT_VALUES.format(workload.name))
                watch.attach(workload, alone=bool(options.models))
        except MemlabError as refusal:
            with cells.beside("going back to the plan before"):
                watch.give_up(refusal)
            raise
        if not workloads:
            watch.search.begin()

    def _named_in(self, variables: dict[str, Any], options: CellOptions, source: cells.CellSource) -> list[Workload]:
        """Return what a cell's text says that it trains; nothing where that is only seen when it trains."""
        try:
            found = [
                Workload.find(variables, source.python, model=name, optimizer=options.optimizer)
                for name in options.models or (None,)
            ]
            workloads = list({id(each.model): each for each in found if each is not None}.values())
            is_sure = options.models or all(is_trained_by(each, variables, source.python) for each in workloads)
        except SeveralModelsError:
            return []
        # what goes by the optimizer, or by models beside, comes with the first call that trains, when the cell has made them
        plan = options.plan or Plan()
        is_early = any(BY_NAME[name].needs_optimizer for name in plan.changes()) and not all(
            each.optimizers for each in workloads
        )
        is_early |= plan.tier_of(Offloaded.FROZEN) is not None
        return workloads if is_sure and (options.models or not is_early) else []

    def _keep(self, watch: CellWatch, error: BaseException | None) -> int:
        if watch.models.session is None:
            return 0
        first = watch.models.session
        self._notebook.tell_panels()
        self._notebook.remember(
            *(each.workload for each in (first, *(s for s in watch.models.sessions if s is not first)))
        )
        return watch.keep(self._notebook.history_of, error)

    def _show_receipt(self, watch: CellWatch, steps: int) -> None:
        if watch.errors.failure:
            tell(watch.errors.failure)
        if watch.models.session is None or (watch.errors.refusal is not None and not steps):
            return
        if steps:
            receipt = self._notebook.histories[watch.models.session.workload.model].receipt()
            # a terminal shows no picture
            show(receipt, exclude=[] if is_rich(self._notebook.shell) else ["image/png"])
        else:
            session, name = watch.models.session, watch.models.session.workload.name
            said = f"so nothing was measured; {session.plan.label} is in force on {name}"
            none = (
                f"{name} was not called in this cell"
                if session.usage.ends_earlier_step
                else "no optimizer step ended in this cell"
            )
            hint = "" if session.usage.ends_earlier_step else "; for forward passes or generate() alone add --inference"
            why = f"{session.observers.failure or none}, {said}{hint}"
            if watch.trained_nothing:
                why = f"nothing of {name} was updated in this cell, so it has no row; {session.plan.label} is in force on it"
            if watch.was_passed_by:
                past = f"{session.usage.how_passed_by}, {said}"
                why = past if session.usage.passed_by is None else f"{session.usage.passed_by}; nothing was measured"
            tell(why)

    def _raise(self, outcome: cells.Outcome, watch: CellWatch, place: CellPlace, keep: frozenset[str]) -> None:
        error = outcome.error
        refusal = shown_errors.refusal_in(error)
        if refusal is not None or isinstance(error, Cancelled):
            said = str(refusal or error)
            if isinstance(refusal, NothingFitsError) and watch.grown:
                said += f" What grows: {'; '.join(watch.grown)}."
            if error is not None:  # nobody debugs a refusal, or what they cancelled: what the loop held goes with it
                release(error)
            if isinstance(error, Cancelled):
                error.__traceback__ = None
                outcome.error = error = None
            raise UsageError(said)
        advice = ""
        if error is not None and is_out_of_memory(error):
            with cells.beside("the advice"):
                batch = (
                    self._notebook.history_of(watch.models.session.workload.model).batch
                    if watch.models.session
                    else None
                )
                advice = out_of_memory_advice(error, watch.models.session, batch, keep)
                outcome.traceback = own_frames(self._notebook.shell, error) or outcome.traceback
        place.raise_shown(self._notebook.shell, outcome, advice)

    def _require_model(self, watch: CellWatch, options: CellOptions) -> None:
        if watch.errors.refusal is not None and not isinstance(watch.errors.refusal, NothingFitsError):
            # somebody between here and there has caught the error; who handles one for lack of memory means to go on
            raise UsageError(str(watch.errors.refusal))
        if watch.models.session is not None or watch.errors.failure:
            return
        # what was trained as it is written is no reason to stop at this cell
        is_trained = watch.search.has_seen_steps and not watch.search.why_none
        why = watch.search.why_none or (_UNCALLED if is_trained else _NO_MODEL)
        if options.plan is not None:
            why = f"{why}; {options.plan.label} was not applied"
            if not is_trained:
                raise UsageError(why)
        tell(why)
