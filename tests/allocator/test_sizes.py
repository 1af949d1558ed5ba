"""Sizes of blocks and segments: the examples of torch's own comments and tests, and the edges of each rule."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memlab.allocator
from memlab.allocator.sizes import DIVISION_INTERVALS, interval_of, round_size, round_to_division, segment_size
from memlab.units import GIB, KIB, MIB
from tests.helpers.doctests import failures_in

UNDIVIDED = (0,) * DIVISION_INTERVALS


@pytest.mark.parametrize("name", sorted(module.name for module in pkgutil.iter_modules(memlab.allocator.__path__)))
def test_examples_in_the_docstrings(name: str) -> None:
    assert failures_in(importlib.import_module(f"memlab.allocator.{name}")) == 0


@pytest.mark.parametrize(
    ("size", "block"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_blocks_are_multiples_of_512_bytes(size: int, block: int) -> None:
    assert round_size(size, UNDIVIDED) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),  # kSmallSize itself is small
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # kMinLargeAlloc itself gets a segment of its own
        (10 * MIB + 512, 12 * MIB),
        (12 * MIB, 12 * MIB),
    ],
)
def test_segments(block: int, segment: int) -> None:
    assert segment_size(block) == segment


def test_a_large_segment_may_have_another_size() -> None:
    assert segment_size(5 * MIB, large_segment_bytes=64 * MIB) == 64 * MIB
    assert segment_size(MIB, large_segment_bytes=64 * MIB) == 2 * MIB


# "the size 1200 lies between 1024 and 2048 and if we do 4 divisions between them, the values are 1024, 1280, 1536
# and 1792": the comment above roundup_power2_next_division in CUDACachingAllocator.cpp
@pytest.mark.parametrize(("size", "rounded"), [(1024, 1024), (1200, 1280), (1281, 1536), (1537, 1792), (1793, 2048)])
def test_four_divisions_as_in_torchs_comment(size: int, rounded: int) -> None:
    assert round_to_division(size, 4) == rounded


def test_divisions_are_not_used_where_they_would_be_finer_than_512_bytes() -> None:
    # `size > kMinBlockSize * divisions`: 4 × 512 = 2048 itself is still rounded to 512
    assert round_size(2047, (4,) * DIVISION_INTERVALS) == 2048
    assert round_size(2049, (4,) * DIVISION_INTERVALS) == 2560
    assert round_size(600, (4,) * DIVISION_INTERVALS) == 1024


def test_one_division_is_none() -> None:
    assert round_size(3 * MIB + 1, (1,) * DIVISION_INTERVALS) == 3 * MIB + 512


@pytest.mark.parametrize(
    ("size", "interval"), [(1, 0), (MIB, 0), (2 * MIB - 1, 0), (2 * MIB, 1), (GIB, 10), (64 * GIB, 15), (2**50, 15)]
)
def test_intervals(size: int, interval: int) -> None:
    assert interval_of(size) == interval


@given(st.integers(1, 2**42), st.sampled_from([0, 1, 2, 4, 8, 64]))
def test_rounding_never_loses_bytes_and_keeps_its_step(size: int, parts: int) -> None:
    rounded = round_size(size, (parts,) * DIVISION_INTERVALS)
    assert rounded >= size
    assert rounded % 512 == 0
    # a division adds less than one step, and a step is at most the power of two below, halved
    assert rounded - size < max(512, size // max(parts, 1)) or parts < 2
    assert round_size(rounded, (parts,) * DIVISION_INTERVALS) == rounded
    assert segment_size(rounded) >= rounded
    assert segment_size(rounded) % (256 * KIB) == 0
