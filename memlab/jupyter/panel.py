"""`Panel`: the widget through which a run is looked at and steered.

1. A message of the page only asks (`memlab.live.source.Source`) and returns in milliseconds, on whatever thread it comes in.
2. Whoever has something to show calls `draw` with a `Moment`; only what differs is sent to the page.
3. What goes wrong while a message is dealt with is shown in the panel: ipywidgets would swallow it.
4. The panel knows its source and no model. It is closed when its cell is run again, and lets go of everything then (`Panels`).
5. A recorded run is shown without torch: what is live is imported where it is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from memlab.errors import MissingExtraError, SessionError
from memlab.exporting import export
from memlab.jupyter.comms import Hearing, let_through
from memlab.jupyter.controls import MAGIC, Controls, fixed
from memlab.jupyter.display import is_rich, show, tell
from memlab.jupyter.main_thread import MainThread
from memlab.jupyter.panel_page import PanelPage, require_widgets, shows_widgets
from memlab.jupyter.saved_view import SavedView, as_text, tried_as_html
from memlab.live.replaying import RunReplay
from memlab.live.source import Source
from memlab.records.live_state import Asked, Moment
from memlab.records.run_record import RunRecord
from memlab.units import parse_bytes

if TYPE_CHECKING:
    from memlab.jupyter.history import History
    from memlab.jupyter.shown_errors import Shell
    from memlab.live.control import Control
    from memlab.runtime.workload import Workload

_TICK_MILLISECONDS = 250


class Panel:
    """A view of a run, with controls."""

    def __init__(self, source: Source, hearing: Hearing | None = None) -> None:
        self._saved = SavedView()
        self._page = PanelPage(fixed() | {"still": self._saved.name})
        self.widget = self._page.widget  # what stands in the page, an ipywidgets widget like any other
        self.source = source
        self._hearing = hearing or Hearing(None)
        self._lock = threading.RLock()
        self._is_closed = False
        self._controls = Controls(source, self._copy)
        self._number = self._frame = -1  # of the moment that is shown
        self._errors: list[str] = []
        self._code = ""
        self.widget.on_msg(self._heard)
        self._undo = ExitStack()
        self._undo.callback(let_through(self.widget))
        self._undo.callback(source.watch(self.draw))
        self.draw(source.moment())

    def draw(self, moment: Moment) -> None:
        """Show a moment that is newer than what is shown: the status always, figure and table where it has new ones."""
        with self._lock:
            if self._is_closed or moment.number < self._number:
                return
            self._number = moment.number
            self._page.show(controls=self._controls.state(moment) | self._words(moment))
            if moment.frame != self._frame:
                self._frame = moment.frame
                self._page.show(table=tried_as_html(moment))
                self._page.show_figure(moment)
                self._saved.update(moment)

    def training(self) -> AbstractContextManager[None]:
        """Measure the steps of a loop and show them, as `%%memfit` does for its cell.

        Example:
            >>> with panel.training():  # doctest: +SKIP
            ...     for batch in batches:
            ...         train(model, optimizer, batch)

        Raises:
            SessionError: the panel shows a recorded run.
        """
        return self.source.training()

    def close(self) -> None:
        """Take the panel off the page and let go of the run; harmless when done."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._undo.close()
        self._page.close()

    def closing(self, done: Callable[[], None]) -> None:
        """Have something done when the panel closes."""
        self._undo.callback(done)

    def _ipython_display_(self) -> None:
        """Show the panel, and below it what a page without its kernel shows in its place."""
        # of an anywidget: with what a hosted notebook needs to load it
        data, metadata = self.widget._repr_mimebundle_()
        moment = self.source.moment()
        show(data | {"text/plain": moment.title}, metadata=metadata, raw=True)
        self._saved.show(moment)

    def _display_(self) -> Any:
        """Return what marimo shows, which has no IPython."""
        return self.widget

    def _words(self, moment: Moment) -> dict[str, str]:
        return {
            "line": moment.status,
            "world": moment.world or self._hearing.world.value,
            "said": _spoken(moment),
            "errors": "\n".join((*moment.errors, *self._errors)),
            "code": self._code,
        }

    # -- messages ------------------------------------------------------------------------------

    def _heard(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        if self._is_closed:
            return
        self._hearing.heard()
        try:
            if message.get("kind") == "not copied":
                self._tell("the browser did not let the code be copied: it stands below")
            self._controls.do(message)
        except Exception as error:  # noqa: BLE001 - ipywidgets would log it where nobody looks
            self._tell(f"{type(error).__name__}: {error}")
        with self._lock:
            self._controls.heard(message)
        self.draw(self.source.moment())

    def _copy(self, target: str) -> None:
        plan = self.source.moment().plan
        self._code = f"%%memfit {plan}".strip() if target == MAGIC else export(plan, target)
        self._page.copy(self._code)

    def _tell(self, words: str) -> None:
        self._errors = [*self._errors, words.splitlines()[0]][-3:]


def _spoken(moment: Moment) -> str:
    """Return what a screen reader is told: what has become of settings, and not every step."""
    said = [f"{toggle.field} {toggle.text}" for toggle in moment.toggles if toggle.asked is not Asked.IDLE]
    measured = moment.measured(moment.plan.label)
    if measured is not None:
        said.append(f"peak {measured.peak_text}")
    return "; ".join([str(moment.activity), *said])


# -- the panels of a kernel -------------------------------------------------------------------------


class Panels:
    """Opens panels and closes them.

    A panel is closed when its cell is run again; where the front end does not say which cell it is, when another one
    is opened.
    """

    def __init__(self) -> None:
        self._open: dict[str, Panel | SavedView] = {}

    def open(self, shell: Shell, source: Source) -> Panel | None:
        """Make a panel on a run, in place of the one of this cell.

        None where there are no widgets: a page shows a table and a picture that follow the run, a terminal text.
        """
        cell = cell_of(shell)
        self.close(cell)
        if not _has_page(shell):
            print(as_text(source.moment()))  # noqa: T201 - what was asked for
            return None
        try:
            self._open[cell] = panel = Panel(source, Hearing(getattr(shell, "kernel", None)))
        except MissingExtraError as missing:
            tell(f"a table without controls, because {missing}")
            self._open[cell] = SavedView(source)
            return None
        return panel

    def any_open(self) -> bool:
        return any(isinstance(each, Panel) for each in self._open.values())

    @property
    def controls(self) -> list[Control]:
        """Controls of the live runs that panels are open on."""
        from memlab.live.control import Control

        sources = [each.source for each in self._open.values() if isinstance(each, Panel)]
        return [each for each in sources if isinstance(each, Control)]

    def close(self, cell: str | None = None) -> None:
        """Close the panel of a cell, or all of them."""
        for each in [cell] if cell is not None else list(self._open):
            panel = self._open.pop(each, None)
            if panel is not None:
                panel.close()


def cell_of(shell: Shell) -> str:
    """The cell that runs, as the front end names it; empty where it does not."""
    try:
        parent = shell.get_parent()
    except AttributeError:  # IPython in a terminal
        return ""
    return str((parent or {}).get("metadata", {}).get("cellId", ""))


@cache
def panels() -> Panels:
    """The panels of this kernel."""
    return Panels()


def panel(workload: Workload, *, budget: str = "", capacity: str = "") -> Panel:
    """Switch settings of a live model with the mouse, and watch its memory and throughput.

    The same as `%memfit panel`. The model gets a session that only watches, unless it has one; `Undo all` ends it.

    Args:
        workload: model and optimizer; with a batch (and a `loss_fn` where the model returns no loss) the panel also predicts
            what each setting would give, and can run training steps by itself.
        budget: where the budget line stands at first, such as "8GiB".
        capacity: memory size to give the device in the panel's own runs.

    Returns:
        The panel; the last value of a cell is displayed. Where there are no magics (marimo), `with panel.training():`
        measures a loop and shows it.

    Raises:
        MissingExtraError: ipywidgets or anywidget is not installed.
        RefusalError: the model cannot be taken over at all (compiled, sharded).
        SessionError: there is no notebook; `%memfit FLAGS` and `memlab.fit` do the same without a panel.
    """
    from IPython.core.getipython import get_ipython

    from memlab.live.control import control_of

    shell = get_ipython()
    if not _has_page(shell):
        raise SessionError("a panel needs a notebook; in a script, use memlab.fit(workload, plan) and its switch(plan)")
    require_widgets()
    control = control_of(workload.model)
    control.begin(workload, *(parse_bytes(size) if size else None for size in (capacity, budget)))
    opened = open_live(panels(), shell, control)
    assert opened is not None
    return opened


def open_live(opened: Panels, shell: Shell, control: Control) -> Panel | None:
    """Make a panel on the live run of a model, and predict what its settings would give."""
    if is_rich(shell):
        control.loop.stage = MainThread(shell)
    made = opened.open(shell, control)
    if made is not None and control.model.batch is not None:
        control.predict()
    return made


def open_recorded(opened: Panels, shell: Shell, record: RunRecord) -> bool:
    """Show a panel on a recorded run; False where there is no page to show it."""
    if not is_rich(shell):
        return False
    replay = RunReplay(record)
    made = opened.open(shell, replay)
    if made is None:
        return False
    from tornado.ioloop import PeriodicCallback

    def tick() -> None:
        replay.tick()

    clock = PeriodicCallback(tick, _TICK_MILLISECONDS)
    made.closing(clock.stop)
    show(made)
    clock.start()
    return True


def bring_up_to_date(control: Control, history: History) -> None:
    """Tell a control what cells have measured and predicted."""
    control.know(history.measurements, (*history.plan_space, *history.predicted.values()))
    if history.batch is not None:
        control.model.called_in_loop(history.batch, history.tape)


def _has_page(shell: Shell | None) -> bool:
    return is_rich(shell) if shell is not None else shows_widgets()
