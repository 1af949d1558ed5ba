"""`Freeing`: what a failed cell leaves pinned is let go, and its traceback stays.

1. IPython keeps the error of the cell that failed last, in three places, and through it every function that was
   running: their variables, tensors and graphs among them, outlive `gc.collect()` and `empty_cache()`.
2. Functions are emptied, not forgotten (`out_of_memory.release`): `%tb` and `%debug` go on showing names and
   lines, without variables. Variables of the notebook, generators that can go on, `_` and `Out` stay untouched.
3. It is done when memory ran out, or when a `%%memfit` cell was interrupted. Other errors keep everything, and so
   does an error that the user's code has caught.
4. It is done when the outermost cell is over: until then a magic may still show the error of an inner one.

Known limitations:
    Tensors that an exception carries itself, and those in the body of a class that was being made, stay.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

from memlab.jupyter.notebook import Notebook
from memlab.jupyter.shown_errors import errors_behind
from memlab.runtime import accelerator
from memlab.runtime.callers import module_of
from memlab.runtime.interrupts import listen_no_more
from memlab.runtime.out_of_memory import collect, is_out_of_memory, release
from memlab.units import format_bytes

_CELL_MAGIC = "memlab.jupyter.cell_magic"
# a cell that awaits is interrupted by cancelling it
_INTERRUPTIONS = (KeyboardInterrupt, asyncio.CancelledError)


class Freeing:
    """Looks at how cells end, and frees what the failed ones held."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._outermost: Any = None
        self._failed: list[BaseException] = []
        # an id, since a reference would keep alive what the user may want to delete
        self._known_error = 0

    def cell_begins(self, info: Any) -> None:
        """A cell begins, maybe inside another one."""
        if self._outermost is None:
            self._outermost = info

    def cell_ended(self, result: Any) -> None:
        """A cell is over; memory is freed when it was the outermost, and nobody hears of Ctrl-C any more."""
        if self._notebook.config.free:
            self._note(self._error_of(result))
        is_inner = result is not None and self._outermost is not None and self._outermost is not result.info
        if is_inner:
            return
        self._outermost = None
        listen_no_more()
        failed, self._failed = self._failed, []
        if failed:
            self._free(failed)

    def _error_of(self, result: Any) -> BaseException | None:
        """Return what ended a cell: its own error, or one that IPython caught on behalf of a magic such as `%run`."""
        shown = getattr(sys, "last_value", None)
        is_known, self._known_error = id(shown) == self._known_error, id(shown)
        if result is not None and not result.success:
            own: BaseException = result.error_before_exec or result.error_in_exec
            return own
        return shown if not is_known and _was_caught_by_ipython(shown) else None

    def _note(self, error: BaseException | None) -> None:
        is_new = all(error is not noted for noted in self._failed)
        if error is not None and is_new and calls_for_freeing(error):
            self._failed.append(error)

    def _free(self, failed: list[BaseException]) -> None:
        freed = free(failed)
        shell = self._notebook.shell
        variables = {name: value for name, value in shell.user_ns.items() if name not in shell.user_ns_hidden}
        how = "interrupted" if isinstance(failed[-1], _INTERRUPTIONS) else "failed"
        print(sentence(freed, how, holders_of_graphs(variables)))  # noqa: T201 - what happened to the variables


def free(errors: Iterable[BaseException]) -> str:
    """Let go of what the functions behind errors hold, and give cached memory back to the device.

    Returns:
        What that came to, as on a GPU "CUDA: 8.00 GiB → 1.00 GiB allocated"; empty on a CPU, which has no counter to ask.
    """
    before_bytes = _allocated_bytes()
    for error in errors:
        # the frame that caught the error is IPython's, which hides itself by one of its variables
        release(error, until=_first_frame(error))
    collect()
    after_bytes = _allocated_bytes()
    if before_bytes is None or after_bytes is None:
        return ""
    name = accelerator.name_of(accelerator.every()[0])
    return f"{name}: {format_bytes(before_bytes)} → {format_bytes(after_bytes)} allocated"


def calls_for_freeing(error: BaseException) -> bool:
    """Return whether memory ran out, here or in what led here, or the user interrupted a `%%memfit` cell.

    Example:
        >>> error = KeyError("raised while an OutOfMemoryError was handled")
        >>> error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
        >>> calls_for_freeing(error), calls_for_freeing(KeyError())
        (True, False)
    """
    # whatever the handler of an out-of-memory error raised: what ran out of memory is pinned by it
    if any(map(is_out_of_memory, errors_behind(error))):
        return True
    went_through = (module_of(frame) for frame, _ in walk_tb(error.__traceback__))
    return isinstance(error, _INTERRUPTIONS) and _CELL_MAGIC in went_through


def holders_of_graphs(variables: Mapping[str, Any]) -> list[str]:
    """Names of variables that may keep activations alive: tensors with a graph, alone or in a model's output.

    Example:
        >>> loss = torch.ones(2, requires_grad=True).sum()
        >>> holders_of_graphs({"loss": loss, "out": {"logits": loss}, "n": 1})
        ['loss', 'out']
    """
    return [name for name, value in variables.items() if not name.startswith("_") and _has_graph(value)]


def sentence(freed: str, how: str, holders: list[str]) -> str:
    """One line for the user.

    Example:
        >>> sentence("CUDA: 8.00 GiB → 1.00 GiB allocated", "failed", ["loss"])  # doctest: +NORMALIZE_WHITESPACE
        'memfit: freed what the functions of the failed cell held (CUDA: 8.00 GiB → 1.00 GiB allocated);
         variables may hold more: del loss; for %debug with variables: %config MemLab.free = False, and run it again'
    """
    numbers = f" ({freed})" if freed else ""
    parts = [
        f"memfit: freed what the functions of the {how} cell held{numbers}",
        f"variables may hold more: del {', '.join(holders)}" if holders else "",
        "for %debug with variables: %config MemLab.free = False, and run it again",
    ]
    return "; ".join(filter(None, parts))


def _was_caught_by_ipython(error: BaseException | None) -> bool:
    caught_by = _first_frame(error) if error is not None else None
    return caught_by is not None and module_of(caught_by).startswith("IPython.")


def _first_frame(error: BaseException) -> FrameType | None:
    """The frame that caught an error."""
    return next((frame for frame, _ in walk_tb(error.__traceback__)), None)


def _has_graph(value: Any) -> bool:
    # what is really there: a mapping of a library's may import or read whatever it is asked for
    held = dict.values(value) if isinstance(value, dict) else (value,)
    return any(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in held)


def _allocated_bytes() -> int | None:
    if not accelerator.is_in_use():
        return None
    return sum(map(accelerator.allocated_bytes, accelerator.every()))
