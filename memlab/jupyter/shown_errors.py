"""Errors as cells show them.

1. What the model itself raises, a Ctrl-C among it, comes through memlab on its way to the cell. Those frames are left out.
   Where what memlab raises itself is not one of its errors they stay.
2. What memlab refuses is one line, wherever it comes from (`refusal_in`), in cells without the magic as well (`brief_refusals`).
   So is any other error of memlab's that ends a cell with the magic, as of `memlab.fit` in its text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from memlab.errors import MemlabError, RefusalError
from memlab.runtime.callers import OWN_FOLDER, module_of
from memlab.runtime.dispatch import is_compilers_failure

# IPython's shells are configured at run time: the attributes used here are typed as anything
Shell = Any

_NOT_ONE_GRAPH = (
    "torch.compile cannot make one graph (fullgraph=True, compiled autograd) of a function or a backward pass with code of "
    "the plan in it",
    "let it make several, or leave the plan out",
)


def refusal_in(error: BaseException | None) -> MemlabError | None:
    """Return what memlab has refused in the middle of a cell, in the error that ends it, or in one that this was raised from.

    None for other errors, and for those of calls to memlab that stand in the user's code.
    """
    while error is not None:
        if is_compilers_failure(error):
            return RefusalError("session", *_NOT_ONE_GRAPH, in_loop=True)
        if isinstance(error, MemlabError) and (error.in_loop or _was_called_by_torch(error.__traceback__)):
            return error
        error = error.__cause__
    return None


def _was_called_by_torch(traceback: TracebackType | None) -> bool:
    """Return whether memlab was called by torch (a hook, a node of the backward pass), and not by the user's code."""
    before = ""
    for entry in entries(traceback):
        module = module_of(entry.tb_frame)
        if module.startswith("memlab."):
            return before.startswith("torch.")
        before = module
    return False


def brief_refusals(undo: ExitStack) -> None:
    """Have IPython show what memlab refuses in any cell as one line, until undone; harmless when done."""
    name = "_render_traceback_"  # what IPython asks errors for
    if name not in vars(MemlabError):
        setattr(MemlabError, name, property(_rendered))
        undo.callback(delattr, MemlabError, name)


def _rendered(error: MemlabError) -> Callable[[], list[str]]:
    if refusal_in(error) is not error:
        raise AttributeError("shown with its traceback")
    return lambda: in_one_line(error)


def in_one_line(error: MemlabError) -> list[str]:
    """Return what is shown of one of memlab's errors."""
    return [f"{type(error).__name__}: {error}"]


@contextmanager
def brief_interrupts(shell: Shell) -> Iterator[None]:
    """Show a Ctrl-C in memlab's own work without its frames; that of a cell is shown as `raise_shown` arranges."""
    __tracebackhide__ = True
    try:
        yield
        return
    except KeyboardInterrupt as error:
        if "showtraceback" in vars(shell):
            raise
        shown = KeyboardInterrupt(*error.args)  # a new one, which keeps no variables of those frames
        show_once(shell, shown, shell.InteractiveTB.get_exception_only(type(shown), shown))
    raise shown from None


def show_once(shell: Shell, error: BaseException, lines: list[str] | None) -> None:
    """Let the next traceback that the shell shows be these lines, if it is that of `error`."""
    undo = ExitStack()

    def forget(*_result: Any) -> None:
        undo.close()
        shell.events.unregister("post_run_cell", forget)

    def showtraceback(*args: Any, **kwargs: Any) -> None:
        forget()
        if sys.exc_info()[1] is not error:
            shell.showtraceback(*args, **kwargs)
            return
        # notes the error for %debug and %tb
        shell._get_exc_info()
        if lines is not None:
            shell._showtraceback(type(error), error, lines)

    undo.enter_context(having(shell, showtraceback=showtraceback))
    # in case somebody between here and the shell catches the error
    shell.events.register("post_run_cell", forget)


def leave_memlab_out(error: BaseException | None) -> bool:
    """Take memlab's frames out of the tracebacks of an error and of those it came from; return whether there were any."""
    found = False
    for each in errors_behind(error):
        every = list(entries(each.__traceback__))
        kept = list(_without_memlab(every))
        # a Ctrl-C that came at a bad moment is raised by memlab a moment later
        is_foreign = bool(kept) and (not _is_memlabs(every[-1]) or isinstance(each, KeyboardInterrupt))
        if is_foreign and len(kept) < len(every):
            for entry, following in zip(kept, (*kept[1:], None), strict=True):
                entry.tb_next = following
            each.__traceback__ = kept[0]
            found = True
    return found


def _without_memlab(every: Iterable[TracebackType]) -> Iterator[TracebackType]:
    """Yield the entries that are not memlab's, nor of the operator that one of its modes has called."""
    is_within_operator = False
    for entry in every:
        if _is_memlabs(entry):
            is_within_operator |= entry.tb_frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__")
        else:
            is_within_operator &= module_of(entry.tb_frame).startswith("torch.")
            if not is_within_operator:
                yield entry


def _is_memlabs(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(OWN_FOLDER)


def errors_behind(error: BaseException | None) -> list[BaseException]:
    """Return an error and those that it came from, or was raised beside."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and all(each is not known for known in found):
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found


def entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries of a traceback, the outermost one first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def number_lines(error: BaseException | None) -> None:
    """Give every entry of a traceback a line: a Ctrl-C between two lines has none, and IPython cannot show that."""
    if error is None:
        return
    following = None
    for entry in reversed([*entries(error.__traceback__)]):
        if entry.tb_lineno is None:
            frame = entry.tb_frame
            lines = [n for start, _, n in frame.f_code.co_lines() if n is not None and start <= entry.tb_lasti]
            line = lines[-1] if lines else frame.f_code.co_firstlineno
            following = TracebackType(following, frame, entry.tb_lasti, line)
        else:
            entry.tb_next = following
            following = entry
    error.__traceback__ = following


@contextmanager
def having(thing: Any, **attributes: Any) -> Iterator[None]:
    """Put attributes on an object for a while, in place of its own; what others put there meanwhile stays."""
    own = vars(thing)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in attributes.items():
            if own.get(name) is not value:
                continue
            if name in before:
                own[name] = before[name]
            else:
                del own[name]
