"""`Stage`: where work that must not meet a running cell is done; in a notebook, the kernel's main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Playing(Protocol):
    """An iterator that is being advanced."""

    def pause(self) -> None:
        """Stand still after the step under way."""

    def resume(self) -> None:
        """Go on."""

    def cancel(self) -> None:
        """Close the iterator after the step under way, so that it puts back what it changed."""


class Stage(Protocol):
    """Runner of tasks one after another, never while a cell runs. Every method may be called from any thread."""

    def when_idle(self, work: Callable[[], None]) -> None:
        """Do something as soon as no cell runs."""

    def play(self, steps: Iterator[Any], ended: Callable[[BaseException | None], None]) -> Playing:
        """Advance an iterator, a step at a time, while no cell runs; it is closed before the next cell does."""


class AtOnce:
    """A stage without a notebook: everything is done there and then, in the calling thread."""

    def when_idle(self, work: Callable[[], None]) -> None:
        work()

    def play(self, steps: Iterator[Any], ended: Callable[[BaseException | None], None]) -> Playing:
        """Hold an iterator for a script to advance by `OneByOne.advance`."""
        return OneByOne(steps, ended)


class OneByOne:
    """An iterator that a script, or a test, advances."""

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
