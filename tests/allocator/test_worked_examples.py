"""The allocator by examples worked out by hand from the rules of c10/cuda/CUDACachingAllocator.cpp, one per rule."""

from __future__ import annotations

import pytest

from memlab.allocator import Allocator, Settings
from memlab.errors import MemlabError
from memlab.units import KIB, MIB


def allocator(text: str = "") -> Allocator:
    return Allocator(Settings.parse(text), history=True)


def idle(simulated: Allocator) -> list[int]:
    """Sizes of free parts of segments in use."""
    return [block.size for s in simulated.snapshot() if s.allocated for block in s.blocks if not block.allocated]


def reserved(simulated: Allocator, *, is_small: bool) -> int:
    return sum(segment.size for segment in simulated.snapshot() if segment.is_small is is_small)


def actions(simulated: Allocator) -> list[str]:
    return [f"{entry.action} {entry.size // KIB}K" for entry in simulated.history]


def test_an_unsplit_remainder_counts_as_allocated() -> None:
    # 11.2 MiB = 11744051.2 → 11744256 B (×512); ≥ 10 MiB, so the segment is rounded up to 2 MiB: 12 MiB;
    # 12582912 − 11744256 = 838656 B are left, not more than 1 MiB: no split (`should_split`), the block is 12 MiB
    simulated = allocator()
    block = simulated.malloc(int(11.2 * MIB))
    assert block.size == simulated.allocated_bytes == simulated.reserved_bytes == 12 * MIB
    assert block.requested == 11744051
    assert idle(simulated) == []


def test_a_remainder_of_exactly_1_mib_is_not_split_off_and_512_more_are() -> None:
    # `remaining > kSmallSize` is strict: 12 − 11 = 1 MiB stays with the block
    assert allocator().malloc(11 * MIB).size == 12 * MIB
    # 512 B less leave 1 MiB + 512 B, which are split off
    split = allocator()
    assert split.malloc(11 * MIB - 512).size == 11 * MIB - 512
    assert idle(split) == [MIB + 512]


def test_1_mib_itself_is_small() -> None:
    # `size <= kSmallSize`: 1 MiB is served by a 2 MiB segment of the small pool, 1 B more by 20 MiB of the large one
    simulated = allocator()
    simulated.malloc(MIB)
    assert reserved(simulated, is_small=True) == 2 * MIB
    simulated.malloc(MIB + 1)
    assert reserved(simulated, is_small=False) == 20 * MIB
    assert len(simulated.snapshot()) == 2


def test_the_small_pool_splits_from_512_bytes() -> None:
    # 2 MiB segment: 1 MiB, then 1 MiB − 512 B, then the 512 B that are left: `remaining >= kMinBlockSize`
    simulated = allocator()
    blocks = [simulated.malloc(size) for size in (MIB, MIB - 512, 1)]
    assert [block.size for block in blocks] == [MIB, MIB - 512, 512]
    assert simulated.reserved_bytes == simulated.allocated_bytes == 2 * MIB


def test_requests_from_1_to_10_mib_share_a_segment() -> None:
    # 20 MiB hold 9 + 9 MiB and leave 2 MiB; the third 9 MiB need a segment of their own
    simulated = allocator()
    first, second = simulated.malloc(9 * MIB), simulated.malloc(9 * MIB)
    assert second.address == first.address + 9 * MIB
    simulated.malloc(9 * MIB)
    assert simulated.reserved_bytes == 40 * MIB
    # idle: 2 MiB at the end of the first segment and 11 MiB in the second
    assert sum(idle(simulated)) == 13 * MIB


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_address_of_equals() -> None:
    simulated = allocator()
    blocks = [simulated.malloc(size * MIB) for size in (40, 12, 30, 12)]
    for block in reversed(blocks):
        simulated.free(block)
    # 12 MiB are the smallest of the free segments that hold 11.5 MiB; the segment asked for first lies lower
    again = simulated.malloc(int(11.5 * MIB))
    assert again.address == blocks[1].address
    assert len(simulated.snapshot()) == 4


