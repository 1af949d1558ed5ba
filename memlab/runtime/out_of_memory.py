"""Out-of-memory errors: recognising them, reading them, and dropping what they hold.

Rules of recognition:

1. By type: `torch.OutOfMemoryError`, `MemoryError` (so NumPy's as well) and `OSError` with ENOMEM. A full disk is
   none: less memory does not help it.
2. By text, of a `RuntimeError` only: libraries below torch have no type of their own for it. The texts are in
   `_TEXTS`; words such as "memory" alone are never enough ("memory format").
3. An error raised *from* a recognised one counts: whoever wrote ``raise X from oom`` says that X is its
   consequence. An error that merely came up *while* one was handled does not count, unless rules 1 and 2 recognise
   it by itself: it is the failure of a handler, and another batch size would not heal it.
4. A group of errors counts when a member does: the others may be consequences (cancelled siblings), and those that
   are not come up again in the retry.
5. What is no `Exception` (`KeyboardInterrupt`, `SystemExit`, a cancelled task) never counts, nor does a group with
   one in it, whatever it was raised from: somebody wants the program to stop.
"""

from __future__ import annotations

import errno
import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import TypeVar

import torch

from memlab.runtime import accelerator
from memlab.runtime.dropped_graphs import free_dropped_graphs
from memlab.units import GIB, KIB, MIB

_T = TypeVar("_T")

