"""Stages of tests: what a notebook's main thread does, done when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memlab.live.stage import Stage


class OneByOne:
    """An iterator that a test advances."""

    def __init__(self, steps: Iterator[Any], ended: Callable[[BaseException | None], None]) -> None:
        self._steps: Iterator[Any] | None = steps
        self._ended = ended
        self._is_paused = False

    def advance(self) -> bool:
        """Make one step; False once there is none."""
        if self._steps is None or self._is_paused:
            return False
        try:
            next(self._steps)
        except StopIteration:
            self._end(None)
        except Exception as error:  # noqa: BLE001 - whatever a step raises is told to whoever plays it
            self._end(error)
        return self._steps is not None

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def cancel(self) -> None:
        if self._steps is not None:
            close = getattr(self._steps, "close", None)
            if close is not None:
                close()
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._steps = None
        self._ended(error)


class Playing(Stage):
    """Does work at once, and keeps what is to be advanced."""

    can_play = True

    def __init__(self) -> None:
        self.played: list[OneByOne] = []

    def play(
        self, steps: Iterator[Any], ended: Callable[[BaseException | None], None], after_seconds: float = 0.0
    ) -> OneByOne:
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
