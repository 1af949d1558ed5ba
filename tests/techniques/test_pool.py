"""Memory off the device that is used again."""

from __future__ import annotations

import errno
import gc
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.plan import Tier
from memlab.techniques.offload import pool as _pool
from memlab.techniques.offload.pool import SMALLEST_GROWTH_BYTES, Pool, file_slab
from memlab.techniques.offload.spill import Spill, is_spilled


def in_memory(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


@given(sizes=st.lists(st.integers(1, 3 * SMALLEST_GROWTH_BYTES), max_size=40), luck=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_regions_in_use_never_overlap(sizes: list[int], luck: random.Random) -> None:
    pool = Pool(in_memory)
    alive: list[tuple[torch.Tensor, int]] = []
    for mark, size_bytes in enumerate(sizes):
        region = pool.take(size_bytes)
        assert region.shape == (size_bytes,)
        alive.append((region.fill_(mark), mark))
        del region
        while alive and luck.random() < 0.4:
            alive.pop(luck.randrange(len(alive)))
        assert all(bool((region == mark).all()) for region, mark in alive)
        in_use = sum(-(-region.numel() // 512) * 512 for region, _ in alive)
        assert pool.used_bytes == in_use <= pool.held_bytes
    alive.clear()
    assert pool.used_bytes == 0


def test_what_is_freed_in_reverse_order_leaves_no_holes() -> None:
    pool, sizes = Pool(in_memory), [1000, 300_000, 64, 8192] * 8
    held = []
    for _ in range(3):
        regions = [pool.take(size_bytes) for size_bytes in sizes]
        held.append(pool.held_bytes)
        while regions:
            regions.pop()
    assert held == held[:1] * 3
    assert held[0] <= 2 * sum(sizes) + SMALLEST_GROWTH_BYTES


def test_it_shrinks_to_what_was_needed_last() -> None:
    pool = Pool(in_memory)
    regions = [pool.take(2**22) for _ in range(8)]
    del regions
    assert pool.used_bytes == 0
    most = pool.held_bytes
    for _ in range(2):
        small = pool.take(2**20)
        del small
        assert pool.used_bytes == 0
    assert pool.held_bytes < most
    assert pool.held_bytes >= 2**20


def test_slabs_outlive_their_pool_while_a_region_is_in_use() -> None:
    released: list[str] = []
    pool = Pool(in_memory, lambda: released.append("released"))
    region = pool.take(100).fill_(7)
    del pool
    gc.collect()
    assert released == []
    assert region.sum() == 700
    del region
    gc.collect()
    assert released == ["released"]


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(
        OSError, match=r"No space left on device: offload needs 4096 bytes more in .*set TMPDIR"
    ) as caught:
        file_slab(1)
    assert caught.value.errno == errno.ENOSPC


def test_many_tensors_on_disk_need_few_files() -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("counts open files as Linux tells them")
    before, spill = files(), Spill(Tier.DISK)
    kept = [spill.store(torch.full((2000,), float(at))) for at in range(500)]
    assert files() - before < 10
    assert all(float(tensor[0]) == at and is_spilled(tensor.untyped_storage()) for at, tensor in enumerate(kept))
    del kept, spill
    gc.collect()
    assert files() == before


@pytest.mark.parametrize(
    "make", [lambda: torch.arange(5.0), lambda: torch.ones(3, 4, dtype=torch.bfloat16), lambda: torch.zeros(0)]
)
def test_a_spilled_tensor_is_an_ordinary_one(make: Callable[[], torch.Tensor]) -> None:
    spill, tensor = Spill(Tier.DISK), make()
    kept = spill.store(tensor)
    assert (kept.shape, kept.dtype, kept.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert torch.equal(kept, tensor)
    assert spill.stored_bytes == tensor.numel() * tensor.element_size() <= spill.held_bytes + 1
    copy = kept.clone()
    del kept
    assert spill.stored_bytes == 0
    assert not is_spilled(copy.untyped_storage())


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.arange(6.0).view(2, 3).t(), (1, 3)),
        (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), (48, 1, 12, 3)),
        (torch.ones(5, 1, 3, 3).to(memory_format=torch.channels_last), (9, 1, 3, 1)),
        (torch.ones(4, 6)[:, :3], (3, 1)),  # with gaps
        (torch.ones(1, 3).expand(2, 3), (3, 1)),
    ],
)
def test_a_spilled_tensor_is_laid_out_as_the_one_it_is_of(tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    kept = Spill(Tier.DISK).store(tensor)
    assert kept.stride() == strides
    assert torch.equal(kept, tensor)


def test_pages_are_whole() -> None:
    assert len(file_slab(_pool._GRANULARITY_BYTES + 1)) == 2 * _pool._GRANULARITY_BYTES
