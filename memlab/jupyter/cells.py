"""Running the text of a cell untouched, from inside a cell magic, as if the magic were not there.

1. The text goes through IPython's own transforms and `run_cell_async`, so `!`, `%`, the display of the
   last value, a silencing `;` and top-level `await` work. Line numbers are those of the whole cell,
   its first line with the magic included.
2. Kernels run a cell inside their event loop, where `run_cell` refuses to await. Such a cell gets an
   event loop of its own; the kernel's is set aside for as long.
3. An error is shown once, with the traceback that IPython made of the inner cell: printing it there is
   held back, the error is raised again from the magic, and what the outer cell then shows is replaced.
4. What memlab refuses ends the cell wherever it comes from: `%run` would show it and let the cell go on. How it is shown is a
   matter of `shown_errors`.

Known limitations:
    Objects that belong to the kernel's event loop cannot be awaited in a `%%memfit` cell, and tasks
    started in one are cancelled when it ends.
"""

from __future__ import annotations

import ast
import asyncio
import io
import sys
import tokenize
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from IPython.core.error import UsageError

from memlab.errors import MemlabError, first_line
from memlab.jupyter.display import tell
from memlab.jupyter.shown_errors import (
    Shell,
    having,
    in_one_line,
    leave_memlab_out,
    number_lines,
    refusal_in,
    show_once,
)
from memlab.runtime.observer import Observer


@dataclass
class Outcome:
    """Outcome of a cell."""

    error: BaseException | None = None  # what it raised, or None
    traceback: list[str] | None = None  # the lines IPython shows for it; None when they are on the screen already


@dataclass(frozen=True)
class CellSource:
    """A cell's text as IPython will run it."""

    raw: str  # what the user wrote, without the line of the magic
    python: str  # the same with magics and `!` translated, at the line numbers of the whole cell
    failure: Any = None  # why the translation failed, as from `sys.exc_info()`, or None

    @property
    def is_silenced(self) -> bool:
        """Return whether a semicolon at its end keeps the last value from being shown."""
        try:
            tokens = [*tokenize.generate_tokens(io.StringIO(self.python).readline)]
        except (tokenize.TokenError, SyntaxError):
            return False
        # ends of lines and blocks are tokens of white space
        words = [each.string for each in tokens if each.string.strip() and each.type != tokenize.COMMENT]
        return words[-1:] == [";"]


def read(shell: Shell, cell: str) -> CellSource:
    """Translate a cell's text to Python."""
    try:
        python = shell.transform_cell(cell)
    except Exception:  # noqa: BLE001 - any transformer of the user's may fail in any way; IPython shows it
        return CellSource(cell, cell, sys.exc_info())
    # IPython drops leading blank lines, and the magic's own line is gone: both count for the reader
    blank = next((number for number, line in enumerate(cell.splitlines()) if line.strip()), 0)
    return CellSource(cell, "\n" * (1 + blank) + python)


def syntax_error(shell: Shell, source: CellSource) -> Outcome | None:
    """Return what is wrong with a cell that cannot be run at all; None when nothing is."""
    if source.failure is not None:
        return run(shell, source)
    with numbered_as_outer_cell(shell):
        name = shell.compile.cache(source.python, shell.execution_count, raw_code=source.raw)
    try:
        with warnings.catch_warnings():
            # those are shown when the cell runs
            warnings.simplefilter("ignore")
            flags = shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(source.python, name, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, MemoryError) as error:
        return Outcome(error, shell.SyntaxTB.structured_traceback(type(error), error, []))
    return None


def run(shell: Shell, source: CellSource) -> Outcome:
    """Run a cell's text; its error is returned, not shown."""
    outcome = Outcome()
    hook = shell.displayhook
    outer = hook.exec_result
    with ExitStack() as undo:
        undo.enter_context(_held_back(shell, source, outcome))
        undo.enter_context(numbered_as_outer_cell(shell))
        undo.callback(setattr, hook, "exec_result", outer)
        if source.is_silenced:
            undo.callback(setattr, shell, "ast_node_interactivity", shell.ast_node_interactivity)
            shell.ast_node_interactivity = "none"
        result = _run(shell, source)
    if outer is not None:
        outer.result = result.result
    outcome.error = result.error_before_exec or result.error_in_exec
    return outcome


