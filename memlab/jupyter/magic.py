"""`%%memfit` and `%memfit`: they parse, call the Python API and display; nothing is decided here.

An error that memlab raises on purpose is shown as one line, and the cell counts as failed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand
from torch import nn

from memlab.errors import MemlabError, PlanError, WorkloadError
from memlab.exporting import export
from memlab.jupyter import cells, foresight
from memlab.jupyter.config import MemLab
from memlab.jupyter.display import is_rich, show, show_figure, teach_receipts
from memlab.jupyter.forecast import Forecast
from memlab.jupyter.history import History
from memlab.jupyter.live import Line, NotebookLine, Progress, Saying, TerminalLine
from memlab.jupyter.parser import (
    CellOptions,
    ForesightOptions,
    cell_help,
    cell_options,
    foresight_options,
    line_help,
    plans_in,
    split_words,
    unknown_word,
)
from memlab.jupyter.state import out_of_memory_advice, state_text
from memlab.jupyter.watch import CellWatch, was_raised_by_memlab
from memlab.measuring.runs import compare
from memlab.measuring.steps import device_for
from memlab.plan import Plan
from memlab.records import Comparison, FoundPlan, RunRecord
from memlab.session import Session, session_of, sessions
from memlab.units import parse_bytes
from memlab.workload import Workload

_F = TypeVar("_F", bound=Callable[..., Any])
_Shown = Comparison | Forecast | FoundPlan
_NAME = "memfit"
_NO_MODEL = (
    "no model found: no variable of this notebook is a trainable torch.nn.Module, and the cell made no training "
    "call; make the model first, or train it in this cell"
)

_loaded: weakref.WeakKeyDictionary[Any, MagicMemfit] = weakref.WeakKeyDictionary()


def load(shell: Any) -> None:
    """Register the magics in a shell; harmless when done."""
    if shell not in _loaded:
        _loaded[shell] = MagicMemfit(shell)


def unload(shell: Any) -> None:
    """Undo every session, and remove the magics; harmless when done."""
    magic = _loaded.pop(shell, None)
    if magic is not None:
        magic.close()


def _one_line(function: _F) -> _F:
    """Show errors of memlab as one line without a traceback."""

    @functools.wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except MemlabError as error:
            message = str(error)
        raise UsageError(message)

    return shown  # type: ignore[return-value] # the same signature


class MagicMemfit:
    """What is registered in one shell.

    Args:
        shell: IPython's.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = weakref.ref(shell)
        self._config = MemLab(parent=shell)
        self._histories: weakref.WeakKeyDictionary[nn.Module, History] = weakref.WeakKeyDictionary()
        self._last_model: weakref.ref[nn.Module] | None = None
        self._last_name = ""
        self._undo = ExitStack()
        self._register(shell)

    def close(self) -> None:
        """Undo every session and take everything out of the shell."""
        for session in sessions():
            session.undo()
        self._undo.close()

    # -- %%memfit ------------------------------------------------------------------------------

    def run_cell(self, line: str, cell: str) -> None:
        """Run a cell under a plan; see `cell_help`."""
        with _plain_errors():
            options = cell_options(line)
            if options.help:
                print(cell_help())  # noqa: T201 - what was asked for
                return
        source = cells.read(self.shell, cell)
        broken = cells.syntax_error(self.shell, source)
        if broken is not None:
            cells.raise_shown(self.shell, broken)
        self._run(options, source)

    def _run(self, options: CellOptions, source: cells.Source) -> None:
        budget_bytes = self._budget_of(options)
        line = self._line(options)
        watch = CellWatch(
            self._plan_of(options),
            options.capacity_bytes or self._config.capacity_bytes,
            Progress(line) if line is not None else None,
            self._choice(options, budget_bytes, line) if budget_bytes is not None else None,
        )
        with watch:
            with _plain_errors():
                self._find(watch, options, source)
            outcome = cells.run(self.shell, source)
        steps = self._keep(watch, outcome.error)
        if steps and watch.session is not None:
            # whoever interrupted the cell does not wait for predictions
            plans = watch.plans if outcome.error is None else ()
            self._foretell(watch.session, plans, budget_bytes, line)
        if outcome.error is None or isinstance(outcome.error, KeyboardInterrupt):
            self._show_receipt(watch, steps)
        if outcome.error is not None:
            self._raise(outcome, watch)
        self._require_model(watch, options)

    def _plan_of(self, options: CellOptions) -> Plan | None:
        if options.plan is None and self._config.plan:
            return Plan.parse(self._config.plan)
        return options.plan

    def _line(self, options: CellOptions) -> Line | None:
        if options.quiet or self._config.quiet:
            return None
        return NotebookLine() if is_rich(self.shell) else TerminalLine()

    def _budget_of(self, options: CellOptions) -> int | None:
        """The budget of a cell; the configured one is for cells that say nothing about the plan."""
        if options.budget_bytes is None and options.plan is None:
            return self._config.budget_bytes
        return options.budget_bytes

    def _choice(self, options: CellOptions, budget_bytes: int, line: Line | None) -> Callable[[Workload], Plan]:
        def history_of(workload: Workload) -> History:
            return self._histories.setdefault(workload.model, History())

        return foresight.choice(options, budget_bytes, self._plan_of(options) or Plan(), history_of, Saying(line))

    def _foretell(self, session: Session, plans: tuple[Plan, ...], budget_bytes: int | None, line: Line | None) -> None:
        """Add what was predicted to what was measured."""
        history = self._histories[session.workload.model]
        live = session.workload
        if self._config.predict and history.batch is not None and plans:
            with suppress(WorkloadError):
                workload = Workload(live.model, live.optimizers, history.batch, name=live.name)
                foresight.foretell_rows(history, workload, plans, Saying(line))
            if line is not None:
                line.clear()
        if budget_bytes is not None:
            history.say(foresight.budget_line(history, session.plan, budget_bytes))

    def _find(self, watch: CellWatch, options: CellOptions, source: cells.Source) -> None:
        found = Workload.find(self.shell.user_ns, source.python, model=options.model, optimizer=options.optimizer)
        if found is None:
            watch.wait_for_model()
        else:
            watch.attach(found)

    def _keep(self, watch: CellWatch, error: BaseException | None) -> int:
        if watch.session is None:
            return 0
        model = watch.session.workload.model
        self._last_model = weakref.ref(model)
        self._last_name = watch.session.workload.name
        return watch.keep(self._histories.setdefault(model, History()), error)

    def _show_receipt(self, watch: CellWatch, steps: int) -> None:
        if watch.session is None:
            return
        if steps:
            show(self._histories[watch.session.workload.model].require())
        else:
            state = f"{watch.session.plan.label} is in force on {watch.session.workload.name}"
            print(f"memfit: no optimizer step ended in this cell, so nothing was measured; {state}")  # noqa: T201

    def _raise(self, outcome: cells.Outcome, watch: CellWatch) -> None:
        error = outcome.error
        if error is not None and was_raised_by_memlab(error):
            raise UsageError(str(error))
        advice = ""
        if isinstance(error, torch.OutOfMemoryError):
            advice = out_of_memory_advice(watch.session.plan if watch.session is not None else Plan())
        cells.raise_shown(self.shell, outcome, advice)

    def _require_model(self, watch: CellWatch, options: CellOptions) -> None:
        if watch.session is not None:
            return
        if options.plan is not None:
            raise UsageError(f"{_NO_MODEL}; {options.plan.label} was not applied")
        print(f"memfit: {_NO_MODEL}")  # noqa: T201 - the cell itself was fine

    # -- %memfit -------------------------------------------------------------------------------

    @_one_line
    def run_line(self, line: str) -> _Shown | None:
        """Do what one line says; see `line_help`."""
        words = split_words(line)
        if not words:
            print(self._state())  # noqa: T201 - what was asked for
            return None
        if words[0] in ("-h", "--help"):
            words[0] = "help"
        if words[0].startswith("-"):
            words.insert(0, "switch")
        command = self._commands.get(words[0])
        if command is None:
            raise unknown_word(words[0])
        return command(words[1:])

    @property
    def _commands(self) -> dict[str, Callable[[list[str]], _Shown | None]]:
        return {
            "predict": self._predict,
            "find": self._find_plan,
            "snapshot": self._snapshot,
            "report": self._report,
            "compare": self._compare,
            "switch": self._switch,
            "undo": self._undo_plan,
            "export": self._export,
            "device": self._device,
            "record": self._record,
            "replay": self._replay,
            "help": self._help,
        }

    def _state(self) -> str:
        shown = []
        for session in self._sessions():
            history = self._histories.get(session.workload.model, History())
            shown.append(state_text(session, history, self.shell.user_ns, self._config.capacity))
        return "\n\n".join(shown) or self._nothing_applied()

    def _nothing_applied(self) -> str:
        if self._last_model is not None and self._last_model() is None:
            return f"memfit: {self._last_name} of the last cell is deleted; no plan is in force on any model"
        return "memfit: no plan is in force; put %%memfit on the cell that trains (%%memfit? explains)"

    def _report(self, words: list[str]) -> Comparison:
        _no_more(words, "report")
        comparison = self._history().require()
        show_figure(self.shell, comparison)
        return comparison

    def _predict(self, words: list[str]) -> Forecast:
        options = foresight_options("predict", words)
        workload, history = self._subject("predict", options)
        budget = options.budget or self._config.budget or ("" if options.device else self._config.capacity)
        with self._saying() as say:
            forecast = foresight.forecast(workload, options, budget, history, say)
        show_figure(self.shell, forecast)
        return forecast

    def _find_plan(self, words: list[str]) -> FoundPlan:
        options = foresight_options("find", words)
        workload, history = self._subject("find", options)
        with self._saying() as say:
            found = foresight.found(
                workload, options, options.budget or self._config.budget or self._config.capacity, history, say
            )
        show_figure(self.shell, found)
        print(f"memfit: to apply it: %memfit {str(found.plan) or '--accumulate 1'}")  # noqa: T201
        return found

    def _snapshot(self, words: list[str]) -> None:
        options = foresight_options("snapshot", words)
        workload, _ = self._subject("snapshot", options)
        session = session_of(workload.model)
        plan = options.plan or (session.plan if session is not None else Plan())
        with self._saying() as say:
            file = foresight.snapshot(workload, options, plan, say)
        print(f"memfit: {plan.label}, saved to {file}; open it at https://docs.pytorch.org/memory_viz")  # noqa: T201

    def _subject(self, command: str, options: ForesightOptions) -> tuple[Workload, History]:
        """What is foretold: the model of the last cell, or the one in the notebook."""
        session = next(iter(self._sessions()), None)
        history = self._histories.get(session.workload.model, History()) if session is not None else History()
        workload = foresight.workload_of(command, options, self.shell.user_ns, session, history)
        return workload, self._histories.setdefault(workload.model, History())

    @contextmanager
    def _saying(self) -> Iterator[Callable[[str], None]]:
        """A line that says what goes on, and is gone afterwards."""
        line = NotebookLine() if is_rich(self.shell) else TerminalLine()
        try:
            yield Saying(line)
        finally:
            line.clear()

    def _compare(self, words: list[str]) -> Comparison:
        if not words:
            raise PlanError(
                '%memfit compare: name the plans, each in quotes, as in %memfit compare "--accumulate 4" "--checkpoint"'
            )
        plans = [Plan.parse(word) for word in plans_in(words)]
        session, batch = self._session(), self._history().batch
        if batch is None:
            raise WorkloadError("%memfit compare needs a batch: run a %%memfit cell that trains first")
        workload = Workload(session.workload.model, session.workload.optimizers, batch)
        device = device_for(workload.device, self._config.capacity_bytes)
        with self._saying() as say:
            try:
                compared = compare(workload, plans, device=device, progress=lambda text: say(f"comparing, {text}"))
            finally:
                device.close()
            return foresight.with_predictions(compared, workload, say) if self._config.predict else compared

    def _switch(self, words: list[str]) -> None:
        plan, rest = Plan.parse_known(words)
        if rest or not words:
            # says what is wrong with the first word that is no flag of a plan
            plan = Plan.parse(" ".join(words)) if words else _flags_missing()
        session = self._session()
        before = session.plan
        session.switch(plan, now=True)
        print(f"memfit: {before.label} → {session.plan.label}")  # noqa: T201

    def _undo_plan(self, words: list[str]) -> None:
        everywhere = words == ["all"]
        _no_more([] if everywhere else words, "undo")
        undone = self._sessions() if everywhere else [self._session()]
        for session in undone:
            session.undo()
            history = self._histories.get(session.workload.model)
            if history is not None:
                history.batch = None
            print(f"memfit: {session.workload.name} is as it was")  # noqa: T201
        if not undone:
            print("memfit: nothing to undo")  # noqa: T201

    def _export(self, words: list[str]) -> None:
        to = words.pop(0) if words and not words[0].startswith("-") else "torch"
        plan = Plan.parse(" ".join(words)) if words else self._session().plan
        print(export(plan, to))  # noqa: T201 - what was asked for

    def _device(self, words: list[str]) -> None:
        if words:
            self._config.capacity = _capacity_in(words)
        session = next(iter(self._sessions()), None)
        where = session.workload.device if session is not None else _default_device()
        device = device_for(where, self._config.capacity_bytes)
        device.close()
        limit = "" if self._config.capacity else ", with the memory it has"
        print(f"memfit: memory is counted on {device.name}{limit}")  # noqa: T201

    def _record(self, words: list[str]) -> None:
        file = _file_in(words, "record")
        try:
            file.write_text(self._history().record().to_json(), encoding="utf-8")
        except OSError as error:
            raise MemlabError(f"%memfit record {file}: {error.strerror}") from None
        print(f"memfit: saved to {file}")  # noqa: T201

    def _replay(self, words: list[str]) -> Comparison:
        file = _file_in(words, "replay")
        try:
            comparison = RunRecord.from_json(file.read_text(encoding="utf-8")).comparison
        except OSError as error:
            raise MemlabError(f"%memfit replay {file}: {error.strerror}") from None
        show_figure(self.shell, comparison)
        return comparison

    def _help(self, words: list[str]) -> None:
        _no_more(words, "help")
        print(line_help())  # noqa: T201 - what was asked for

    # -- what is where -------------------------------------------------------------------------

    @property
    def shell(self) -> Any:
        """The shell; it outlives its magics."""
        return self._shell()

    def _sessions(self) -> list[Session]:
        """Attached sessions, that of the last cell first."""
        last = self._last_model() if self._last_model is not None else None
        return sorted(sessions(), key=lambda session: session.workload.model is not last)

    def _session(self) -> Session:
        last = self._last_model() if self._last_model is not None else None
        session = session_of(last) if last is not None else None
        if session is None:
            session = next(iter(sessions()), None)
        if session is None:
            raise WorkloadError(self._nothing_applied().removeprefix("memfit: "))
        return session

    def _history(self) -> History:
        model = self._last_model() if self._last_model is not None else None
        return self._histories.get(model, History()) if model is not None else History()

    def _register(self, shell: Any) -> None:
        # what IPython keeps holds the magics weakly, so that a shell that is dropped can go
        me = weakref.ref(self)

        @no_var_expand
        def memfit(line: str) -> _Shown | None:
            __tracebackhide__ = True
            return _alive(me).run_line(line)

        @no_var_expand
        def memfit_cell(line: str, cell: str) -> None:
            __tracebackhide__ = True
            _alive(me).run_cell(line, cell)

        memfit.__doc__, memfit_cell.__doc__ = line_help(), cell_help()
        shell.register_magic_function(memfit, "line", _NAME)
        shell.register_magic_function(memfit_cell, "cell", _NAME)
        for kind in ("line", "cell"):
            self._undo.callback(shell.magics_manager.magics[kind].pop, _NAME, None)
        shell.configurables.append(self._config)
        self._undo.callback(shell.configurables.remove, self._config)
        teach_receipts(shell, self._config, self._undo)


def _alive(reference: weakref.ref[MagicMemfit]) -> MagicMemfit:
    magic = reference()
    if magic is None:
        raise UsageError("memlab is not loaded: %load_ext memlab")
    return magic


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except MemlabError as error:
        message = str(error)
    else:
        return
    raise UsageError(message)


def _no_more(words: list[str], command: str) -> None:
    if words:
        raise PlanError(f"%memfit {command} {words[0]}: unknown; see %memfit help")


def _flags_missing() -> Plan:
    raise PlanError("%memfit switch needs the flags of a plan, as in %memfit switch --accumulate 4")


def _capacity_in(words: list[str]) -> str:
    flag, has_value, value = words[0].partition("=")
    rest = words[1:]
    if flag == "--capacity" and not has_value and rest:
        value = rest.pop(0)
    if flag != "--capacity" or not value or rest:
        raise PlanError(
            f"%memfit device {' '.join(words)}: expected --capacity SIZE, as in --capacity 4GiB, or --capacity none"
        )
    if value == "none":
        return ""
    parse_bytes(value)
    return value


def _file_in(words: list[str], command: str) -> Path:
    if len(words) != 1:
        raise PlanError(f"%memfit {command} needs one file name, as in %memfit {command} run.json")
    return Path(words[0])


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
