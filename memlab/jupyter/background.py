"""`%%memfit --background`: a cell that trains on a thread of its own, so that the main shell stays free.

Rules:

1. There is one such thread at a time. The cell that starts it is over at once; what it prints, shows and raises goes on
   to appear in its output, and its variables in the notebook.
2. The text is translated and compiled on the main thread, before anything runs: IPython's compiler, transformers and hooks
   are no thread's but the main one's. The other thread only executes: no cell is begun for it, so hooks such as
   `pre_run_cell` do not run, `Out` and `_` are left alone, and the last value is shown by `display`.
3. What torch keeps per thread (grad mode, autocast, default device, current CUDA device) is as it was on the main thread
   when the cell was started. What the cell changes of it ends with the cell.
4. The session of the trained model belongs to that thread while it trains, and to the main thread again afterwards. So a
   switch asked for by the main thread waits for the next step boundary.
5. What would change the model from the main thread in the middle of a step is refused meanwhile, in one line.
6. `%memfit cancel` ends training before its next step; `%memfit wait` waits, and fails when the cell has failed. The thread is
   a daemon: it keeps no kernel from shutting down.

Known limitations:
    Ctrl-C does not reach the thread. A cell that makes no training step any more cannot be cancelled.
    Cells without the magic that use the same model, or random numbers, meanwhile meet it in the middle of a step.
    Figures of pyplot are shown by `plt.show()` only. Threads that the cell makes itself print into the newest cell.
    With ipykernel before 7, receipts and other displays appear in the output of the newest cell; what is printed does not.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from IPython.core.error import UsageError
from torch import nn

from memlab.errors import SessionError
from memlab.jupyter import cells, shown_errors
from memlab.jupyter.cells import CellSource, Outcome
from memlab.jupyter.display import show, tell
from memlab.jupyter.shown_errors import Shell
from memlab.jupyter.watch import CellWatch
from memlab.live.control import Control
from memlab.live.stage import Cancelled
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload
from memlab.session import session_of

_LOOK_SECONDS = 0.2
_LAST_SECONDS = 1.0
_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class CellPlace:
    """Place where a cell's text runs: in the foreground by default."""

    run: Callable[[Shell, CellSource], Outcome] = cells.run
    raise_shown: Callable[[Shell, Outcome, str], None] = cells.raise_shown
    watch: Callable[..., CellWatch] = CellWatch


