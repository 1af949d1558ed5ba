"""Clicks on a panel reach the kernel while a cell runs, wherever the front end can send them then.

How a click travels, and what is done about it:

1. JupyterLab from 4.4 on sends widget messages to a *subshell*, a second thread of the kernel. Other front ends (VS Code,
   Colab), and ipykernel before 7, have the main shell only, which is busy while a cell runs.
2. ipykernel 7.4 sends a widget's messages back to the shell that last *sent* something on it. A panel is made by a cell
   and drawn by the thread that trains, so that would be the busy main shell. `let_through` takes this redirection off
   the panel's widgets, one by one; all other widgets keep it.
3. For every message, IPython's `pre_execute` and `post_execute` hooks run on the thread that handles it; matplotlib's
   shows and closes the figures that the cell is about to draw. Messages of the panel that arrive beside the main
   thread do not trigger them.
4. Which world the panel is in cannot be asked for: it is heard. The front end says hello as soon as it shows the panel,
   and once more a second later; `Hearing` notes on which thread the messages came in.

Known limitations:
    A front end that is slow to make its subshell may send a first message to the main shell. So a single message there
    proves nothing; two of them do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

# ipywidgets, comms and kernels are met at run time, in several versions: anything that has the attributes asked for
Widget = Any
Comm = Any
Kernel = Any

_ROUTE = "_reply_subshell_for"
_ENOUGH_ON_MAIN = 2


class World(Enum):
    """Ways in which clicks reach the run, each as a sentence for the panel."""

    NOBODY = "no front end is connected that could send clicks; %memfit FLAGS does the same"
    UNKNOWN = "whether this front end delivers clicks while a cell runs is not known yet"
    AT_ONCE = "clicks are applied at the next step, also while a cell runs"
    AFTER_CELL = (
        "this front end delivers clicks when the cell ends; train in a thread (%%memfit --background starts one) to have "
        "them applied at the next step"
    )


def let_through(widget: Widget) -> Callable[[], None]:
    """Let a panel's messages reach the kernel on the thread that its front end chose; return what undoes that.

    Where there is nothing to do (another ipykernel, no kernel), it does nothing.
    """
    comm: Comm | None = getattr(widget, "comm", None)
    own: dict[str, Any] = {}
    if comm is not None and _ROUTE not in getattr(comm, "__dict__", {}):
        if hasattr(comm, _ROUTE):
            own[_ROUTE] = lambda _data, subshell_id: subshell_id  # the one that the front end has chosen
        if hasattr(comm, "handle_msg"):
            own["handle_msg"] = partial(_handle_quietly, comm, type(comm).handle_msg)
        comm.__dict__.update(own)

    def undo() -> None:
        for name in own:
            comm.__dict__.pop(name, None)

    return undo


def _handle_quietly(comm: Comm, handle: Callable[[Comm, Any], None], message: Any) -> None:
    """Handle a message without IPython's hooks when it comes in beside the main thread."""
    callback = getattr(comm, "_msg_callback", None)
    if is_main_thread() or callback is None:
        handle(comm, message)
    else:
        callback(message)


def is_main_thread() -> bool:
    """Return whether this is the thread on which cells run, unless they say otherwise."""
    return threading.current_thread() is threading.main_thread()


def world_of(kernel: Kernel | None) -> World:
    """Return what can be said of a kernel before any message has come."""
    if kernel is None:
        return World.NOBODY
    return World.UNKNOWN if getattr(kernel, "_supports_kernel_subshells", False) else World.AFTER_CELL


class Hearing:
    """Hears on which threads a panel's messages come in, and says what that means."""

    def __init__(self, kernel: Kernel | None) -> None:
        self.world = world_of(kernel)
        # marimo, which has no kernel of IPython's, may run cells on another thread than the main one
        self._cells = threading.main_thread() if kernel is not None else threading.current_thread()
        self._on_main = 0

    def heard(self) -> None:
        """Note a message; to be called in every callback, on the thread it runs on."""
        if threading.current_thread() is not self._cells:
            self.world = World.AT_ONCE
        elif self.world is not World.AT_ONCE:
            # a panel that has been heard beside the main thread once can send there always
            self._on_main += 1
            if self._on_main >= _ENOUGH_ON_MAIN:
                self.world = World.AFTER_CELL