def test_memory_is_reused_on_its_own_stream_only() -> None:
    simulated = allocator()
    simulated.free(simulated.malloc(20 * MIB, stream=1))
    simulated.malloc(20 * MIB, stream=2)
    assert simulated.reserved_bytes == 40 * MIB
    simulated.malloc(20 * MIB, stream=1)
    assert simulated.reserved_bytes == 40 * MIB


def test_freed_neighbours_merge() -> None:
    # three blocks of 6 MiB in one 20 MiB segment (2 MiB idle). Freeing the outer two leaves 6 and 8 MiB idle;
    # freeing the middle one makes the segment whole, and a whole segment is no idle part
    simulated = allocator()
    left, middle, right = (simulated.malloc(6 * MIB) for _ in range(3))
    simulated.free(left)
    simulated.free(right)
    assert idle(simulated) == [6 * MIB, 8 * MIB]
    simulated.free(middle)
    assert idle(simulated) == []
    assert simulated.malloc(20 * MIB).address == left.address


def test_only_segments_that_are_free_as_a_whole_are_given_back() -> None:
    simulated = allocator()
    whole, part = simulated.malloc(30 * MIB), simulated.malloc(6 * MIB)
    simulated.malloc(6 * MIB)
    simulated.free(whole)
    simulated.free(part)
    simulated.empty_cache()
    assert simulated.reserved_bytes == 20 * MIB


def test_blocks_above_the_split_limit_are_kept_whole() -> None:
    # limit 32 MiB: a free segment of 40 MiB is not split for 24 MiB ("do not return an oversized block")
    simulated = allocator("max_split_size_mb:32")
    simulated.free(simulated.malloc(40 * MIB))
    simulated.malloc(24 * MIB)
    assert simulated.reserved_bytes == 64 * MIB
    # 38 MiB are above the limit and get the 40 MiB block as it is: 40 < 38 + 20
    assert simulated.malloc(38 * MIB).size == 40 * MIB


@pytest.mark.parametrize(
    ("text", "reserved_bytes"),
    [
        # a free block of 60 MiB for 40 MiB: 60 ≥ 40 + 20, refused; with 21 MiB of slack it is taken
        ("max_split_size_mb:32", 100 * MIB),
        ("max_split_size_mb:32,max_non_split_rounding_mb:21", 60 * MIB),
    ],
)
def test_how_much_larger_an_unsplit_block_may_be(text: str, reserved_bytes: int) -> None:
    simulated = allocator(text)
    simulated.free(simulated.malloc(60 * MIB))
    simulated.malloc(40 * MIB)
    assert simulated.reserved_bytes == reserved_bytes


def test_divisions_of_powers_of_two_make_sizes_alike() -> None:
    # 33 and 39 MiB lie between 32 and 64 MiB: with 4 divisions (steps of 8 MiB) both become 40 MiB
    simulated = allocator("roundup_power2_divisions:4")
    first = simulated.malloc(33 * MIB)
    simulated.free(first)
    assert simulated.malloc(39 * MIB).address == first.address
    assert simulated.allocated_bytes == 40 * MIB


def test_another_size_of_large_segments() -> None:
    simulated = allocator("large_segment_size_mb:40")
    simulated.malloc(2 * MIB)
    assert simulated.reserved_bytes == 40 * MIB


def test_a_block_is_freed_once() -> None:
    simulated = allocator()
    block = simulated.malloc(MIB)
    simulated.free(block)
    with pytest.raises(MemlabError) as caught:
        simulated.free(block)
    assert str(caught.value) == (
        f"free(Block(address={block.address:#x}, size={2 * MIB}, stream=0, free)): not in use; "
        "each block is freed once, by the allocator that handed it out"
    )


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_cannot_be_allocated(size: int) -> None:
    with pytest.raises(MemlabError) as caught:
        allocator().malloc(size)
    assert str(caught.value) == f"malloc({size}): expected 1 byte or more; torch never asks its allocator for less"


# expandable segments