class Background:
    """The cell that runs beside the others, if any. One per notebook."""

    def __init__(self) -> None:
        self._job: Job | None = None

    @property
    def running(self) -> bool:
        return self._job is not None and self._job.is_running

    def start(
        self,
        shell: Shell,
        source: CellSource,
        work: Callable[[CellPlace], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        if self._job is not None and self._job.is_running:
            raise SessionError(f"%%memfit --background: {self._job.name} runs in the background already; {WAYS_OUT}")
        self._job = Job(shell, Program(shell, source), work, failed)
        self._job.start()

    def trains(self, model: nn.Module) -> bool:
        """Return whether a model is trained in the background, by another thread than this one."""
        job = self._other()
        return job is not None and any(each is model for each in job.models)

    def require_rest(self, what: str) -> None:
        """Refuse what must not be done while a cell runs in the background, unless that cell does it itself."""
        job = self._other()
        if job is not None:
            raise SessionError(f"{what}: {job.name} runs in the background; {WAYS_OUT}")

    def require_other(self, model: nn.Module | None) -> None:
        """Refuse a foreground cell on the model that is trained in the background."""
        job = self._other()
        if job is None:
            return
        if model is None or not job.models:
            raise SessionError(f"%%memfit: {job.name} runs in the background, maybe with the same model; {WAYS_OUT}")
        if any(each is model for each in job.models):
            raise SessionError(f"%%memfit: {job.name} trains {type(model).__name__} in the background; {WAYS_OUT}")

    def wait(self) -> str:
        """Wait until the cell has ended, and fail if it has; Ctrl-C ends the waiting, and not the cell."""
        job = self._job
        if job is None:
            return "no cell runs in the background"
        if job.is_here:
            raise SessionError(f"%memfit wait: {job.name} cannot wait for its own end")
        # short, so that Ctrl-C is noticed everywhere
        while not job.ended(_LOOK_SECONDS):
            pass
        self._job = None
        if job.failure:
            raise SessionError(f"{job.name} in the background failed: {job.failure}")
        return f"{job.name} in the background {'was cancelled' if job.was_cancelled else 'has ended'}"

    def cancel(self) -> str:
        """Ask the cell to end before its next step."""
        job = self._job
        if job is None or not job.is_running:
            return "no cell runs in the background"
        job.cancel()
        return f"{job.name} in the background ends before its next step"

    def close(self, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """Cancel the cell and wait for its end; fail where it makes no more training steps, so that it cannot be cancelled."""
        job = self._other()
        if job is None:
            return
        job.cancel()
        if not job.ended(patience_seconds):
            raise SessionError(
                f"{job.name} in the background has come to no training step within {patience_seconds:.0f} s, so it could "
                "not be cancelled; try again when it has, or restart the kernel"
            )
        self._job = None

    def _other(self) -> Job | None:
        """The running cell, seen from another thread."""
        job = self._job
        return job if job is not None and job.is_running and not job.is_here else None


WAYS_OUT = "%memfit wait waits for it, %memfit cancel ends it"


class Job(Observer):
    """One cell on its thread; told of the steps it makes, so that it can end between two."""

    def __init__(
        self, shell: Shell, program: Program, work: Callable[[CellPlace], None], failed: Callable[[BaseException], None]
    ) -> None:
        self.name = f"In [{program.number}]"
        self.failure = ""  # what it ended with, in one line; empty when nothing went wrong
        self.was_cancelled = False  # whether it was
        self._shell = shell
        self._program = program
        self._work = work
        self._failed = failed
        self._models: list[weakref.ref[nn.Module]] = []
        self.control: Control | None = None  # what steers the model that it trains, while it does
        self._is_cancelled = threading.Event()
        self._has_ended = threading.Event()
        # context variables say to which cell output belongs
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run, ThreadState()), name="memlab-background", daemon=True
        )

    @property
    def is_running(self) -> bool:
        return not self._has_ended.is_set()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def models(self) -> list[nn.Module]:
        """The models it trains, as far as they are known."""
        return [model for each in self._models if (model := each()) is not None]

    def start(self) -> None:
        atexit.register(self._end_with_process)
        self._thread.start()

    def cancel(self) -> None:
        """Have it end before its next step, also where a panel has paused it."""
        self._is_cancelled.set()
        control = self.control
        if control is not None:
            control.cancel()

    def ended(self, within_seconds: float) -> bool:
        return self._has_ended.wait(within_seconds)

    def trains(self, model: nn.Module, control: Control | None) -> None:
        """Note which model it trains, and who steers that from now on."""
        self._models.append(weakref.ref(model))
        self.control = control

    def step_boundary(self) -> None:
        """End training when it was cancelled."""
        if self._is_cancelled.is_set():
            self._is_cancelled.clear()
            raise Cancelled("cancelled by %memfit cancel")

    def _run(self, state: ThreadState) -> None:
        try:
            with state.in_force():
                self._work(CellPlace(self._program.run, self._program.raise_shown, partial(BackgroundWatch, self)))
        except (KeyboardInterrupt, UsageError) as error:
            self._note_end(error)
        except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._program.show(self._shell, error)
            self._failed(error)
        finally:
            self._end()

    def _note_end(self, error: BaseException) -> None:
        """Tell in one line what needs no traceback."""
        self.was_cancelled = self._program.was_interrupted
        if self.was_cancelled:
            tell(str(error))
        else:
            self.failure = str(error)
            print(f"UsageError: {error}", file=sys.stderr)  # noqa: T201 - as IPython shows it

    def _end(self) -> None:
        # what the notebook has no name for must not stay in memory
        del self._work, self._failed
        self._program.shown = None
        sys.stdout.flush()
        sys.stderr.flush()
        atexit.unregister(self._end_with_process)
        self._has_ended.set()

    def _end_with_process(self) -> None:
        self.cancel()
        self.ended(_LAST_SECONDS)


class BackgroundWatch(CellWatch):
    """A `CellWatch` on the thread of a background cell."""

    def __init__(self, job: Job, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._job = job
        self.search.thread = threading.get_ident()  # steps of other threads are those of other cells

    def attach(self, workload: Workload, *, alone: bool = False) -> None:
        """Take the session over to this thread, apply the plan, and begin to observe."""
        # last of all: until then, what waits for a step boundary may still be applied on this thread
        self._undo.callback(_hand_over, workload.model, threading.main_thread())
        _hand_over(workload.model, threading.current_thread())
        super().attach(workload, alone=alone)
        session = session_of(workload.model)
        if session is not None:
            self._job.trains(workload.model, next(iter(self.controls), None))
            self._undo.callback(setattr, self._job, "control", None)
            # before anybody has begun a step
            session.observers.add(self._job, first=True)
            self._undo.callback(session.observers.remove, self._job)


def _hand_over(model: nn.Module, thread: threading.Thread) -> None:
    """Have the session of a model, if it has one, belong to a thread."""
    session = session_of(model)
    if session is not None and thread.ident is not None:
        session.hand_over(thread.ident)


_AUTOCAST_DEVICES = ("cpu", "cuda")


class Program:
    """The text of a cell, compiled on the main thread, to be executed on another."""

    def __init__(self, shell: Shell, source: CellSource) -> None:
        outer = getattr(shell.displayhook, "exec_result", None)
        # of the cell, as in `In [number]`
        self.number = getattr(outer, "execution_count", None) or shell.execution_count
        with cells.numbered_as_outer_cell(shell):
            self._file = shell.compile.cache(source.python, self.number, raw_code=source.raw)
        self._parts = list(self._compiled(shell, source))
        self.was_interrupted = False  # whether it was cancelled, or raised what Ctrl-C raises
        self.shown: BaseException | None = None  # the error that was

    def run(self, shell: Shell, _source: CellSource) -> Outcome:
        """Execute it; its error is returned, not shown."""
        coroutine = self._execute(shell)
        try:
            if any(code.co_flags & inspect.CO_COROUTINE for code, _ in self._parts):
                asyncio.run(coroutine)
            else:
                cells.drive(coroutine)
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
        if error is self.shown:
            return
        self.shown = error
        entries = shown_errors.entries(error.__traceback__)
        own = next((each for each in entries if each.tb_frame.f_code.co_filename == self._file), error.__traceback__)
        if hasattr(error, "_render_traceback_"):
            lines = error._render_traceback_()
        else:
            lines = shell.InteractiveTB.structured_traceback(type(error), error, own, tb_offset=0)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, own  # for %debug and %tb
        shell._showtraceback(type(error), error, [*lines, "", advice] if advice else lines)

    async def _execute(self, shell: Shell) -> None:
        for code, is_shown in self._parts:
            value = eval(code, shell.user_global_ns, shell.user_ns)  # noqa: S307 - the user's own cell
            if code.co_flags & inspect.CO_COROUTINE:
                value = await value
            if is_shown and value is not None:
                show(value)

    def _compiled(self, shell: Shell, source: CellSource) -> Iterator[tuple[CodeType, bool]]:
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


def _shown_nodes(shell: Shell, source: CellSource, body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements whose value is shown, as `%config InteractiveShell.ast_node_interactivity` says."""
    which = shell.ast_node_interactivity
    if which == "none" or source.is_silenced:
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
