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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
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
    """Ways in which clicks reach the run."""

    NOBODY = "no front end"
    UNKNOWN = "not known yet"
    AT_ONCE = "clicks arrive while a cell runs"
    AFTER_CELL = "clicks arrive when the cell has ended"


def let_through(widget: Widget) -> Callable[[], None]:
    """Let a panel's messages reach the kernel on the thread that its front end chose.

    Call it once the widgets are made and before they are shown. Children that come later are let through as they come.

    Returns:
        What undoes it. Where there is nothing to do (another ipykernel, no kernel), it does nothing.
    """
    undo = ExitStack()
    seen: set[int] = set()
    _open_tree(widget, seen, undo)
    return undo.close


def _open_tree(root: Widget, seen: set[int], undo: ExitStack) -> None:
    for widget in tree(root):
        if id(widget) in seen:
            continue
        seen.add(id(widget))
        _open_comm(getattr(widget, "comm", None), undo)
        if widget.has_trait("children"):
            opened = partial(_open_children, seen=seen, undo=undo)
            widget.observe(opened, "children")
            undo.callback(widget.unobserve, opened, "children")


def _open_children(change: Mapping[str, Any], seen: set[int], undo: ExitStack) -> None:
    for child in change["new"]:
        _open_tree(child, seen, undo)


def tree(root: Widget) -> Iterator[Widget]:
    """A widget and all it refers to (children, layouts, styles), each once."""
    waiting, known = [root], {id(root)}
    while waiting:
        widget = waiting.pop()
        yield widget
        for one in _widgets_in(getattr(widget, name, None) for name in widget.keys):
            if id(one) not in known:
                known.add(id(one))
                waiting.append(one)


def _widgets_in(values: Iterable[Any]) -> Iterator[Widget]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _widgets_in(value)
        elif isinstance(value, dict):
            yield from _widgets_in(value.values())
        elif hasattr(value, "comm") and hasattr(value, "keys"):
            yield value


def _open_comm(comm: Comm | None, undo: ExitStack) -> None:
    if comm is None or _ROUTE in getattr(comm, "__dict__", {}):
        return
    if hasattr(comm, _ROUTE):
        _put(comm, _ROUTE, _as_sent, undo)
    if hasattr(comm, "handle_msg"):
        _put(comm, "handle_msg", partial(_handle_quietly, comm, type(comm).handle_msg), undo)


def _put(comm: Comm, name: str, value: Any, undo: ExitStack) -> None:
    comm.__dict__[name] = value
    undo.callback(comm.__dict__.pop, name, None)


def _as_sent(_data: Any, subshell_id: str | None) -> str | None:
    """The subshell that the front end has chosen."""
    return subshell_id


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
        self._at_first = world_of(kernel)
        self._worlds: dict[str, World] = {}
        self._on_main: dict[str, int] = {}
        self._last = ""

    @property
    def world(self) -> World:
        """The world of the view that was heard last."""
        return self._worlds.get(self._last, self._at_first)

    def heard(self, view: str = "") -> World:
        """Note a message; to be called in every callback, on the thread it runs on."""
        self._last = view
        if not is_main_thread():
            self._worlds[view] = World.AT_ONCE
        elif self.world is not World.AT_ONCE:
            # a view that has been heard beside the main thread once can send there always
            self._on_main[view] = self._on_main.get(view, 0) + 1
            if self._on_main[view] >= _ENOUGH_ON_MAIN:
                self._worlds[view] = World.AFTER_CELL
        return self.world

    def words(self, *, background: bool = False) -> str:
        """One sentence for the panel."""
        if background and self.world in (World.UNKNOWN, World.AFTER_CELL):
            return "a cell trains in the background: clicks are applied at the next step"
        return _WORDS[self.world]


_WORDS = {
    World.NOBODY: "no front end is connected that could send clicks; %memfit FLAGS does the same",
    World.UNKNOWN: "whether this front end delivers clicks while a cell runs is not known yet",
    World.AT_ONCE: "clicks are applied at the next step, also while a cell runs",
    World.AFTER_CELL: "this front end delivers clicks when the cell ends; run it with %%memfit --background to have them "
    "applied at the next step",
}
