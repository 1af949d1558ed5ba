"""The kernel's main thread: what must not meet a running cell is done there, once no cell runs.

Rules:

1. Work goes through the kernel's own event loop, behind whatever the main shell is doing and in turn with the cells that
   wait. It is never done at once, not even on the main thread: a widget's callback may run there in the middle of a cell
   that awaits, and a callback should be over in no time.
2. What the work prints, shows or raises goes into the output of the cell that made the `MainThread`, whichever cell has
   run since. Where ipykernel is older than 7, what it *displays* goes to the newest cell; what it prints does not.
3. No cell is begun for it: IPython's hooks (`pre_run_cell`, `post_execute` and so on) do not run, and there is no history.
4. Ctrl-C, the front end's interrupt button, is ignored by a kernel that runs no cell. While work is done it raises
   `KeyboardInterrupt` there, as it does in a cell.
5. Steps are made one per turn of the event loop, so that messages of widgets and cells come in between. They end before
   a cell runs, so that the cell finds everything as it left it.

A terminal has no event loop: there, work is done at once by the thread that asks, when that is the main thread, since what
runs on the main thread is then whoever asks. Steps have nobody to advance them and are refused.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from memlab.errors import SessionError
from memlab.jupyter.comms import Kernel, is_main_thread
from memlab.live.stage import BESIDE_CELLS, Stage

if TYPE_CHECKING:
    from memlab.jupyter.shown_errors import Shell

Work = Callable[[], None]


class MainThread(Stage):
    """Runs work on the main thread of a shell, when no cell runs there."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._kernel: Kernel | None = getattr(shell, "kernel", None)
        # what says to which cell output belongs is kept in context variables
        self._context = copy_context()
        self._is_working = False
        self._tasks: set[asyncio.Task[None]] = set()

    def when_idle(self, work: Work) -> None:
        """Do something on the main thread as soon as no cell runs there; returns at once.

        An error is shown in the output of the cell that made this object.
        """
        if self._kernel is not None:
            # the context of whoever asks is not the one of the cell that shows the output
            self._loop.add_callback(self._enqueue, self._kernel, work)
        elif is_main_thread():
            work()
        else:
            raise SessionError(
                "this has to be done on the main thread, and a terminal has no event loop to do it: call it from there"
            )

    def play(
        self, steps: Iterator[Any], ended: Callable[[BaseException | None], None], after_seconds: float = 0.0
    ) -> PlayedSteps:
        if self._kernel is None:
            raise SessionError(BESIDE_CELLS)
        played = PlayedSteps(steps, ended, self, self._shell.events)
        if after_seconds:
            self._loop.add_callback(self._loop.call_later, after_seconds, played.take_turn)
        else:
            played.take_turn()
        return played

    @property
    def can_play(self) -> bool:
        return self._kernel is not None

    @property
    def is_working(self) -> bool:
        """Return whether the calling thread is doing such work."""
        return self._is_working and is_main_thread()

    def at_home(self, work: Work) -> None:
        """Do something at once, on the main thread, with the output of the cell that made this object."""
        if self._is_working:
            work()
            return
        self._is_working = True
        try:
            with _interruptible():
                self._context.run(work)
        except KeyboardInterrupt:
            # between the work, which has to deal with it, and the loop, which would end the kernel
            pass
        finally:
            self._is_working = False

    @property
    def _loop(self) -> Any:
        loop = getattr(self._kernel, "io_loop", None)
        if loop is None:
            raise SessionError("this kernel has no event loop of its own: nothing can be done between its cells")
        return loop

    def _enqueue(self, kernel: Kernel, work: Work) -> None:
        """Stand in line behind the main shell's messages."""
        lock = getattr(kernel, "_main_asyncio_lock", None)
        if lock is not None:  # ipykernel 7
            task = asyncio.ensure_future(self._behind(lock, work))
            self._tasks.add(task)  # an event loop holds its tasks weakly
            task.add_done_callback(self._tasks.discard)
        elif hasattr(kernel, "schedule_dispatch"):  # ipykernel 6
            kernel.schedule_dispatch(self._behind, nullcontext(), work)
        else:
            self.at_home(lambda: self._shown(work))

    async def _behind(self, lock: AbstractAsyncContextManager[None], work: Work) -> None:
        async with lock:
            self.at_home(lambda: self._shown(work))

    def _shown(self, work: Work) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the event loop would log it where nobody looks
            self._shell.showtraceback()


class PlayedSteps:
    """An iterator that the main thread advances; made by `MainThread.play`.

    Every method may be called from any thread and returns at once.
    """

    def __init__(
        self, steps: Iterator[Any], ended: Callable[[BaseException | None], None], stage: MainThread, events: Any
    ) -> None:
        self._steps: Iterator[Any] | None = steps
        self._ended = ended
        self._stage = stage
        self._events = events
        self._lock = threading.Lock()
        self._is_paused = False
        self._is_cancelled = False
        self._is_waiting = False  # for its turn
        self._is_advancing = False
        events.register("pre_run_cell", self._cell_begins)

    @property
    def over(self) -> bool:
        return self._steps is None

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.take_turn()

    def cancel(self) -> None:
        """Close the iterator after the step under way; other work of the main thread closes it at once, and finds nothing changed."""
        self._is_cancelled = True
        steps = self._steps
        if steps is not None and self._stage.is_working and not self._is_advancing:
            self._close(steps)
        else:
            self.take_turn()

    def take_turn(self) -> None:
        """Stand in line for the next step."""
        with self._lock:
            if self._is_waiting or self._steps is None:
                return
            self._is_waiting = True
        self._stage.when_idle(self._turn)

    def _turn(self) -> None:
        with self._lock:
            self._is_waiting = False
        steps = self._steps
        if steps is None:
            return
        if self._is_cancelled:
            self._close(steps)
        elif not self._is_paused:
            self._advance(steps)

    def _advance(self, steps: Iterator[Any]) -> None:
        self._is_advancing = True
        try:
            next(steps)
        except (StopIteration, KeyboardInterrupt):
            self._close(steps)
        except BaseException as error:  # noqa: BLE001 - whatever a step raises is told to whoever plays it
            self._end(error)
        else:
            self.take_turn()
        finally:
            self._is_advancing = False

    def _cell_begins(self, *_info: Any) -> None:
        """End before a cell runs, unless a step runs that cell itself or it runs on another thread."""
        steps = self._steps
        if steps is not None and is_main_thread() and not self._is_advancing:
            self._stage.at_home(lambda: self._close(steps))

    def _close(self, steps: Iterator[Any]) -> None:
        error: BaseException | None = None
        try:
            close = getattr(steps, "close", None)
            if close is not None:
                close()
        except KeyboardInterrupt:
            pass
        except BaseException as failure:  # noqa: BLE001 - what was to be put back may not be: that is told
            error = failure
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._steps = None
        with suppress(ValueError):
            self._events.unregister("pre_run_cell", self._cell_begins)
        self._ended(error)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise, on a thread of a kernel that ignores it between cells."""
    if not is_main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
