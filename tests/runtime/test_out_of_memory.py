"""Errors of memory, from every library that has words for it; and what a caught one still holds."""

from __future__ import annotations

import errno
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Generator
from types import FrameType

import numpy as np
import pytest
import torch

from memlab.errors import MemlabError
from memlab.measuring.device import Device
from memlab.runtime.out_of_memory import is_out_of_memory, release, requested_bytes

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB is "
    "free. Process 7 has 77.90 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 "
    "GiB is reserved by PyTorch but unallocated."
)
OUT_OF_MEMORY = [
    torch.OutOfMemoryError(CUDA_TEXT),
    torch.OutOfMemoryError("in whatever words"),
    RuntimeError(CUDA_TEXT),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB"),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.26 GB). Tried to allocate 64.00 MB on private pool."),
    RuntimeError("cuda runtime error (2) : out of memory at aten/src/THC/THCGeneral.cpp:50"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes. Error code 12 (Cannot allocate memory)"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000 bytes."),
    RuntimeError("unable to mmap 4096 bytes from file </dev/shm/x>: Cannot allocate memory (12)"),
    RuntimeError("NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("NCCL WARN Cuda failure 'out of memory'"),
    RuntimeError("Last error:\nFailed to CUDA calloc 6291456 bytes"),
    RuntimeError("worker: Error out of memory at line 100 in file /src/csrc/ops.cu"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]  # fmt: skip
OTHERS = [
    None,
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("unsupported memory format option Preserve"),
    RuntimeError("view size is not compatible with input tensor's size; use memory_format"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"),
    RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    RuntimeError("use smaller batches to avoid running out of memory"),
    ValueError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemlabError("simulated device: tried to allocate 3.00 GiB of 3.00 GiB"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: f"{type(error).__name__} {error}"[:60])
def test_an_out_of_memory_error_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: f"{type(error).__name__} {error}"[:60])
def test_another_error_is_not(error: BaseException | None) -> None:
    assert not is_out_of_memory(error)
    assert requested_bytes(error) is None


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("it was to raise")


def test_out_of_memorys_that_really_happen() -> None:
    def of_the_ledger() -> None:
        with Device(2**20).ledger():
            torch.empty(2**21, dtype=torch.uint8)

    real = [caught(lambda: torch.empty(10**15)), caught(lambda: np.empty(10**15)), caught(of_the_ledger)]

    assert [is_out_of_memory(error) for error in real] == [True, True, True]
    assert requested_bytes(real[0]) == 4 * 10**15
    assert requested_bytes(real[1]) == pytest.approx(8 * 10**15, rel=1e-2)
    assert requested_bytes(real[2]) == 2**21


# -- chains and groups


def raised_from(cause: BaseException) -> BaseException:
    def call() -> None:
        raise ValueError("the trainer failed") from cause

    return caught(call)


def raised_while_handling(first: BaseException, second: BaseException) -> BaseException:
    def call() -> None:
        try:
            raise first
        except type(first):
            raise second  # noqa: B904 - the point of it

    return caught(call)


def test_an_error_raised_from_an_out_of_memory_error_counts() -> None:
    error = raised_from(raised_from(torch.OutOfMemoryError(CUDA_TEXT)))

    assert is_out_of_memory(error)
    assert requested_bytes(error) == 2 * 2**30


def test_a_failure_of_a_handler_does_not_count() -> None:
    error = raised_while_handling(torch.OutOfMemoryError(CUDA_TEXT), KeyError("cleaning up"))

    assert isinstance(error.__context__, torch.OutOfMemoryError)
    assert not is_out_of_memory(error)


def test_a_second_out_of_memory_error_while_handling_one_counts() -> None:
    assert is_out_of_memory(raised_while_handling(MemoryError(), RuntimeError(CUDA_TEXT)))


def test_an_out_of_memory_error_while_handling_something_else_counts() -> None:
    assert is_out_of_memory(raised_while_handling(KeyError("x"), MemoryError()))


def test_a_group_counts_when_a_member_does() -> None:
    assert is_out_of_memory(ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [MemoryError()])]))
    assert not is_out_of_memory(ExceptionGroup("tasks", [ValueError(), KeyError()]))


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_who_wants_to_stop_is_not_retried(ending: BaseException) -> None:
    group = BaseExceptionGroup("tasks", [ending, MemoryError()])
    ending.__cause__ = group.__cause__ = MemoryError()

    assert not is_out_of_memory(ending)
    assert not is_out_of_memory(group)