def test_pages_are_mapped_as_they_are_needed() -> None:
    # 5 MiB need one page of 20 MiB; 30 MiB more: 15 MiB of it are free, 15 MiB are missing, one more page
    simulated = allocator("expandable_segments:True")
    first, second = simulated.malloc(5 * MIB), simulated.malloc(30 * MIB)
    assert second.address == first.address + 5 * MIB
    assert simulated.reserved_bytes == 40 * MIB
    assert actions(simulated) == ["segment_map 20480K", "alloc 5120K", "segment_map 20480K", "alloc 30720K"]


def test_pages_of_the_small_pool_are_2_mib() -> None:
    simulated = allocator("expandable_segments:True")
    for _ in range(3):
        simulated.malloc(MIB)
    assert reserved(simulated, is_small=True) == 4 * MIB


def test_pages_of_the_large_pool_are_as_large_as_large_segments() -> None:
    simulated = allocator("expandable_segments:True,large_segment_size_mb:32")
    simulated.malloc(2 * MIB)
    assert simulated.reserved_bytes == 32 * MIB


def test_expandable_segments_split_from_512_bytes_in_the_large_pool_too() -> None:
    # nothing of 11.2 MiB is rounded to segments: the block has 11744256 B
    simulated = allocator("expandable_segments:True")
    assert simulated.malloc(int(11.2 * MIB)).size == 11744256


def test_the_end_of_the_range_is_used_last() -> None:
    # free: 8 MiB at the front (next to a block in use) and 4 MiB at the end, which could grow by all of the range.
    # 3 MiB fit both; best fit by present size would take the end, by what it could grow to it takes the front
    simulated = allocator("expandable_segments:True")
    front = simulated.malloc(8 * MIB)
    address = front.address
    simulated.malloc(8 * MIB)
    simulated.free(front)
    assert simulated.malloc(3 * MIB).address == address


def test_fragments_that_segments_would_keep_are_used() -> None:
    # 4 × 30 MiB, freed, then 2 × 55 MiB: separate segments of 30 MiB are of no use to 55 MiB (120 + 112 MiB
    # reserved, 55 being rounded up to 56), one range serves them from the 120 MiB it has
    sizes = [30 * MIB] * 4
    reserved_bytes = {}
    for text in ("", "expandable_segments:True"):
        simulated = allocator(text)
        for block in [simulated.malloc(size) for size in sizes]:
            simulated.free(block)
        simulated.malloc(55 * MIB)
        simulated.malloc(55 * MIB)
        reserved_bytes[text] = simulated.reserved_bytes
    assert reserved_bytes == {"": 232 * MIB, "expandable_segments:True": 120 * MIB}


def test_whole_pages_inside_free_blocks_are_unmapped() -> None:
    # pages: 0–20, 20–40, 40–60 MiB. In use: 0–5 and 50–51; free between: 5–50, of which only 20–40 is a whole page.
    # 51–60 is free as well, but no whole page of it
    simulated = allocator("expandable_segments:True")
    simulated.malloc(5 * MIB)
    middle = simulated.malloc(45 * MIB)
    address = middle.address
    simulated.malloc(MIB + 512)
    simulated.free(middle)
    simulated.empty_cache()
    assert simulated.reserved_bytes == 40 * MIB
    assert [segment.size for segment in simulated.snapshot()] == [20 * MIB, 20 * MIB]
    # the gap is the lowest place for what fits neither 5–20 nor 40–50: it is mapped again, and 5–50 is one block
    again = simulated.malloc(40 * MIB)
    assert again.address == address
    assert simulated.reserved_bytes == 60 * MIB
    assert len(simulated.snapshot()) == 1


def test_a_range_without_pages_is_dropped() -> None:
    simulated = allocator("expandable_segments:True")
    block = simulated.malloc(5 * MIB)
    address = block.address
    simulated.free(block)
    simulated.empty_cache()
    # behind a range of 1 TiB
    assert simulated.malloc(5 * MIB).address > address + 2**40


def test_a_request_larger_than_a_range() -> None:
    simulated = allocator("expandable_segments:True")
    block = simulated.malloc(3 * 2**40)
    simulated.free(block)
    simulated.empty_cache()
    assert simulated.reserved_bytes == 0
