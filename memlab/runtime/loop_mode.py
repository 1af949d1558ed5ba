"""`LoopMode`: a function mode over code of the loop's own, which begins and ends where no block does.

It stands at the bottom of the stack of function modes, so that modes of the loop's may be entered and left while
it is there: leaving one takes whatever is on top. Only torch's own for a default device is below.
Between two cells of a notebook there is no loop, and none of these modes (`pause`, `resume`), except where memlab makes
steps of the loop there (`resumed`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from memlab.runtime.interrupts import deferred_interrupts


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

    is_resumed = False  # whether the loop, or what comes after it, is in another cell than where this began
    _has_begun = False
    _is_over = False  # it ended while a function was under way that it is told of, after which torch puts it back
    _thread = 0
    _is_on_top = False  # whether it hears of a function before others of this kind, which may call others in its place

    @property
    def is_heard(self) -> bool:
        """Return whether whoever is told still lives: a loop that drops its model ends no session."""
        return True

    def begin(self) -> None:
        """Watch this thread's code from now on; harmless when that is so already."""
        self._has_begun, self._is_over, self.is_resumed = True, False, False
        self._thread = threading.get_ident()
        _paused.discard(self)
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self not in stack:
            base = 1 if stack and stack[0] is _default_device() else 0
            while self._is_on_top and base < len(stack) and isinstance(stack[base], LoopMode):
                base += 1
            _restack([*stack[:base], self, *stack[base:]])

    def end(self) -> None:
        """Stop watching; harmless when done."""
        if not self._has_begun:
            return
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self in stack:
            _restack([mode for mode in stack if mode is not self])
        elif self not in _paused:
            self._is_over = self._thread == threading.get_ident()  # else it is another thread's
            return
        _paused.discard(self)
        self._has_begun = False


class UncompiledMode(LoopMode):
    """A mode that stays away from code which ``torch.compile`` makes: Dynamo would trace into it."""

    def begin(self) -> None:
        if has_compiled_code():
            return
        callbacks = _compilers_callbacks()
        if callbacks is not None and self._step_aside not in callbacks.start_callbacks:
            callbacks.register_start_callback(self._step_aside)
        super().begin()

    def end(self) -> None:
        super().end()
        # asked of the list itself: what is noted beside it would be wrong where a Ctrl-C comes between the two
        callbacks = _compilers_callbacks()
        while callbacks is not None and self._step_aside in callbacks.start_callbacks:
            callbacks.remove_start_callback(self._step_aside)

    def _step_aside(self, _compiling: Any) -> None:
        super().end()


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    __tracebackhide__ = True
    return func(*args, **kwargs)


_LINES_BEFORE_CALL = 2


def called_from_loop(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call what a mode was told of, from a frame of the loop's file, function and line: a warning shows where it was called.

    For `__torch_function__` alone, which must call it itself.
    """
    __tracebackhide__ = True
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == "torch.overrides" and frame.f_back is not None:
        frame = frame.f_back.f_back or frame  # past a function of Python, which has handed itself over
    line = max(1, frame.f_lineno - _LINES_BEFORE_CALL)
    asking = frame.f_code
    code = _called.__code__.replace(
        co_filename=asking.co_filename, co_name=asking.co_name, co_qualname=asking.co_qualname, co_firstlineno=line
    )
    return FunctionType(code, frame.f_globals)(func, args, kwargs)


_paused: set[LoopMode] = set()
_between_cells = threading.Event()


def pause() -> None:
    """Take these modes off the stack of this thread, until `resume`."""
    _between_cells.set()
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    mine = [mode for mode in stack if isinstance(mode, LoopMode)]
    if mine:
        _paused.update(mode for mode in mine if not mode._is_over and mode.is_heard)
        _restack([mode for mode in stack if mode not in mine])


def resume() -> None:
    """Put back what `pause` took off and what has not ended since."""
    _between_cells.clear()
    while _paused:
        mode = _paused.pop()
        if mode.is_heard:
            mode.begin()
            mode.is_resumed = True


@contextmanager
def resumed() -> Iterator[None]:
    """Watch within as in a cell: what is done there is the loop's, though no cell runs."""
    is_between = _between_cells.is_set()
    resume()
    try:
        yield
    finally:
        if is_between:
            pause()


def _default_device() -> Any:
    """The mode of `torch.set_default_device`, which torch keeps at the bottom; ``with torch.device(...)`` is on top."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def _restack(modes: list[TorchFunctionMode]) -> None:
    """Rebuild this thread's stack of function modes, bottom first; a Ctrl-C on the way would lose the loop's own."""
    with deferred_interrupts():
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
        for mode in modes:
            if isinstance(mode, LoopMode) and mode._is_over:
                continue
            _push_mode(mode)  # type: ignore[no-untyped-call]


def _compilers_callbacks() -> Any:
    """Return the callbacks of torch's compiler for when it begins to compile; None as long as it is not imported."""
    dynamo = sys.modules.get("torch._dynamo.callback")
    return None if dynamo is None else dynamo.callback_handler


def has_compiled_code() -> bool:
    """Return whether ``torch.compile`` has compiled anything in this process, and so may have code of the loop's.

    Functions that were only marked for it, as libraries do when they are imported, are none yet.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and dynamo.FRAME_COUNTER > 0
