"""The text of a cell as a program for another thread, and what torch keeps per thread."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, TracebackType

import torch
from IPython.core.displayhook import DisplayHook

from memlab.jupyter import cells
from memlab.jupyter.cells import Outcome, Shell, Source
from memlab.jupyter.display import show

_AUTOCAST_DEVICES = ("cpu", "cuda")


class Program:
    """The text of a cell, compiled on the main thread, to be executed on another.

    Args:
        shell: IPython's.
        source: the text; it compiles.

    Attributes:
        number: of the cell, as in `In [number]`.
        was_interrupted: whether it was cancelled, or raised what Ctrl-C raises.
    """

    def __init__(self, shell: Shell, source: Source) -> None:
        outer = getattr(shell.displayhook, "exec_result", None)
        self.number = getattr(outer, "execution_count", None) or shell.execution_count
        with cells._numbered_as_outer_cell(shell):
            self._file = shell.compile.cache(source.python, self.number, raw_code=source.raw)
        self._parts = list(self._compiled(shell, source))
        self.was_interrupted = False
        self._shown: BaseException | None = None

    def run(self, shell: Shell, _source: Source) -> Outcome:
        """Execute it; its error is returned, not shown."""
        coroutine = self._execute(shell)
        try:
            if any(code.co_flags & inspect.CO_COROUTINE for code, _ in self._parts):
                asyncio.run(coroutine)
            else:
                cells._drive(coroutine)
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the outcome
            self.was_interrupted = isinstance(error, KeyboardInterrupt)
            return Outcome(error)
        return Outcome()

    def raise_shown(self, shell: Shell, outcome: Outcome, advice: str = "") -> None:
        """Show the error of a cell, with `advice` below it, and raise it."""
        error = outcome.error
        if error is None:
            return
        if not isinstance(error, KeyboardInterrupt):
            self.show(shell, error, advice)
        raise error

    def show(self, shell: Shell, error: BaseException, advice: str = "") -> None:
        """Show an error as IPython does, from the cell's own lines on; once."""
        if error is self._shown:
            return
        self._shown = error
        own = self._own_lines(error.__traceback__)
        if hasattr(error, "_render_traceback_"):
            lines = error._render_traceback_()
        else:
            lines = shell.InteractiveTB.structured_traceback(type(error), error, own, tb_offset=0)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, own  # for %debug and %tb
        shell._showtraceback(type(error), error, [*lines, "", advice] if advice else lines)

    def forget(self) -> None:
        """Let go of the error that was shown."""
        self._shown = None

    def _own_lines(self, traceback: TracebackType | None) -> TracebackType | None:
        """The part of a traceback that begins in the cell; all of it when none does."""
        part = traceback
        while part is not None and part.tb_frame.f_code.co_filename != self._file:
            part = part.tb_next
        return part or traceback

    async def _execute(self, shell: Shell) -> None:
        for code, is_shown in self._parts:
            value = eval(code, shell.user_global_ns, shell.user_ns)  # noqa: S307 - the user's own cell
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
            if is_shown and value is not None:
                show(value)

    def _compiled(self, shell: Shell, source: Source) -> Iterator[tuple[CodeType, bool]]:
        """Pieces to execute one after another, and whether their value is shown."""
        tree = shell.transform_ast(shell.compile.ast_parse(source.python, filename=self._file))
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0
        shown = _shown_nodes(shell, source, tree.body)
        with shell.compile.extra_flags(flags):
            for node in tree.body:
                if node in shown:
                    yield shell.compile(ast.Expression(node.value), self._file, "eval"), True
                else:
                    yield shell.compile(ast.Module([node], []), self._file, "exec"), False


def _shown_nodes(shell: Shell, source: Source, body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements whose value is shown, as `%config InteractiveShell.ast_node_interactivity` says."""
    which = shell.ast_node_interactivity
    silenced = DisplayHook.semicolon_at_end_of_expression(source.python)  # type: ignore[no-untyped-call] # unannotated
    if which == "none" or silenced:
        return []
    considered = body if which == "all" else body[-1:]
    return [node for node in considered if isinstance(node, ast.Expr)]


class ThreadState:
    """Torch's state per thread, as it is on the thread that makes this object."""

    def __init__(self) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._default_device = torch.get_default_device()
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call] # unannotated in torch
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)
        }

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Have the same on this thread."""
        with ExitStack() as undo:
            undo.enter_context(torch.set_grad_enabled(self._has_grad))
            if self._default_device.type != "cpu":
                # a default device slows every call of torch, so none is set that is there anyway
                undo.enter_context(self._default_device)
            if self._cuda_device is not None:
                undo.enter_context(torch.cuda.device(self._cuda_device))
            for kind, dtype in self._autocast.items():
                undo.enter_context(torch.autocast(kind, dtype))
            yield
