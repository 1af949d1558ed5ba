"""Work for the main thread, and steps between cells, on an event loop that the test turns by hand."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("IPython", reason="needs IPython")

from IPython.core.events import EventManager, available_events

from memlab.errors import SessionError
from memlab.jupyter.main_thread import MainThread, PlayedSteps
from tests.helpers.ctrl_c import interrupt

cell = ContextVar("cell", default="")


class Loop:
    """An event loop that makes a turn when it is told to."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []  # what waits for a time

    def add_callback(self, callback: Callable[..., None], *args: Any) -> None:
        self._waiting.append(lambda: callback(*args))

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.later.append((seconds, callback))

    def turn(self) -> int:
        """Do what waits; returns how much that was."""
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()
        return len(waiting)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def shell(loop: Loop) -> Any:
    """A shell whose kernel has that event loop."""
    made = SimpleNamespace(kernel=SimpleNamespace(io_loop=loop), shown=[])
    made.events = EventManager(made, available_events)
    made.showtraceback = lambda: made.shown.append("traceback")
    return made


@pytest.fixture
def stage(shell: Any) -> MainThread:
    token = cell.set("the panel's")
    made = MainThread(shell)
    cell.reset(token)
    return made


class Played:
    """Steps that note what happens to them."""

    def __init__(self, stage: MainThread, after_seconds: float = 0.0) -> None:
        self.notes: list[str] = []
        self.ends: list[BaseException | None] = []
        self.when_closed: Callable[[], None] | None = None
        self.in_step: Callable[[], None] | None = None
        self.steps: PlayedSteps = stage.play(self._steps(), self.ends.append, after_seconds)

    def _steps(self) -> Iterator[None]:
        try:
            while True:
                self.notes.append(f"step of {cell.get()}")
                if self.in_step is not None:
                    self.in_step()
                yield
        finally:
            self.notes.append(f"put back in {cell.get()}")
            if self.when_closed is not None:
                self.when_closed()


@pytest.fixture
def played(stage: MainThread) -> Played:
    return Played(stage)


