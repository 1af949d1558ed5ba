"""The panels of a kernel: one per cell that shows one, closed when that cell is run again."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from memlab.errors import MissingExtraError, SessionError
from memlab.jupyter.comms import Hearing
from memlab.jupyter.display import is_rich, show
from memlab.jupyter.history import History
from memlab.jupyter.main_thread import MainThread
from memlab.live.control import Control, control_of
from memlab.live.replaying import Replay
from memlab.live.source import Source
from memlab.records.run_record import RunRecord
from memlab.runtime.workload import Workload
from memlab.units import parse_bytes

if TYPE_CHECKING:
    from memlab.jupyter.panel import Panel

Shell = Any

_TICK_MILLISECONDS = 250


class Panels:
    """Opens panels and closes them.

    A panel is closed when its cell is run again; where the front end does not say which cell it is, when another one
    is opened.
    """

    def __init__(self) -> None:
        self._open: dict[str, Panel] = {}

    def open(self, shell: Shell, source: Source) -> Panel | None:
        """Make a panel on a run, in place of the one of this cell; None, and text instead, where there are no widgets."""
        from memlab.jupyter.panel import Panel, as_text

        cell = cell_of(shell)
        self.close(cell)
        if not is_rich(shell):
            print(as_text(source))  # noqa: T201 - what was asked for
            return None
        try:
            panel = Panel(source, Hearing(shell.kernel))
        except MissingExtraError as missing:
            print(f"{as_text(source)}\n\nmemfit: as text, because {missing}")  # noqa: T201
            return None
        self._open[cell] = panel
        return panel

    def any_open(self) -> bool:
        """Return whether a panel is on the page."""
        return bool(self._open)

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
        The panel; the last value of a cell is displayed.

    Raises:
        MissingExtraError: ipywidgets, anywidget or plotly is not installed.
        RefusalError: the model cannot be taken over at all (compiled, sharded).
        SessionError: there is no notebook; `%memfit FLAGS` and `memlab.fit` do the same without a panel.
    """
    shell = _shell()
    if shell is None or not is_rich(shell):
        raise SessionError("a panel needs a notebook; in a script, use memlab.fit(workload, plan) and its switch(plan)")
    from memlab.jupyter.panel import require_widgets

    require_widgets()
    control = control_of(workload.model)
    control.begin(workload, *(parse_bytes(size) if size else None for size in (capacity, budget)))
    opened = open_live(panels(), shell, control)
    assert opened is not None
    return opened


def open_live(opened: Panels, shell: Shell, control: Control) -> Panel | None:
    """Make a panel on the live run of a model, and predict what its settings would give."""
    if is_rich(shell):
        control.stage = MainThread(shell)
    made = opened.open(shell, control)
    if made is not None and control.model.batch is not None:
        control.predict()
    return made


def open_recorded(opened: Panels, shell: Shell, record: RunRecord) -> bool:
    """Show a panel on a recorded run; False where there is no page to show it."""
    if not is_rich(shell):
        return False
    replay = Replay(record)
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
    rows = history.comparison.measurements if history.comparison is not None else ()
    control.know(rows, (*history.plan_space, *history.predicted.values()))
    if history.batch is not None:
        control.model.batch = history.batch


def _shell() -> Shell | None:
    from IPython.core.getipython import get_ipython

    return get_ipython()
