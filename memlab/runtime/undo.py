"""`Undo`: what takes a change back, to be done more than once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Undo(ExitStack):
    """Callbacks that stay: what they take back may be put back by reference, and is then taken back again.

    Args:
        registered: called before each is registered.

    Example:
        >>> done, undo = [], Undo()
        >>> _ = undo.callback(done.append, 1), undo.callback(done.append, 2)
        >>> undo.run()
        >>> undo.run()
        >>> done
        [2, 1, 2, 1]
    """

    def __init__(self, registered: Callable[[], object] = bool) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._registered = registered

    def callback(self, callback: Callable[_P, _T], /, *args: _P.args, **kwds: _P.kwargs) -> Callable[_P, _T]:
        self._registered()
        self.calls.append(partial(callback, *args, **kwds))
        return callback

    def run(self) -> None:
        """Take all back, the newest first."""
        for call in reversed(self.calls):
            call()
