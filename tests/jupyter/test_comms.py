"""Widgets whose messages are let through, and what is heard of a front end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

ipywidgets = pytest.importorskip("ipywidgets", reason="needs ipywidgets")

from memlab.jupyter.comms import Hearing, World, let_through, world_of  # noqa: E402

SUBSHELLS = SimpleNamespace(_supports_kernel_subshells=True)


class FakeComm:
    """A comm as ipykernel 7.4 makes it: it redirects messages, and triggers hooks."""

    def __init__(self) -> None:
        self.hooks = 0
        self.comm_id = f"comm-{id(self)}"
        self._msg_callback: Callable[[Any], None] | None = None

    def on_msg(self, callback: Callable[[Any], None]) -> None:
        self._msg_callback = callback

    def _reply_subshell_for(self, data: Any, default: str | None) -> str | None:
        return None

    def handle_msg(self, message: Any) -> None:
        self.hooks += 1
        if self._msg_callback is not None:
            self._msg_callback(message)

    def send(self, *args: Any, **kwargs: Any) -> None:
        """Nobody listens."""

    def close(self, *args: Any, **kwargs: Any) -> None:
        """Nobody listens."""


@pytest.fixture
def with_comms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Widgets get comms of ipykernel 7.4's kind, and are closed afterwards."""
    import comm

    monkeypatch.setattr(comm, "create_comm", lambda **_options: FakeComm())
    yield
    ipywidgets.Widget.close_all()


def route(widget: Any) -> str | None:
    return widget.comm._reply_subshell_for({"method": "update"}, "the front end's")  # type: ignore[no-any-return]


def beside(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.usefixtures("with_comms")
class TestLettingThrough:
    def test_a_message_goes_where_the_front_end_sends_it(self) -> None:
        box = ipywidgets.Checkbox()
        assert route(box) is None
        let_through(box)
        assert route(box) == "the front end's"

    def test_other_widgets_stay_as_they_are(self) -> None:
        other = ipywidgets.Checkbox()
        let_through(ipywidgets.Checkbox())
        assert route(other) is None

    def test_undone_everything_is_as_it_was(self) -> None:
        box = ipywidgets.Checkbox()
        before = dict(box.comm.__dict__)
        undo = let_through(box)
        undo()
        undo()
        assert box.comm.__dict__ == before

    def test_twice_is_undone_by_whoever_was_first(self) -> None:
        box = ipywidgets.Checkbox()
        first, second = let_through(box), let_through(box)
        second()
        assert route(box) == "the front end's"
        first()
        assert route(box) is None

    def test_hooks_run_for_messages_of_the_main_thread_only(self) -> None:
        box = ipywidgets.Checkbox()
        got: list[Any] = []
        let_through(box)
        box.comm.on_msg(got.append)
        box.comm.handle_msg("from the main shell")
        beside(lambda: box.comm.handle_msg("from a subshell"))
        assert got == ["from the main shell", "from a subshell"]
        assert box.comm.hooks == 1

    def test_a_closed_widget_is_passed_over(self) -> None:
        box = ipywidgets.Checkbox()
        box.close()
        let_through(box)()


def test_comms_of_another_ipykernel_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import comm

    class Plain:
        comm_id = "plain"

        def on_msg(self, callback: Any) -> None:
            """Nothing ever comes."""

        def close(self) -> None:
            """Nothing to close."""

    monkeypatch.setattr(comm, "create_comm", lambda **_options: Plain())
    box = ipywidgets.Checkbox()
    undo = let_through(box)
    assert box.comm.__dict__ == {}
    undo()
    box.close()


def test_without_a_kernel_there_is_nothing_to_do() -> None:
    box = ipywidgets.Checkbox()
    let_through(box)()
    box.value = True
    ipywidgets.Widget.close_all()


@pytest.mark.parametrize(
    ("kernel", "world"),
    [
        (None, World.NOBODY),
        (SimpleNamespace(), World.AFTER_CELL),
        (SimpleNamespace(_supports_kernel_subshells=False), World.AFTER_CELL),
        (SUBSHELLS, World.UNKNOWN),
    ],
)
def test_what_a_kernel_says_of_itself(kernel: Any, world: World) -> None:
    assert world_of(kernel) is world
    assert Hearing(kernel).world is world


class TestHearing:
    def test_a_message_beside_the_main_thread_proves_it(self) -> None:
        hearing = Hearing(SUBSHELLS)
        beside(hearing.heard)
        assert hearing.world is World.AT_ONCE
        assert hearing.world.value == "clicks are applied at the next step, also while a cell runs"

    def test_one_message_on_the_main_thread_proves_nothing(self) -> None:
        hearing = Hearing(SUBSHELLS)
        hearing.heard()
        assert hearing.world is World.UNKNOWN
        assert "not known yet" in hearing.world.value
        hearing.heard()
        assert hearing.world is World.AFTER_CELL
        assert "%%memfit --background" in hearing.world.value

    def test_a_late_message_to_the_main_shell_takes_nothing_back(self) -> None:
        hearing = Hearing(SUBSHELLS)
        beside(hearing.heard)
        for _ in range(3):
            hearing.heard()
        assert hearing.world is World.AT_ONCE
