"""`LoopMode`: a function mode over code of the loop's own, which begins and ends where no block does.

It stands at the bottom of the stack of function modes, so that modes of the loop's may be entered and left while
it is there: leaving one takes whatever is on top. Only torch's own for a default device is below.
Between two cells of a notebook there is no loop, and none of these modes (`pause`, `resume`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from memlab.runtime.interrupts import uninterrupted


class LoopMode(TorchFunctionMode):
    """A mode that is entered by `begin` and left by `end`, wherever the loop is by then.

    Example:
        >>> import torch
        >>> class Names(LoopMode):
        ...     def __torch_function__(self, func, types, args=(), kwargs=None):
        ...         print(func.__name__)
        ...         return func(*args, **kwargs or {})
        >>> mode, one = Names(), torch.ones(1)
        >>> mode.begin()
        >>> two = one + one
        add
        >>> mode.end()
    """

    _has_begun = False

    def begin(self) -> None:
        """Watch this thread's code from now on; harmless when that is so already."""
        self._has_begun = True
        _paused.discard(self)
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self not in stack:
            base = 1 if stack and stack[0] is _default_device() else 0
            _restack([*stack[:base], self, *stack[base:]])

    def end(self) -> None:
        """Stop watching; harmless when done."""
        if not self._has_begun:
            return
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self in stack:
            _restack([mode for mode in stack if mode is not self])
        elif self not in _paused:
            return  # it is another thread's
        _paused.discard(self)
        self._has_begun = False


_paused: set[LoopMode] = set()


def pause() -> None:
    """Take these modes off the stack of this thread, until `resume`."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    mine = [mode for mode in stack if isinstance(mode, LoopMode)]
    if mine:
        _paused.update(mine)
        _restack([mode for mode in stack if mode not in mine])


def resume() -> None:
    """Put back what `pause` took off and what has not ended since."""
    while _paused:
        _paused.pop().begin()


def _default_device() -> Any:
    """The mode of `torch.set_default_device`, which torch keeps at the bottom; ``with torch.device(...)`` is on top."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def _restack(modes: list[TorchFunctionMode]) -> None:
    """Rebuild this thread's stack of function modes, bottom first; a Ctrl-C on the way would lose the loop's own."""
    with uninterrupted():
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]
