"""Registration by `%load_ext memlab`: `%%memfit` (`cell_magic`) and `%memfit` (`line_magic`).

They parse, call the Python API and display; nothing is decided here. An error that memlab raises on purpose is shown
as one line, and the cell counts as failed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from IPython.core.error import UsageError

from memlab.jupyter import shown_errors
from memlab.jupyter.cell_magic import CellMagic
from memlab.jupyter.completion import complete_lines
from memlab.jupyter.display import teach_receipts
from memlab.jupyter.flags import cell_help, line_help
from memlab.jupyter.freeing import Freeing
from memlab.jupyter.line_magic import LineMagic, Shown
from memlab.jupyter.notebook import Notebook, one_line
from memlab.runtime.loop_mode import pause, resume
from memlab.session import sessions

_NAME = "memfit"

loaded: weakref.WeakKeyDictionary[Any, MagicMemfit] = weakref.WeakKeyDictionary()


def load(shell: Any) -> None:
    """Register the magics in a shell; harmless when done."""
    if shell not in loaded:
        loaded[shell] = MagicMemfit(shell)


def unload(shell: Any) -> None:
    """Undo every session, and remove the magics; harmless when done."""
    magic = loaded.get(shell)
    if magic is not None:
        magic.close()
        del loaded[shell]


class MagicMemfit:
    """Registrations in one shell."""

    def __init__(self, shell: Any) -> None:
        self.notebook = notebook = Notebook(shell)
        self.cell = CellMagic(notebook)
        self.line = LineMagic(notebook)
        self._undo = ExitStack()
        self._register(shell, notebook)

    def close(self) -> None:
        """Undo every session and take everything out of the shell. Raises `SessionError`: a background cell does not end; everything is as it was."""
        self.notebook.background.close()
        for session in sessions():
            session.undo()
        self._undo.close()

    def _register(self, shell: Any, notebook: Notebook) -> None:
        # what IPython keeps holds the magics weakly, so that a shell that is dropped can go
        me, weak = weakref.ref(self), weakref.ref(shell)

        def memfit(line: str) -> Shown | None:
            __tracebackhide__ = True
            with shown_errors.brief_interrupts(weak()), one_line():
                return _alive(me).line.run(line)

        def memfit_cell(line: str, cell: str) -> None:
            __tracebackhide__ = True
            with shown_errors.brief_interrupts(weak()):
                _alive(me).cell.run(line, cell)

        memfit.__doc__, memfit_cell.__doc__ = line_help(), cell_help()
        shell.register_magic_function(memfit, "line", _NAME)
        shell.register_magic_function(memfit_cell, "cell", _NAME)
        for kind in ("line", "cell"):
            self._undo.callback(shell.magics_manager.magics[kind].pop, _NAME, None)
        shell.configurables.append(notebook.config)
        self._undo.callback(shell.configurables.remove, notebook.config)
        shown_errors.brief_refusals(self._undo)
        complete_lines(shell, self._undo)
        teach_receipts(shell, notebook.config, self._undo)
        freeing = Freeing(notebook)
        hooks: tuple[tuple[str, Callable[[Any], None]], ...] = (
            ("pre_run_cell", freeing.cell_begins),
            ("post_run_cell", freeing.cell_ended),
            ("pre_run_cell", lambda _info: resume()),
            ("post_run_cell", lambda _result: pause()),
        )
        for event, callback in hooks:
            shell.events.register(event, callback)
            self._undo.callback(shell.events.unregister, event, callback)


def _alive(reference: weakref.ref[MagicMemfit]) -> MagicMemfit:
    magic = reference()
    if magic is None:
        raise UsageError("memlab is not loaded: %load_ext memlab")
    return magic
