"""Stages of tests: what a notebook's main thread does, done when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memlab.live.stage import AtOnce, OneByOne


class Playing(AtOnce):
    """Does work at once, and keeps what is to be advanced."""

    def __init__(self) -> None:
        self.played: list[OneByOne] = []

    def play(self, steps: Iterator[Any], ended: Callable[[BaseException | None], None]) -> OneByOne:
        self.played.append(OneByOne(steps, ended))
        return self.played[-1]

    def play_out(self) -> None:
        """Advance the newest to its end."""
        while self.played[-1].advance():
            pass


class Later(Playing):
    """A stage whose main thread is busy until `idle` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []

    def when_idle(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def idle(self) -> None:
        """Do what waits."""
        while self.waiting:
            self.waiting.pop(0)()
