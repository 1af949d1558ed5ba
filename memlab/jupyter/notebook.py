"""`Notebook`: what the magics of one shell share: the shell, the configuration, and what was measured on which model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MemlabError, WorkloadError
from memlab.jupyter import prediction
from memlab.jupyter.background import Background
from memlab.jupyter.config import MemLab
from memlab.jupyter.display import is_rich, show, tell
from memlab.jupyter.history import History
from memlab.jupyter.live import Line, NotebookLine, Saying, TerminalLine
from memlab.jupyter.panel import panels
from memlab.jupyter.parser import PredictOptions
from memlab.jupyter.state import IN_NO_VARIABLE
from memlab.live.control import Control, control_of
from memlab.records.inference import CallKind
from memlab.records.live_state import Moment
from memlab.runtime.namespace import is_held, name_of
from memlab.runtime.workload import Workload
from memlab.session import Session, session_of, sessions

if TYPE_CHECKING:
    from memlab.jupyter.watch import CellWatch


class Notebook:
    """A shell and what the magics know about it. It keeps neither the shell nor models alive."""

    def __init__(self, shell: Any) -> None:
        self._shell = weakref.ref(shell)
        self.config = MemLab(parent=shell)
        self.histories: MutableMapping[nn.Module, History] = WeakIdKeyDictionary()
        # forwards are compared with forwards, generations with generations, and neither with training
        self.inferences: MutableMapping[nn.Module, dict[CallKind, History]] = WeakIdKeyDictionary()
        self.background = Background()
        self.panels = panels()
        self._last_models: list[weakref.ref[nn.Module]] = []
        self._last_name = ""
        self.running: dict[int, CellWatch] = {}  # by thread
        self._begun: Callable[[], CellWatch | None] = lambda: None  # the newest

    @property
    def shell(self) -> Any:
        """The shell; it outlives its magics."""
        return self._shell()

    def cell_begins(self, watch: CellWatch) -> None:
        """A cell runs on this thread, until it is taken out of `running`."""
        self.running[threading.get_ident()] = watch
        self.tell_panels()
        self._begun = weakref.ref(watch)

    def remember(self, *workloads: Workload) -> None:
        """Note whose models the last cell trained, that of its receipt first."""
        self._last_models = [weakref.ref(each.model) for each in workloads]
        self._last_name = " + ".join(each.name for each in workloads)

    def line(self, *, quiet: bool = False) -> Line:
        """A line that says what goes on, unless that is not wanted."""
        if quiet:
            return Line()
        return NotebookLine() if is_rich(self.shell) else TerminalLine()

    @contextmanager
    def saying(self, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
        """A line that says what goes on, and is gone afterwards."""
        line = self.line(quiet=quiet)
        try:
            yield Saying(line)
        finally:
            line.clear()

    def sessions(self) -> list[Session]:
        """Attached sessions, that of the last cell first."""
        last = [model() for model in self._last_models]
        return sorted(sessions(), key=lambda session: all(session.workload.model is not model for model in last))

    def together(self) -> list[Session]:
        """The sessions of the cell that runs, or of the last one, that of its receipt first; where none of them is left, any.

        Raises:
            WorkloadError: none is attached.
        """
        for watch in (self.running.get(threading.get_ident()), self._begun()):
            attached = [] if watch is None else [s for s in watch.models.sessions if session_of(s.workload.model) is s]
            if attached:
                return attached
        models = (model() for model in self._last_models)
        found = [session for model in models if model is not None and (session := session_of(model)) is not None]
        if not found and not sessions():
            raise WorkloadError(self.nothing_applied())
        return found or [*sessions()[:1]]

    def history(self) -> History:
        """Return what was measured on the model of the last cell."""
        model = self._last()
        return self.histories.get(model, History()) if model is not None else History()

    def history_with(self, model: nn.Module) -> History:
        """Return what was measured of a model: of those that the last cell trained together, all of it is with the first."""
        is_of_last = any(each() is model for each in self._last_models)
        return self.history() if is_of_last else self.histories.get(model, History())

    def history_of(self, model: nn.Module) -> History:
        return self.histories.setdefault(model, History())

    def control_of(self, model: nn.Module) -> Control:
        """Return what steers and follows a model's run: one for all its cells and panels."""
        control = control_of(model)
        if control.own_run.ended is None:
            control.own_run.ended = partial(self.keep_run, weakref.ref(model))
            control.loop.is_taken = lambda: self.background.running
        return control

    def control(self) -> Control | None:
        """Return the control of the model of the last cell or panel; None when there is none."""
        model = self._last()
        return self.control_of(model) if model is not None else None

    def keep_run(self, there: weakref.ref[nn.Module], moment: Moment) -> None:
        """Take a panel's own run of a model into its history, and leave its receipt below the panel."""
        model = there()
        if model is None:
            return
        history = self.history_of(model)
        # others are in the panel as they are here
        new = [row for row in moment.measurements if replace(row, losses=()) != history.measured(row.plan)]
        if not new:
            return
        history.add(moment.title, new, moment.events)
        history.keep_predictions(
            each for each in moment.predictions if history.measured(each.plan) and not each.refused
        )
        show(history.require(), display_id="memlab-receipt")

    def subject(
        self, command: str, options: PredictOptions, *, needs_batch: bool = True
    ) -> tuple[list[Workload], History]:
        """Return what is predicted: the models of the last cell, or those in the notebook, and the history of the first."""
        together = self.together() if sessions() else []
        if self.has_left(together):
            if needs_batch:
                tell(IN_NO_VARIABLE.format(together[0].workload.name))
            elif Workload.find(self.shell.user_ns) is not None:
                together = []  # a model that was made again is meant by its new value
        workloads = prediction.workloads_of(
            command, options, self.shell.user_ns, together, self.history_of, needs_batch=needs_batch
        )
        return workloads, self.history_of(workloads[0].model)

    def has_left(self, together: Sequence[Session]) -> bool:
        """Return whether no variable holds any of the models of the last cell; while a cell runs, they are its own."""
        is_running = self.running or self.background.running
        variables = self.shell.user_ns
        return not is_running and bool(together) and not any(is_held(s.workload.model, variables) for s in together)

    def tell_panels(self) -> None:
        """Have open panels say so whose model is in no variable any more: a cell that makes it again makes another one."""
        for control in self.panels.controls:
            control.see_variables(self.shell.user_ns)

    def nothing_applied(self) -> str:
        """Say that no plan is in force."""
        watch = self.running.get(threading.get_ident())
        if watch is not None and not watch.models.sessions:
            return "this cell has not trained a model yet, so no plan is in force; put the flags on its %%memfit line"
        said, trains = "no plan is in force", "trains"
        if self._last_models and all(model() is None for model in self._last_models):
            are = "are" if len(self._last_models) > 1 else "is"
            said = f"{self._last_name} of the last cell {are} deleted, and {said} on any model"
            trains += self._name_of_live_model()
        return f"{said}; put %%memfit on the cell that {trains} (%%memfit? explains)"

    def _name_of_live_model(self) -> str:
        """The variable that holds a model to train, with a space before it; empty where there is none, or several."""
        with suppress(WorkloadError):
            found = Workload.find(self.shell.user_ns)
            return f" {name_of(found.model, self.shell.user_ns)}" if found is not None else ""
        return ""

    def _last(self) -> nn.Module | None:
        return next((model for each in self._last_models if (model := each()) is not None), None)


@contextmanager
def one_line() -> Iterator[None]:
    """Show errors of memlab as one line without a traceback."""
    __tracebackhide__ = True
    try:
        yield
    except MemlabError as error:
        shown = UsageError(str(error))
    else:
        return
    raise shown from None