@contextmanager
def beside(what: str, say: Callable[[str], None] = tell) -> Iterator[None]:
    """Say what of memlab's own work for a cell failed: its error is none of the cell's, and ends nothing.

    What memlab refuses is raised.
    """
    try:
        yield
    except (UsageError, MemlabError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is
        say(f"{what} failed in memlab itself ({first_line(error)}); the cell is not affected")


class CellErrors(Observer):
    """Refusals in a cell, in any of its models, and failures of memlab itself there."""

    def __init__(self, *, needs_plan: bool) -> None:
        self.needs_plan = needs_plan  # whether the cell asked for a plan, and must not train without it
        # what memlab has refused in the middle of the cell, last; None for nothing
        self.refusal: MemlabError | None = None
        self.failure = ""  # what of memlab's own failed, in words; empty for nothing

    def refused(self, refusal: MemlabError) -> None:
        refusal.in_loop = True
        self.refusal = refusal

    def refusal_handled(self) -> None:
        self.refusal = None

    def interrupted(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, MemlabError):
            self.refused(error)

    def beside(self, what: str, *, is_needed: bool = False) -> AbstractContextManager[None]:
        """Note where memlab itself fails, and let the cell go on without it; raise what fails where the cell needs it."""
        return nullcontext() if is_needed else beside(what, partial(setattr, self, "failure"))


def raise_shown(shell: Shell, outcome: Outcome, advice: str = "") -> None:
    """Raise the error of a cell again; the outer cell shows the inner cell's traceback, and `advice` below it."""
    error = outcome.error
    if error is None:
        return
    lines = outcome.traceback
    if advice:
        lines = [*(lines or []), "", advice]
    show_once(shell, error, lines)
    raise error


def _run(shell: Shell, source: CellSource) -> Any:
    coroutine = shell.run_cell_async(
        source.raw, store_history=False, transformed_cell=source.python, preprocessing_exc_tuple=source.failure
    )
    result = None
    try:
        result = _runner(shell, source)(coroutine)
    finally:
        shell.events.trigger("post_execute")
        if result is not None:
            shell.events.trigger("post_run_cell", result)
    return result


def _runner(shell: Shell, source: CellSource) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    awaits = shell.should_run_async(source.raw, transformed_cell=source.python, preprocessing_exc_tuple=source.failure)
    if not awaits:
        return drive
    if asyncio._get_running_loop() is None:
        return shell.trio_runner or shell.loop_runner  # type: ignore[no-any-return] # an attribute of the shell
    return _run_on_own_loop


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a cell without await must not wait")


def _run_on_own_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on an event loop of its own, inside the one that runs this code."""
    loop = asyncio.get_running_loop()
    # from Python 3.12 on the current task is kept beside the loop
    swap = getattr(asyncio.tasks, "_swap_current_task", None)
    task = swap(loop, None) if swap is not None else None
    asyncio._set_running_loop(None)
    try:
        # with a factory the runner leaves the thread's current event loop alone
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)
    finally:
        asyncio._set_running_loop(loop)
        if swap is not None:
            swap(loop, task)


@contextmanager
def numbered_as_outer_cell(shell: Shell) -> Iterator[None]:
    """Let tracebacks say `Cell In[n]` with the number of the cell that holds the magic."""
    outer = shell.displayhook.exec_result
    number = getattr(outer, "execution_count", None)
    if number is None:
        yield
        return
    original = shell.compile.cache

    def cache(code: str, _number: int = 0, raw_code: str | None = None) -> Any:
        # code that the cell itself runs through the shell keeps its own number
        undo.close()
        return original(code, number, raw_code=raw_code)

    with ExitStack() as undo:
        undo.enter_context(having(shell.compile, cache=cache))
        yield


@contextmanager
def _held_back(shell: Shell, source: CellSource, outcome: Outcome) -> Iterator[None]:
    """Keep the lines of the traceback that ends the inner cell; others are shown as always."""
    show, format_and_show = shell._showtraceback, shell.showtraceback

    def numbered(*args: Any, **kwargs: Any) -> None:
        number_lines(sys.exc_info()[1])
        format_and_show(*args, **kwargs)

    def held_back(kind: Any, error: BaseException, lines: list[str]) -> None:
        if any(error is one for one in _errors_of(shell.displayhook.exec_result, source)):
            if isinstance(error, MemlabError):
                lines = in_one_line(error)
            elif leave_memlab_out(error):
                lines = shell.InteractiveTB.structured_traceback(kind, error, error.__traceback__)
            outcome.traceback = lines
        elif refusal_in(error) is not None:
            raise error
        else:
            show(kind, error, lines)

    # whoever handles errors of cells has this one when the outer cell ends
    with having(shell, _showtraceback=held_back, showtraceback=numbered, custom_exceptions=()):
        yield


def _errors_of(result: Any, source: CellSource) -> list[BaseException | None]:
    failures = [source.failure[1]] if source.failure is not None else []
    if result is not None:
        failures += [result.error_before_exec, result.error_in_exec]
    return failures
