"""Ctrl-C is held back and delivered: to whom, when, and where there is nothing to hold back."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from typing import Any

import pytest

from memlab.runtime.interrupts import deferred_interrupts, hold_back, interruptible, listen
from tests.helpers.ctrl_c import interrupt, pythons_own_handler  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("pythons_own_handler")


def test_it_comes_at_the_end_and_once() -> None:
    log = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupts() as interrupts:
            interrupt()
            interrupt()
            log.append(interrupts.came)
    assert log == [True]
    with deferred_interrupts():
        pass


def test_it_comes_at_the_end_of_the_outermost() -> None:
    log = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupts() as outer:
            with deferred_interrupts() as inner:
                interrupt()
            log.append("still whole")
            assert inner is outer
    assert log == ["still whole"]


def test_it_comes_where_it_may() -> None:
    log = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_interrupts(), deferred_interrupts() as interrupts:
            interrupts.deliver()
            interrupt()
            interrupts.deliver()
            log.append("too far")
    assert log == []


def test_it_comes_besides_another_error() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        with deferred_interrupts():
            interrupt()
            raise ValueError("the other")
    assert isinstance(caught.value.__context__, ValueError)


def test_another_handler_gets_it() -> None:
    got: list[Any] = []

    def handler(number: int, frame: Any) -> None:
        got.append((number, frame is not None))

    signal.signal(signal.SIGINT, handler)
    with deferred_interrupts():
        interrupt()
        assert got == []
    assert got == [(signal.SIGINT, True)]
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_put_in_meanwhile_stays() -> None:
    got: list[int] = []
    with deferred_interrupts():
        signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    interrupt()
    assert got == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_stays(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with deferred_interrupts() as interrupts:
        assert signal.getsignal(signal.SIGINT) is handler
        if handler is signal.SIG_IGN:
            interrupt()
        assert not interrupts.came
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_on_another_thread_nothing_is_held_back() -> None:
    seen: list[Any] = []

    def elsewhere() -> None:
        with deferred_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    # nor does one that ends there end that of the main thread
    with deferred_interrupts() as interrupts:
        held = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) == held
        assert not interrupts.came


class _Hearing:
    def __init__(self) -> None:
        self.heard = 0

    def hear(self, deliver: Any) -> None:
        self.heard += 1
        deliver()


def test_a_listener_is_removed_from_another_thread() -> None:
    """Of a backward pass on a GPU, say, whose hooks autograd runs on a thread of its own."""
    before, hearing, errors = signal.getsignal(signal.SIGINT), _Hearing(), []
    listener = listen(hearing.hear)
    assert listener is not None
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert hearing.heard == 1

    def remove() -> None:
        try:
            listener.remove()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=remove)
    thread.start()
    thread.join()
    assert errors == []
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert hearing.heard == 1
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("is_held", [False, True])
def test_a_listener_goes_with_its_object(is_held: bool) -> None:
    """Of a plan on a model that was deleted, say."""
    before = signal.getsignal(signal.SIGINT)

    def step(heard: Any) -> None:
        if is_held:
            hold_back(sys._getframe())
        listen(heard)

    hearing = _Hearing()
    step(hearing.hear)  # left without an end, as by an error
    assert signal.getsignal(signal.SIGINT) is not before
    del hearing
    gc.collect()
    if is_held:
        with deferred_interrupts():
            pass
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("comes", [False, True])
def test_what_held_it_back_does_so_again_where_a_listener_went_or_came_meanwhile(comes: bool) -> None:
    before, reached, hearing = signal.getsignal(signal.SIGINT), False, _Hearing()
    if not comes:
        listen(hearing.hear)
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        with interruptible():
            if comes:
                listen(hearing.hear)
            else:
                del hearing
                gc.collect()
        interrupt()
        reached = True
    assert reached
    if comes:
        assert hearing.heard == 1
        del hearing
        gc.collect()
    assert signal.getsignal(signal.SIGINT) is before