def test_a_chain_in_a_circle_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert not is_out_of_memory(first)
    release(first)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (CUDA_TEXT, 2 * 2**30),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0", 512),
        ("CUDA out of memory. Tried to allocate 1.50 KiB. GPU 0", 1536),
        ("MPS backend out of memory. Tried to allocate 64.00 MB on private pool.", 64 * 2**20),
        ("memlab CPU device out of memory. Tried to allocate 12.0 MiB. Capacity 1.00 GiB", 12 * 2**20),
        ("memlab CPU device out of memory. Tried to allocate 12 B. Capacity 1.00 GiB", 12),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes. Error code 12", 4000),
        ("Failed to CUDA calloc 6291456 bytes", 6291456),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", None),
        ("CUDA error: out of memory", None),
    ],
)
def test_what_was_asked_for(text: str, size_bytes: int | None) -> None:
    assert requested_bytes(RuntimeError(text)) == size_bytes


# -- what a caught error holds


class Held:
    """Weak references to tensors made in frames that fail."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[torch.Tensor]] = []

    def tensor(self) -> torch.Tensor:
        made = torch.ones(4)
        self._seen.append(weakref.ref(made))
        return made

    @property
    def alive(self) -> int:
        return sum(seen() is not None for seen in self._seen)


@pytest.fixture
def held() -> Held:
    return Held()


def fails(held: Held, deeper: int = 2) -> None:
    activation = held.tensor()  # noqa: F841 - it is what the frame holds
    if deeper == 0:
        raise torch.OutOfMemoryError(CUDA_TEXT)
    fails(held, deeper - 1)


def test_a_caught_error_holds_nothing_after_its_release(held: Held) -> None:
    error = caught(lambda: fails(held))
    printed = "".join(traceback.format_exception(error))
    assert held.alive == 3

    release(error)

    assert held.alive == 0
    assert "".join(traceback.format_exception(error)) == printed


def test_locals_that_somebody_has_read_are_dropped_as_well(held: Held) -> None:
    error = caught(lambda: fails(held))
    at = error.__traceback__
    while at is not None:  # as IPython does before it prints
        assert at.tb_frame.f_locals is not None
        at = at.tb_next
    del at

    release(error)

    assert held.alive == 0


def test_frames_that_were_cut_from_the_traceback_hold_nothing_either(held: Held) -> None:
    """As a cell's traceback is shown without memlab's own lines."""
    error = caught(lambda: fails(held, 4))
    first = error.__traceback__
    assert first is not None
    assert first.tb_next is not None
    innermost = first.tb_next
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    first.tb_next.tb_next = innermost
    del first, innermost
    assert held.alive == 5

    release(error)

    assert held.alive == 0


def test_callers_of_whoever_catches_stay(held: Held) -> None:
    def catches() -> BaseException:
        return caught(lambda: fails(held, 0))

    def calls() -> tuple[BaseException, FrameType]:
        mine = held.tensor()
        error = catches()
        assert mine.sum() == 4
        return error, sys._getframe()

    error, frame = calls()
    release(error)

    assert held.alive == 1
    assert "mine" in frame.f_locals


def test_it_may_be_called_in_the_handler(held: Held) -> None:
    try:
        fails(held)
    except torch.OutOfMemoryError as error:
        release(error)
        assert held.alive == 0


def test_variables_of_whoever_catches_stay(held: Held) -> None:
    mine = held.tensor()
    try:
        fails(held)
    except torch.OutOfMemoryError as error:
        release(error)

    assert held.alive == 1
    assert mine.sum() == 4


def test_a_chain_is_released_as_a_whole(held: Held) -> None:
    def third() -> None:
        try:
            fails(held, 0)
        except torch.OutOfMemoryError:
            try:
                fails(held, 0)
            except torch.OutOfMemoryError as error:
                here = held.tensor()  # noqa: F841
                raise ValueError("the trainer failed") from error

    error = caught(third)
    group = caught(lambda: raise_group(error))
    assert held.alive == 3

    release(group)

    assert held.alive == 0


def raise_group(member: BaseException) -> None:
    raise BaseExceptionGroup("tasks", [member])


def test_an_error_that_somebody_further_out_handles_is_not_touched(held: Held) -> None:
    handled, error = handled_and_guarded(held)

    assert error.__context__ is handled
    assert held.alive == 1
    assert isinstance(last_frame(handled).f_locals["activation"], torch.Tensor)


def handled_and_guarded(held: Held) -> tuple[BaseException, BaseException]:
    """A loop that goes on training while it handles an error of its own."""
    try:
        fails(held, 0)
    except torch.OutOfMemoryError as handled:
        return handled, guarded(held)
    raise AssertionError("it was to raise")


def guarded(held: Held) -> BaseException:
    """Catches and releases further in, as a guard of the model call does."""
    error = caught(lambda: fails(held))
    release(error)
    return error


def last_frame(error: BaseException) -> FrameType:
    at = error.__traceback__
    assert at is not None
    while at.tb_next is not None:
        at = at.tb_next
    return at.tb_frame


def test_frames_at_and_above_until_are_spared(held: Held) -> None:
    frames: list[FrameType] = []

    def caller() -> None:
        own = held.tensor()  # noqa: F841
        frames.append(sys._getframe())
        fails(held)

    error = caught(caller)
    assert held.alive == 4

    release(error, until=frames[0])

    assert held.alive == 1
    assert isinstance(frames.pop().f_locals["own"], torch.Tensor)


def test_a_generator_that_can_go_on_is_not_closed(held: Held) -> None:
    """The error passes through a generator, which catches it and yields again."""

    def batches() -> Generator[int, None, None]:
        batch = held.tensor()
        while True:
            try:
                yield int(batch.sum())
            except torch.OutOfMemoryError as error:
                errors.append(error)

    errors: list[BaseException] = []
    batch = batches()
    next(batch)
    assert batch.throw(caught(lambda: fails(held))) == 4
    assert held.alive == 4

    release(errors.pop())

    assert held.alive == 1
    assert next(batch) == 4
    batch.close()


def test_a_generator_that_has_ended_is_cleared(held: Held) -> None:
    def batches() -> Generator[None, None, None]:
        fails(held)
        yield

    error = caught(lambda: next(batches()))
    release(error)

    assert held.alive == 0


def test_a_frame_that_runs_in_another_thread_is_left_alone(held: Held) -> None:
    """An error handed from a thread to another one while the thread still handles it."""
    errors: list[BaseException] = []
    caught_it, done = threading.Event(), threading.Event()
    sums: list[float] = []

    def work() -> None:
        own = held.tensor()
        try:
            fails(held)
        except torch.OutOfMemoryError as error:
            errors.append(error)
            caught_it.set()
            done.wait(10)
        sums.append(float(own.sum()))

    worker = threading.Thread(target=work)
    worker.start()
    assert caught_it.wait(10)
    release(errors.pop())
    assert held.alive == 1
    done.set()
    worker.join()

    assert sums == [4.0]


def test_the_namespace_of_executed_code_is_left_alone(held: Held) -> None:
    """A notebook's cell runs as a module: its variables are the user's, not the frame's."""
    namespace = {"fails": fails, "held": held}
    error = caught(lambda: exec("model = held.tensor()\nfails(held)", namespace))

    release(error)

    assert held.alive == 1
    assert isinstance(namespace["model"], torch.Tensor)