def beside(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class TestWork:
    def test_is_never_done_at_once_in_a_kernel(self, stage: MainThread, loop: Loop) -> None:
        done: list[str] = []
        stage.when_idle(lambda: done.append(cell.get()))
        assert done == []
        loop.turn()
        assert done == ["the panel's"]

    def test_is_done_on_the_main_thread_whoever_asks(self, stage: MainThread, loop: Loop) -> None:
        threads: list[threading.Thread] = []
        beside(lambda: stage.when_idle(lambda: threads.append(threading.current_thread())))
        loop.turn()
        assert threads == [threading.main_thread()]

    def test_an_error_is_shown_and_the_next_one_is_done(self, stage: MainThread, shell: Any, loop: Loop) -> None:
        done: list[int] = []
        stage.when_idle(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        stage.when_idle(lambda: done.append(1))
        loop.turn()
        assert (shell.shown, done) == (["traceback"], [1])

    def test_ctrl_c_reaches_it_where_the_kernel_ignores_it(self, stage: MainThread, shell: Any, loop: Loop) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            stage.when_idle(interrupt)
            loop.turn()
            assert shell.shown == ["traceback"]
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    def test_a_terminal_does_it_at_once_on_its_main_thread_only(self) -> None:
        terminal = MainThread(SimpleNamespace())
        done: list[int] = []
        terminal.when_idle(lambda: done.append(1))
        assert done == [1]
        refused: list[str] = []

        def ask() -> None:
            try:
                terminal.when_idle(lambda: done.append(2))
            except SessionError as error:
                refused.append(str(error))

        beside(ask)
        assert done == [1]
        assert refused[0].startswith("this has to be done on the main thread, and a terminal has no event loop")

    def test_a_kernel_without_a_loop_is_told(self) -> None:
        with pytest.raises(SessionError, match="no event loop of its own"):
            MainThread(SimpleNamespace(kernel=SimpleNamespace())).when_idle(lambda: None)


class TestSteps:
    def test_one_is_made_per_turn(self, played: Played, loop: Loop) -> None:
        for _ in range(3):
            assert loop.turn() == 1
        assert played.notes == ["step of the panel's"] * 3
        played.steps.cancel()
        loop.turn()

    def test_paused_nothing_is_done_until_resumed(self, played: Played, loop: Loop) -> None:
        loop.turn()
        played.steps.pause()
        assert [loop.turn(), loop.turn()] == [1, 0]
        assert len(played.notes) == 1
        beside(played.steps.resume)
        played.steps.resume()
        assert [loop.turn(), loop.turn()] == [1, 1]
        assert len(played.notes) == 3
        played.steps.cancel()
        loop.turn()

    def test_what_is_to_wait_is_begun_later(self, stage: MainThread, loop: Loop) -> None:
        played = Played(stage, after_seconds=0.5)
        loop.turn()
        assert loop.turn() == 0
        ((seconds, begin),) = loop.later
        assert (seconds, played.notes) == (0.5, [])
        begin()
        loop.turn()
        assert played.notes == ["step of the panel's"]
        played.steps.cancel()
        loop.turn()

    def test_a_cell_that_comes_first_leaves_it_unbegun(self, stage: MainThread, shell: Any, loop: Loop) -> None:
        played = Played(stage, after_seconds=0.5)
        loop.turn()
        shell.events.trigger("pre_run_cell", None)
        ((_, begin),) = loop.later
        begin()
        loop.turn()
        assert (played.notes, played.ends, played.steps.over) == ([], [None], True)

    def test_cancelled_from_a_thread_it_is_closed_on_the_main_thread(self, played: Played, loop: Loop) -> None:
        threads: list[threading.Thread] = []
        played.when_closed = lambda: threads.append(threading.current_thread())
        loop.turn()
        beside(played.steps.cancel)
        assert not played.steps.over
        loop.turn()
        assert played.notes == ["step of the panel's", "put back in the panel's"]
        assert (played.ends, threads, played.steps.over) == ([None], [threading.main_thread()], True)
        assert loop.turn() == 0

    def test_cancelled_while_paused_it_ends(self, played: Played, loop: Loop) -> None:
        loop.turn()
        played.steps.pause()
        loop.turn()
        played.steps.cancel()
        loop.turn()
        assert played.ends == [None]

    def test_cancelled_within_a_step_it_ends_after_it(self, played: Played, loop: Loop) -> None:
        played.in_step = played.steps.cancel
        loop.turn()
        assert played.ends == []
        loop.turn()
        assert (played.ends, len(played.notes)) == ([None], 2)

    def test_other_work_that_cancels_finds_everything_put_back(
        self, played: Played, stage: MainThread, loop: Loop
    ) -> None:
        loop.turn()
        stage.when_idle(played.steps.cancel)
        stage.when_idle(lambda: played.notes.append("undo"))
        loop.turn()
        assert played.notes[-2:] == ["put back in the panel's", "undo"]
        assert played.ends == [None]

    def test_it_ends_before_a_cell_runs(self, played: Played, shell: Any, loop: Loop) -> None:
        loop.turn()
        token = cell.set("the next cell's")
        shell.events.trigger("pre_run_cell", None)
        cell.reset(token)
        assert played.notes[-1] == "put back in the panel's"
        assert played.ends == [None]
        loop.turn()
        assert len(played.notes) == 2
        assert shell.events.callbacks["pre_run_cell"] == []

    def test_a_cell_on_another_thread_does_not_end_it(self, played: Played, shell: Any, loop: Loop) -> None:
        loop.turn()
        beside(lambda: shell.events.trigger("pre_run_cell", None))
        loop.turn()
        assert (len(played.notes), played.ends) == (2, [])
        played.steps.cancel()
        loop.turn()

    def test_a_cell_run_by_a_step_does_not_end_it(self, played: Played, shell: Any, loop: Loop) -> None:
        played.in_step = lambda: shell.events.trigger("pre_run_cell", None)
        loop.turn()
        assert played.ends == []
        played.in_step = None
        played.steps.cancel()
        loop.turn()

    def test_an_error_goes_to_whoever_plays_it(self, played: Played, shell: Any, loop: Loop) -> None:
        def fail() -> None:
            raise KeyError("gone")

        played.in_step = fail
        loop.turn()
        assert [repr(error) for error in played.ends] == ["KeyError('gone')"]
        assert shell.shown == []

    def test_an_error_of_putting_back_is_told_and_not_raised_into_the_cell(
        self, played: Played, shell: Any, loop: Loop, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail() -> None:
            raise KeyError("stuck")

        loop.turn()
        played.when_closed = fail
        shell.events.trigger("pre_run_cell", None)
        assert [repr(error) for error in played.ends] == ["KeyError('stuck')"]
        assert capsys.readouterr() == ("", "")

    def test_ctrl_c_in_a_step_ends_it_without_an_error(self, played: Played, loop: Loop) -> None:
        played.in_step = interrupt
        loop.turn()
        assert (played.ends, played.notes[-1]) == ([None], "put back in the panel's")

    def test_it_ends_when_there_are_no_more(self, stage: MainThread, loop: Loop) -> None:
        ends: list[BaseException | None] = []
        stage.play(iter("ab"), ends.append)
        assert [loop.turn() for _ in range(4)] == [1, 1, 1, 0]
        assert ends == [None]

    def test_a_terminal_refuses_them(self) -> None:
        with pytest.raises(SessionError, match="need a notebook's event loop"):
            MainThread(SimpleNamespace()).play(iter("a"), lambda error: None)
