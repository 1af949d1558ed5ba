"""`Notebook`: what the magics of one shell share: the shell, the configuration, and what was measured on which model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.error import UsageError
from torch import nn

from memlab.errors import MemlabError, WorkloadError
from memlab.inference_record import CallKind
from memlab.jupyter import foresight
from memlab.jupyter.background import Background
from memlab.jupyter.config import MemLab
from memlab.jupyter.display import is_rich, show
from memlab.jupyter.history import History
from memlab.jupyter.live import Line, NotebookLine, Saying, TerminalLine
from memlab.jupyter.panels import panels
from memlab.jupyter.parser import ForesightOptions
from memlab.live.control import Control, control_of
from memlab.moment import Moment
from memlab.session import Session, session_of, sessions
from memlab.workload import Workload


class Notebook:
    """A shell and what the magics know about it. It keeps neither the shell nor models alive.

    Args:
        shell: IPython's.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = weakref.ref(shell)
        self.config = MemLab(parent=shell)
        self.histories: weakref.WeakKeyDictionary[nn.Module, History] = weakref.WeakKeyDictionary()
        # forwards are compared with forwards, generations with generations, and neither with training
        self.inferences: weakref.WeakKeyDictionary[nn.Module, dict[CallKind, History]] = weakref.WeakKeyDictionary()
        self.background = Background()
        self.panels = panels()
        self._last_model: weakref.ref[nn.Module] | None = None
        self._last_name = ""

    @property
    def shell(self) -> Any:
        """The shell; it outlives its magics."""
        return self._shell()

    def remember(self, workload: Workload) -> None:
        """Note whose model the last cell trained."""
        self._last_model = weakref.ref(workload.model)
        self._last_name = workload.name

    def line(self) -> Line:
        """A line for what goes on."""
        return NotebookLine() if is_rich(self.shell) else TerminalLine()

    @contextmanager
    def saying(self) -> Iterator[Callable[[str], None]]:
        """A line that says what goes on, and is gone afterwards."""
        line = self.line()
        try:
            yield Saying(line)
        finally:
            line.clear()

    def sessions(self) -> list[Session]:
        """Attached sessions, that of the last cell first."""
        last = self._last()
        return sorted(sessions(), key=lambda session: session.workload.model is not last)

    def session(self) -> Session:
        """The session of the last cell, or any.

        Raises:
            WorkloadError: none is attached.
        """
        last = self._last()
        session = session_of(last) if last is not None else None
        if session is None:
            session = next(iter(sessions()), None)
        if session is None:
            raise WorkloadError(self.nothing_applied())
        return session

    def history(self) -> History:
        """Return what was measured on the model of the last cell."""
        model = self._last()
        return self.histories.get(model, History()) if model is not None else History()

    def history_of(self, model: nn.Module) -> History:
        """Return what was measured on a model."""
        return self.histories.setdefault(model, History())

    def control_of(self, model: nn.Module) -> Control:
        """Return what steers and follows a model's run: one for all its cells and panels."""
        control = control_of(model)
        if control.run_ended is None:
            control.run_ended = self.keep_run
            control.is_taken = self._is_taken
        return control

    def control(self) -> Control | None:
        """Return the control of the model of the last cell or panel; None when there is none."""
        model = self._last()
        return self.control_of(model) if model is not None else None

    def _is_taken(self) -> bool:
        return self.background.running

    def keep_run(self, moment: Moment) -> None:
        """Take a panel's own run into the history, and leave its receipt below the panel."""
        history = self.history()
        history.add(moment.title, list(moment.measurements), moment.events)
        history.foretell(each for each in moment.predictions if history.measured(each.plan) and not each.refused)
        show(history.require(), display_id="memlab-receipt")

    def subject(self, command: str, options: ForesightOptions, *, needs_batch: bool = True) -> tuple[Workload, History]:
        """Return what is predicted: the model of the last cell, or the one in the notebook.

        Raises:
            WorkloadError: as for `foresight.workload_of`.
        """
        session = next(iter(self.sessions()), None)
        history = self.histories.get(session.workload.model, History()) if session is not None else History()
        workload = foresight.workload_of(
            command, options, self.shell.user_ns, session, history, needs_batch=needs_batch
        )
        return workload, self.history_of(workload.model)

    def nothing_applied(self) -> str:
        """Say that no plan is in force."""
        if self._last_model is not None and self._last_model() is None:
            return f"{self._last_name} of the last cell is deleted; no plan is in force on any model"
        return "no plan is in force; put %%memfit on the cell that trains (%%memfit? explains)"

    def _last(self) -> nn.Module | None:
        return self._last_model() if self._last_model is not None else None


@contextmanager
def one_line() -> Iterator[None]:
    """Show errors of memlab as one line without a traceback, and a Ctrl-C in its work without its frames.

    Raises:
        UsageError: for each of them.
    """
    __tracebackhide__ = True
    shown: BaseException
    try:
        yield
    except MemlabError as error:
        shown = UsageError(str(error))
    except KeyboardInterrupt as error:
        shown = KeyboardInterrupt(*error.args)  # a new one, which has no frames
    else:
        return
    raise shown from None