_NCCL_CALL = r"CUDA (?:host )?(?:alloc|malloc|calloc)(?: async)?"
_TEXTS = re.compile(
    "|".join(
        (
            # torch's allocators ("CUDA out of memory", "MPS backend out of memory") and the calls into CUDA beside
            # them, the driver's included ("CUDA error: out of memory")
            r"\b(?:CUDA|HIP|XPU|MPS|MTIA|CPU)(?: backend| device| driver)?(?: error:?)? out of memory\b",
            r"\bcuda runtime error \(2\) ?: out of memory\b",
            r"\bTriton Error \[(?:CUDA|HIP)\]: out of memory\b",
            r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b",
            # shared memory of the host, as data loaders and files use it
            r"\bunable to mmap .*: Cannot allocate memory \(12\)",
            # cuBLAS, cuDNN, cuSOLVER, cuSPARSE and cuFFT, and their ROCm twins
            r"\b(?:CU|HIP|ROC)[A-Z]+_(?:STATUS_)?(?:[A-Z]+_)*ALLOC(?:ATION)?_FAILED\b",
            r"\bmiopenStatusAllocFailed\b",
            # what they say when there is no memory for a handle; after that they are initialized
            r"\b(?:CU|HIP)[A-Z]+_STATUS_NOT_INITIALIZED when calling `\w*Create",
            # NCCL puts the reason into its last lines
            r"\bCuda failure(?: 2)? 'out of memory'",
            rf"\bFailed to {_NCCL_CALL}\b",
            # bitsandbytes prints this and ends the process; launchers raise it again with what was printed
            r"\bError out of memory at line \d+ in file\b",
        )
    ),
    re.IGNORECASE,
)
_REQUEST = re.compile(
    rf"(?:tr(?:ied|ying) to allocate|unable to allocate|{_NCCL_CALL}) "
    r"(?P<number>\d+(?:\.\d+)?) (?P<unit>bytes|[KMGTPE]?i?B)\b",
    re.IGNORECASE,
)
PRINTED_SIZE = r"(\d+(?:\.\d+)? (?:bytes|[KMGT]iB|B))"  # as torch's CUDA allocator and memlab's CPU ledger print it
# decimal names stand for binary sizes where torch uses them (MPS)
_UNITS = {"k": KIB, "m": MIB, "g": GIB, "t": 2**40, "p": 2**50, "e": 2**60, "b": 1}
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory ran out, by the rules of this module.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasGemmEx(...)`"))
        True
        >>> is_out_of_memory(RuntimeError("unsupported memory format option Preserve"))
        False
    """
    return next(_out_of_memory_errors(error), None) is not None


def printed_bytes(size: str) -> int:
    """Return the bytes that a size in an error stands for.

    Example:
        >>> printed_bytes("1.50 GiB"), printed_bytes("0 bytes")
        (1610612736, 0)
    """
    number, unit = size.split()
    return round(float(number) * (1 if unit == "bytes" else _UNITS[unit[0].lower()]))


def requested_bytes(error: BaseException | None) -> int | None:
    """Return what the allocation that failed asked for, as the error's text has it.

    Returns:
        Bytes, rounded as the text is; None when no text says it.

    Example:
        >>> requested_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …"))
        2147483648
    """
    sizes = (_size_in(str(oom)) for oom in _out_of_memory_errors(error))
    return next((size for size in sizes if size is not None), None)


def release(error: BaseException, until: FrameType | None = None) -> None:
    """Drop the tensors that an error keeps alive through the frames of its traceback.

    The frames between the handler and the place of the error have ended once it is caught, but their local variables
    live as long as the traceback does. Those are dropped. The error and its traceback stay and print the same
    lines; only `%debug` finds no variables any more.

    Frames that are left alone: those that run, in whatever thread; those of generators and coroutines that can still
    go on (closing one would change the program); those at and above `until`. Errors that the chain leads to
    (`__cause__`, `__context__`, members of groups) are released as well, unless they were caught further out than this
    one: such an error is being handled by somebody else.

    Args:
        error: what was raised.
        until: the frame that called what failed; by default the one that caught the error.

    Example:
        >>> import weakref
        >>> def step():
        ...     activation = torch.ones(3)
        ...     held.append(weakref.ref(activation))
        ...     raise MemoryError
        >>> held = []
        >>> try:
        ...     step()
        ... except MemoryError as caught:
        ...     error = caught
        >>> held[0]() is None
        False
        >>> release(error)
        >>> held[0]() is None
        True
    """
    running = _stack_above(sys._getframe(1))
    outermost = until or _first_frame(error)
    others = _stack_above(outermost.f_back) if outermost is not None else set()
    ours = [each for each in _chain(error) if each is error or _first_frame(each) not in others]
    spared = running | (_stack_above(until) if until is not None else set())
    frames = [frame for each in ours for frame in _frames(each) if frame not in spared]
    suspended = _suspended(frames)
    for frame in frames:
        if frame not in suspended:
            _clear(frame)


def collect() -> None:
    """Free what only cycles keep, and give the allocator's cache back."""
    free_dropped_graphs()
    gc.collect()
    accelerator.empty_cache()


def with_room(work: Callable[[], _T]) -> _T:
    """Do something, and once more where memory ran out: what the first attempt held is gone by then."""
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release(error)
    collect()
    return work()


def _out_of_memory_errors(error: BaseException | None) -> Iterator[BaseException]:
    """The errors behind an error that say by themselves that memory ran out, the outermost first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each, Exception) or id(each) in seen:
            continue
        seen.add(id(each))
        if _says_memory_ran_out(each):
            yield each
        if isinstance(each, ExceptionGroup):
            waiting.extend(each.exceptions)
        waiting.append(each.__cause__)


def _says_memory_ran_out(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def _size_in(text: str) -> int | None:
    found = _REQUEST.search(text)
    if found is None:
        return None
    return round(float(found["number"]) * _UNITS[found["unit"][0].lower()])


def _chain(error: BaseException) -> list[BaseException]:
    """An error and every one it leads to."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in found:
            continue
        found[id(each)] = each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting.extend(each.exceptions)
    return list(found.values())


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The frames of an error's traceback, and those between them that were cut from it: the ones they called keep them."""
    at, shown = error.__traceback__, set[FrameType]()
    while at is not None:
        yield at.tb_frame
        cut, caller = [], at.tb_frame.f_back
        while caller is not None and caller not in shown:
            cut.append(caller)
            caller = caller.f_back
        if caller is not None:  # else these called the outermost one
            yield from cut
        shown.add(at.tb_frame)
        at = at.tb_next


def _first_frame(error: BaseException) -> FrameType | None:
    """The frame that caught an error, as far as its traceback has come."""
    return next(_frames(error), None)


def _stack_above(frame: FrameType | None) -> set[FrameType]:
    """A frame and those that called it."""
    above = set()
    while frame is not None:
        above.add(frame)
        frame = frame.f_back
    return above


def _suspended(frames: list[FrameType]) -> set[FrameType]:
    """Return the frames that belong to a generator or coroutine which has not ended."""
    # a frame that has ended refers to its code; while a generator has it, only the generator does
    own = [f for f in frames if f.f_code.co_flags & _SUSPENDABLE and f.f_code not in gc.get_referents(f)]
    # before Python 3.14 a frame does not know its generator
    living = (_frame_of(thing) for thing in gc.get_referrers(*own)) if own else ()
    return {frame for frame in living if frame is not None}


def _frame_of(thing: object) -> FrameType | None:
    kind = type(thing)
    if kind is GeneratorType:
        return thing.gi_frame  # type: ignore[attr-defined, no-any-return]
    if kind is CoroutineType:
        return thing.cr_frame  # type: ignore[attr-defined, no-any-return]
    return thing.ag_frame if kind is AsyncGeneratorType else None  # type: ignore[attr-defined]


def _clear(frame: FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:
        # it runs, here or in another thread
        return
    # until Python 3.12 a frame whose locals were once read (IPython does) keeps a copy of them; reading renews it
    _ = frame.f_locals
