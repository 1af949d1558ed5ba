"""Ctrl-C in tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def pythons_own_handler() -> Iterator[None]:
    """Python's handler for Ctrl-C during a test, and still there afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)
