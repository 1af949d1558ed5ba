"""Retries of torch's own allocator on a GPU with little room: told apart by its cause, and cured by what is advised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from memlab.allocator import Settings
from memlab.measuring.device import device_for
from memlab.rescue.retries import RetryWatch, make_segments_expandable
from memlab.units import MIB

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.memory]

Step = Sequence[Sequence[int]]  # sizes in MiB of what lives together, one group after the other
MIXED_LENGTHS: tuple[Step, ...] = ([[12] * 6], [[14] * 6], [[16] * 6])
FULL: tuple[Step, ...] = ([[120], [1] * 20],) * 3
HALF_FULL: tuple[Step, ...] = ([[60], [60], [1] * 20],) * 3


def _empty(size_mib: int) -> torch.Tensor:
    return torch.empty(size_mib * MIB, dtype=torch.uint8, device="cuda")


@pytest.fixture
def _small_gpu() -> Iterator[None]:
    # those of other tests leave pieces of segments free
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    device = device_for(torch.device("cuda"), torch.cuda.memory_reserved() + 150 * MIB)
    weights = _empty(20)
    try:
        yield
    finally:
        del weights
        device.close()
        torch.cuda.empty_cache()


def _said_of(steps: Sequence[Step], settings: Settings | None) -> list[str]:
    """What is said of steps; under given settings nothing is changed in the process."""
    said: list[str] = []
    expand = make_segments_expandable if settings is None else lambda _settings: None
    watch = RetryWatch(said.append, settings=settings, expand=expand)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for groups in steps:
        torch.cuda.reset_peak_memory_stats()
        for sizes_mib in groups:
            held = [_empty(size_mib) for size_mib in sizes_mib]
            del held
        watch.step_ended(optimizer, skipped=False)
    return said


@pytest.mark.usefixtures("_small_gpu")
def test_pieces_of_the_wrong_sizes() -> None:
    [text] = _said_of(MIXED_LENGTHS, Settings())
    assert "gave its cache back to the driver" in text
    assert "free memory is in pieces: start Python with PYTORCH_ALLOC_CONF=expandable_segments:True" in text


@pytest.mark.usefixtures("_small_gpu")
def test_what_is_advised_for_pieces_helps() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        assert _said_of(MIXED_LENGTHS, Settings.parse("expandable_segments:True")) == []
    finally:
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.usefixtures("_small_gpu")
def test_pieces_are_cured_in_the_running_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    try:
        [text] = _said_of([*MIXED_LENGTHS, *MIXED_LENGTHS], None)
        assert text.endswith(
            "segments grow in place from here on, as with PYTORCH_ALLOC_CONF=expandable_segments:True, which processes that are "
            "started now get too"
        )
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        assert _said_of(MIXED_LENGTHS, None) == []
        assert torch.cuda.memory_stats()["num_alloc_retries"] == before
    finally:
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.usefixtures("_small_gpu")
def test_too_little_memory() -> None:
    [text] = _said_of(FULL, Settings())
    assert text.endswith("of tensors; tensors fill it: use smaller micro-batches, with --accumulate 2")


@pytest.mark.usefixtures("_small_gpu")
def test_what_is_advised_for_too_little_memory_helps() -> None:
    assert _said_of(HALF_FULL, Settings()) == []
