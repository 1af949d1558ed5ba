"""The allocator by examples worked out by hand from the rules of c10/cuda/CUDACachingAllocator.cpp, one per rule."""

from __future__ import annotations

import pytest

from memlab.allocator import Action, Allocator, DoesNotFitError, Event, OutOfMemory, Settings
from memlab.errors import MemlabError
from memlab.units import GIB, KIB, MIB


def allocator(text: str = "", capacity_bytes: int | None = None, *, device_bytes: int | None = None) -> Allocator:
    return Allocator(Settings.parse(text), capacity_bytes, device_bytes=device_bytes, history=True)


def actions(simulated: Allocator) -> list[str]:
    return [f"{entry.action} {entry.size // KIB}K" for entry in simulated.history]


def test_an_unsplit_remainder_counts_as_allocated() -> None:
    # 11.2 MiB = 11744051.2 → 11744256 B (×512); ≥ 10 MiB, so the segment is rounded up to 2 MiB: 12 MiB;
    # 12582912 − 11744256 = 838656 B are left, not more than 1 MiB: no split (`should_split`), the block is 12 MiB
    simulated = allocator()
    block = simulated.malloc(int(11.2 * MIB))
    statistics = simulated.stats()
    assert block.size == statistics.allocated_bytes == statistics.reserved_bytes == 12 * MIB
    assert statistics["requested_bytes.all.current"] == 11744051
    assert statistics["inactive_split_bytes.all.current"] == 0


def test_a_remainder_of_exactly_1_mib_is_not_split_off_and_512_more_are() -> None:
    # `remaining > kSmallSize` is strict: 12 − 11 = 1 MiB stays with the block
    assert allocator().malloc(11 * MIB).size == 12 * MIB
    # 512 B less leave 1 MiB + 512 B, which are split off
    split = allocator()
    assert split.malloc(11 * MIB - 512).size == 11 * MIB - 512
    assert split.stats()["inactive_split_bytes.all.current"] == MIB + 512
    assert split.stats()["inactive_split.large_pool.current"] == 1


def test_1_mib_itself_is_small() -> None:
    # `size <= kSmallSize`: 1 MiB is served by a 2 MiB segment of the small pool, 1 B more by 20 MiB of the large one
    simulated = allocator()
    simulated.malloc(MIB)
    assert simulated.stats()["reserved_bytes.small_pool.current"] == 2 * MIB
    simulated.malloc(MIB + 1)
    assert simulated.stats()["reserved_bytes.large_pool.current"] == 20 * MIB
    assert simulated.stats()["segment.all.current"] == 2


def test_the_small_pool_splits_from_512_bytes() -> None:
    # 2 MiB segment: 1 MiB, then 1 MiB − 512 B, then the 512 B that are left: `remaining >= kMinBlockSize`
    simulated = allocator()
    blocks = [simulated.malloc(size) for size in (MIB, MIB - 512, 1)]
    assert [block.size for block in blocks] == [MIB, MIB - 512, 512]
    assert simulated.stats().reserved_bytes == simulated.stats().allocated_bytes == 2 * MIB


def test_requests_from_1_to_10_mib_share_a_segment() -> None:
    # 20 MiB hold 9 + 9 MiB and leave 2 MiB; the third 9 MiB need a segment of their own
    simulated = allocator()
    first, second = simulated.malloc(9 * MIB), simulated.malloc(9 * MIB)
    assert second.address == first.address + 9 * MIB
    simulated.malloc(9 * MIB)
    assert simulated.stats().reserved_bytes == 40 * MIB
    # idle: 2 MiB at the end of the first segment and 11 MiB in the second
    assert simulated.stats()["inactive_split_bytes.all.current"] == 13 * MIB


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_address_of_equals() -> None:
    simulated = allocator()
    blocks = [simulated.malloc(size * MIB) for size in (40, 12, 30, 12)]
    for block in reversed(blocks):
        simulated.free(block)
    # 12 MiB are the smallest of the free segments that hold 11.5 MiB; the segment asked for first lies lower
    again = simulated.malloc(int(11.5 * MIB))
    assert again.address == blocks[1].address
    assert simulated.stats()["segment.all.current"] == 4


def test_memory_is_reused_on_its_own_stream_only() -> None:
    simulated = allocator()
    simulated.free(simulated.malloc(20 * MIB, stream=1))
    simulated.malloc(20 * MIB, stream=2)
    assert simulated.stats().reserved_bytes == 40 * MIB
    simulated.malloc(20 * MIB, stream=1)
    assert simulated.stats().reserved_bytes == 40 * MIB


def test_freed_neighbours_merge() -> None:
    # three blocks of 6 MiB in one 20 MiB segment (2 MiB idle). Freeing the outer two leaves 6 and 8 MiB idle;
    # freeing the middle one makes the segment whole, and a whole segment is no idle part
    simulated = allocator()
    left, middle, right = (simulated.malloc(6 * MIB) for _ in range(3))
    simulated.free(left)
    simulated.free(right)
    assert simulated.stats()["inactive_split.all.current"] == 2
    assert simulated.stats()["inactive_split_bytes.all.current"] == 14 * MIB
    simulated.free(middle)
    assert simulated.stats()["inactive_split.all.current"] == 0
    assert simulated.stats()["inactive_split_bytes.all.current"] == 0
    assert simulated.malloc(20 * MIB).address == left.address


def test_only_segments_that_are_free_as_a_whole_are_given_back() -> None:
    simulated = allocator()
    whole, part = simulated.malloc(30 * MIB), simulated.malloc(6 * MIB)
    simulated.malloc(6 * MIB)
    simulated.free(whole)
    simulated.free(part)
    simulated.empty_cache()
    assert simulated.stats().reserved_bytes == 20 * MIB
    assert simulated.stats()["num_device_free"] == 1


def test_the_cache_is_given_back_before_giving_up() -> None:
    # capacity 50 MiB: 30 MiB cached; 40 MiB more do not fit, so the cached segment is given back and the driver is
    # asked again: one retry, no error. The peak of reserved bytes is 40 MiB, and yet the first attempt failed
    simulated = allocator(capacity_bytes=50 * MIB)
    simulated.free(simulated.malloc(30 * MIB))
    simulated.malloc(40 * MIB)
    statistics = simulated.stats()
    assert statistics.reserved_bytes == statistics.peak_reserved_bytes == 40 * MIB
    assert (statistics["num_alloc_retries"], statistics["num_ooms"]) == (1, 0)
    assert actions(simulated) == [
        "segment_alloc 30720K", "alloc 30720K", "free_requested 30720K", "free_completed 30720K",
        "segment_free 30720K", "segment_alloc 40960K", "alloc 40960K",
    ]  # fmt: skip


def test_the_retry_gives_back_both_pools_the_large_one_first() -> None:
    simulated = allocator(capacity_bytes=50 * MIB)
    for size in (KIB, 30 * MIB):
        simulated.free(simulated.malloc(size))
    simulated.malloc(50 * MIB)
    freed = [entry.size for entry in simulated.history if entry.action is Action.SEGMENT_FREE]
    assert freed == [30 * MIB, 2 * MIB]


def test_out_of_memory_with_its_numbers() -> None:
    # 48 MiB: 20 MiB in use for 5 MiB asked for; 10 MiB cached as a whole segment go back in the retry
    simulated = allocator(capacity_bytes=48 * MIB)
    simulated.malloc(5 * MIB)
    simulated.free(simulated.malloc(16 * MIB))
    with pytest.raises(DoesNotFitError) as caught:
        simulated.malloc(29 * MIB)
    assert caught.value.out_of_memory == OutOfMemory(
        requested_bytes=29 * MIB,
        attempted_bytes=30 * MIB,
        allocated_bytes=5 * MIB,
        reserved_bytes=20 * MIB,
        capacity_bytes=48 * MIB,
        allowed_bytes=None,
    )
    assert str(caught.value) == (
        "simulated device: tried to allocate 30.0 MiB of 48.0 MiB, 28.0 MiB of which are free; "
        "5.0 MiB are allocated and 15.0 MiB are reserved but unallocated"
    )
    assert (simulated.stats()["num_alloc_retries"], simulated.stats()["num_ooms"]) == (1, 1)
    # the entry carries what the device had free, and the rounded size of the block
    last = simulated.history[-1]
    assert (last.action, last.address, last.size) == (Action.OOM, 28 * MIB, 29 * MIB)
    # the allocator lives on
    assert simulated.malloc(28 * MIB).size == 28 * MIB


def test_the_memory_fraction_limits_what_is_reserved() -> None:
    # half of 64 MiB: 20 + 12 MiB are allowed, 2 MiB more are not, although the device has them
    simulated = allocator("per_process_memory_fraction:0.5", 64 * MIB)
    simulated.malloc(20 * MIB)
    simulated.malloc(12 * MIB)
    with pytest.raises(DoesNotFitError) as caught:
        simulated.malloc(1)
    assert caught.value.out_of_memory.allowed_bytes == 32 * MIB
    assert caught.value.out_of_memory.free_bytes == 0


def test_the_memory_fraction_is_of_the_whole_device() -> None:
    simulated = allocator("per_process_memory_fraction:0.5", 90 * MIB, device_bytes=100 * MIB)
    simulated.malloc(50 * MIB)
    with pytest.raises(DoesNotFitError):
        simulated.malloc(1)


def test_blocks_above_the_split_limit_are_kept_whole() -> None:
    # limit 32 MiB: a free segment of 40 MiB is not split for 24 MiB ("do not return an oversized block")
    simulated = allocator("max_split_size_mb:32")
    simulated.free(simulated.malloc(40 * MIB))
    simulated.malloc(24 * MIB)
    assert simulated.stats().reserved_bytes == 64 * MIB
    # 38 MiB are above the limit and get the 40 MiB block as it is: 40 < 38 + 20
    assert simulated.malloc(38 * MIB).size == 40 * MIB
    assert simulated.stats()["oversize_allocations.current"] == 1
    assert simulated.stats()["oversize_segments.allocated"] == 1
    assert simulated.stats()["max_split_size"] == 32 * MIB


@pytest.mark.parametrize(
    ("text", "reserved"),
    [
        # a free block of 60 MiB for 40 MiB: 60 ≥ 40 + 20, refused; with 21 MiB of slack it is taken
        ("max_split_size_mb:32", 100 * MIB),
        ("max_split_size_mb:32,max_non_split_rounding_mb:21", 60 * MIB),
    ],
)
def test_how_much_larger_an_unsplit_block_may_be(text: str, reserved: int) -> None:
    simulated = allocator(text)
    simulated.free(simulated.malloc(60 * MIB))
    simulated.malloc(40 * MIB)
    assert simulated.stats().reserved_bytes == reserved


def test_without_a_split_limit_there_is_no_size_statistic() -> None:
    assert allocator().stats()["max_split_size"] == -1


def test_with_a_split_limit_enough_is_freed_before_everything_is() -> None:
    # capacity 100 MiB; cached: 34 and 60 MiB. A request for 36 MiB (60 ≥ 36 + 20 is refused) does not fit; the
    # smallest block of at least 36 MiB is freed, that is 60 MiB, and 34 MiB stay cached: no retry is counted
    simulated = allocator("max_split_size_mb:32", 100 * MIB)
    held = [simulated.malloc(34 * MIB), simulated.malloc(60 * MIB)]
    for block in held:
        simulated.free(block)
    simulated.malloc(36 * MIB)
    freed = [entry.size for entry in simulated.history if entry.action is Action.SEGMENT_FREE]
    assert freed == [60 * MIB]
    assert simulated.stats()["num_alloc_retries"] == 0


def test_several_blocks_above_the_split_limit_are_freed_from_the_largest() -> None:
    # capacity 120 MiB; cached: 34, 38 and 42 MiB (33, 37, 41 rounded up to 2 MiB). 70 MiB are more than each of them:
    # 42 and 38 MiB are freed, 80 ≥ 70, and 34 MiB stay
    simulated = allocator("max_split_size_mb:32", 120 * MIB)
    held = [simulated.malloc(size * MIB) for size in (33, 37, 41)]
    for block in held:
        simulated.free(block)
    simulated.malloc(70 * MIB)
    freed = [entry.size for entry in simulated.history if entry.action is Action.SEGMENT_FREE]
    assert freed == [42 * MIB, 38 * MIB]
    assert simulated.stats().reserved_bytes == (34 + 70) * MIB


def test_of_several_blocks_that_are_large_enough_the_smallest_is_freed() -> None:
    # capacity 150 MiB; cached: 60 and 80 MiB, both refused for 36 MiB (60 ≥ 36 + 20). 60 MiB are enough
    simulated = allocator("max_split_size_mb:32", 150 * MIB)
    held = [simulated.malloc(60 * MIB), simulated.malloc(80 * MIB)]
    for block in held:
        simulated.free(block)
    simulated.malloc(36 * MIB)
    assert [entry.size for entry in simulated.history if entry.action is Action.SEGMENT_FREE] == [60 * MIB]


def test_too_little_above_the_split_limit_leads_to_the_retry() -> None:
    # capacity 100 MiB; cached: 34 MiB. For 70 MiB they are freed, but 34 < 70 counts as a failure: the driver is
    # asked again only in the retry
    simulated = allocator("max_split_size_mb:32", 100 * MIB)
    simulated.free(simulated.malloc(34 * MIB))
    simulated.malloc(70 * MIB)
    assert simulated.stats()["num_alloc_retries"] == 1


def test_a_single_idle_segment_is_as_old_as_the_average() -> None:
    # allowed: 80 MiB, threshold 8 MiB; 30 MiB idle are 22 above it and freed, although 40 MiB more would fit
    simulated = allocator("garbage_collection_threshold:0.1,per_process_memory_fraction:0.8", 100 * MIB)
    simulated.free(simulated.malloc(30 * MIB))
    simulated.malloc(40 * MIB)
    assert simulated.stats().reserved_bytes == 40 * MIB


def test_the_memory_fraction_is_compared_with_the_segment_not_the_request() -> None:
    # allowed: 32 MiB, reserved: 18. A request for 5 MiB needs a segment of 20 MiB: 38 > 32
    simulated = allocator("per_process_memory_fraction:0.5", 64 * MIB)
    simulated.malloc(18 * MIB)
    with pytest.raises(DoesNotFitError) as caught:
        simulated.malloc(5 * MIB)
    assert caught.value.out_of_memory.attempted_bytes == 20 * MIB


def test_garbage_collection_frees_old_segments_before_asking_the_driver() -> None:
    # allowed: 80 of 100 MiB; the threshold is 40 MiB. Cached: 30 MiB, freed after request 2, and 20 MiB, freed
    # after request 3. Request 4 (50 MiB) finds 50 MiB reserved, 10 above the threshold. Ages are 4 − 2 = 2 and
    # 4 − 3 = 1, the average 1.5: the 30 MiB are freed, which is enough, and 20 + 50 MiB fit without a retry
    simulated = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.8", 100 * MIB)
    old, young = simulated.malloc(30 * MIB), simulated.malloc(20 * MIB)
    simulated.free(old)
    simulated.free(young)
    young = simulated.malloc(20 * MIB)
    simulated.free(young)
    simulated.malloc(50 * MIB)
    freed = [entry.size for entry in simulated.history if entry.action is Action.SEGMENT_FREE]
    assert freed == [30 * MIB]
    assert simulated.stats()["num_alloc_retries"] == 0


def test_garbage_is_not_collected_without_a_memory_fraction() -> None:
    # `allowed_memory_maximum.has_value()` is part of the condition
    simulated = allocator("garbage_collection_threshold:0.1", 100 * MIB)
    simulated.free(simulated.malloc(30 * MIB))
    simulated.malloc(40 * MIB)
    assert simulated.stats().reserved_bytes == 70 * MIB


def test_divisions_of_powers_of_two_make_sizes_alike() -> None:
    # 33 and 39 MiB lie between 32 and 64 MiB: with 4 divisions (steps of 8 MiB) both become 40 MiB
    simulated = allocator("roundup_power2_divisions:4")
    first = simulated.malloc(33 * MIB)
    simulated.free(first)
    assert simulated.malloc(39 * MIB).address == first.address
    assert simulated.stats().allocated_bytes == 40 * MIB


def test_another_size_of_large_segments() -> None:
    simulated = allocator("large_segment_size_mb:40")
    simulated.malloc(2 * MIB)
    assert simulated.stats().reserved_bytes == 40 * MIB


def test_what_is_counted_over_time() -> None:
    simulated = allocator()
    simulated.free(simulated.malloc(4 * MIB))
    simulated.malloc(2 * MIB)
    numbers = {
        part: simulated.stats()[f"allocated_bytes.all.{part}"] for part in ("current", "peak", "allocated", "freed")
    }
    assert numbers == {"current": 2 * MIB, "peak": 4 * MIB, "allocated": 6 * MIB, "freed": 4 * MIB}


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


def test_a_device_has_memory() -> None:
    with pytest.raises(MemlabError) as caught:
        Allocator(capacity_bytes=0)
    assert str(caught.value) == "capacity_bytes=0: expected 1 byte or more, or None for no limit"


def test_a_replay() -> None:
    events = [Event(1, 5 * MIB), Event(2, 0), Event(3, 7 * MIB), Event(1, -5 * MIB), Event(2, 0), Event(4, 3 * MIB)]
    statistics = allocator().replay(events)
    assert statistics.fits
    assert statistics["requested_bytes.all.peak"] == statistics.peak_allocated_bytes == 12 * MIB
    assert statistics.allocated_bytes == 10 * MIB
    assert statistics.peak_reserved_bytes == 20 * MIB


def test_a_replay_ends_with_what_does_not_fit() -> None:
    events = [Event(1, 30 * MIB), Event(2, 30 * MIB), Event(3, MIB)]
    statistics = allocator(capacity_bytes=50 * MIB).replay(events)
    assert not statistics.fits
    assert statistics.out_of_memory is not None
    assert statistics.out_of_memory.requested_bytes == 30 * MIB
    assert statistics["allocation.all.allocated"] == 1


def test_a_second_replay_continues() -> None:
    simulated = allocator()
    simulated.replay([Event(1, 5 * MIB)])
    assert simulated.replay([Event(1, -5 * MIB)]).allocated_bytes == 0


def test_a_replay_that_contradicts_itself() -> None:
    with pytest.raises(MemlabError) as caught:
        allocator().replay([Event(7, 1), Event(7, 1)])
    assert str(caught.value) == "replay: storage 7 is born a second time; free it first"
    with pytest.raises(MemlabError) as caught:
        allocator().replay([Event(7, -1)])
    assert str(caught.value) == "replay: storage 7 is freed but not alive; its birth must come first"


# expandable segments


def test_pages_are_mapped_as_they_are_needed() -> None:
    # 5 MiB need one page of 20 MiB; 30 MiB more: 15 MiB of it are free, 15 MiB are missing, one more page
    simulated = allocator("expandable_segments:True", GIB)
    first, second = simulated.malloc(5 * MIB), simulated.malloc(30 * MIB)
    assert second.address == first.address + 5 * MIB
    assert simulated.stats().reserved_bytes == 40 * MIB
    assert actions(simulated) == ["segment_map 20480K", "alloc 5120K", "segment_map 20480K", "alloc 30720K"]
    # segments are not counted, pages move reserved bytes only; idle parts are not counted either
    assert simulated.stats()["segment.all.current"] == 0
    assert simulated.stats()["inactive_split_bytes.all.current"] == 0


def test_pages_of_the_small_pool_are_2_mib() -> None:
    simulated = allocator("expandable_segments:True", GIB)
    for _ in range(3):
        simulated.malloc(MIB)
    assert simulated.stats()["reserved_bytes.small_pool.current"] == 4 * MIB


def test_pages_of_the_large_pool_are_as_large_as_large_segments() -> None:
    simulated = allocator("expandable_segments:True,large_segment_size_mb:32", GIB)
    simulated.malloc(2 * MIB)
    assert simulated.stats().reserved_bytes == 32 * MIB


def test_expandable_segments_split_from_512_bytes_in_the_large_pool_too() -> None:
    # nothing of 11.2 MiB is rounded to segments: the block has 11744256 B
    simulated = allocator("expandable_segments:True", GIB)
    assert simulated.malloc(int(11.2 * MIB)).size == 11744256


def test_the_end_of_the_range_is_used_last() -> None:
    # free: 8 MiB at the front (next to a block in use) and 4 MiB at the end, which could grow by all of the range.
    # 3 MiB fit both; best fit by present size would take the end, by what it could grow to it takes the front
    simulated = allocator("expandable_segments:True", GIB)
    front = simulated.malloc(8 * MIB)
    address = front.address
    simulated.malloc(8 * MIB)
    simulated.free(front)
    assert simulated.malloc(3 * MIB).address == address


def test_fragments_that_segments_would_keep_are_used() -> None:
    # 4 × 30 MiB, freed, then 2 × 55 MiB: separate segments of 30 MiB are of no use to 55 MiB (120 + 112 MiB
    # reserved, 55 being rounded up to 56), one range serves them from the 120 MiB it has
    sizes = [30 * MIB] * 4
    reserved = {}
    for text in ("", "expandable_segments:True"):
        simulated = allocator(text, GIB)
        for block in [simulated.malloc(size) for size in sizes]:
            simulated.free(block)
        simulated.malloc(55 * MIB)
        simulated.malloc(55 * MIB)
        reserved[text] = simulated.stats().reserved_bytes
    assert reserved == {"": 232 * MIB, "expandable_segments:True": 120 * MIB}


def test_whole_pages_inside_free_blocks_are_unmapped() -> None:
    # pages: 0–20, 20–40, 40–60 MiB. In use: 0–5 and 50–51; free between: 5–50, of which only 20–40 is a whole page.
    # 51–60 is free as well, but no whole page of it
    simulated = allocator("expandable_segments:True", GIB)
    simulated.malloc(5 * MIB)
    middle = simulated.malloc(45 * MIB)
    address = middle.address
    simulated.malloc(MIB + 512)
    simulated.free(middle)
    simulated.empty_cache()
    assert simulated.stats().reserved_bytes == 40 * MIB
    assert [segment.size for segment in simulated.snapshot()] == [20 * MIB, 20 * MIB]
    # the gap is the lowest place for what fits neither 5–20 nor 40–50: it is mapped again, and 5–50 is one block
    again = simulated.malloc(40 * MIB)
    assert again.address == address
    assert simulated.stats().reserved_bytes == 60 * MIB
    assert len(simulated.snapshot()) == 1


def test_unmapping_lets_the_other_pool_or_stream_have_the_memory() -> None:
    # capacity 60 MiB: 40 MiB cached on stream 1; 50 MiB on stream 2 need 60 MiB of pages, got by the retry
    simulated = allocator("expandable_segments:True", 60 * MIB)
    simulated.free(simulated.malloc(40 * MIB, stream=1))
    simulated.malloc(50 * MIB, stream=2)
    assert simulated.stats().reserved_bytes == 60 * MIB
    assert simulated.stats()["num_alloc_retries"] == 1


def test_pages_mapped_before_the_device_ran_out_stay_until_the_retry() -> None:
    # capacity 50 MiB, in use: 15 of 20 MiB. 30 MiB need 25 MiB beyond the free 5: two pages, of which the device has
    # one and a half; a range is mapped as a whole or not at all
    simulated = allocator("expandable_segments:True", 50 * MIB)
    simulated.malloc(15 * MIB)
    with pytest.raises(DoesNotFitError) as caught:
        simulated.malloc(30 * MIB)
    assert caught.value.out_of_memory.reserved_bytes == 20 * MIB
    assert caught.value.out_of_memory.attempted_bytes == 30 * MIB


def test_the_memory_fraction_counts_a_whole_segment_even_where_pages_would_do() -> None:
    # allowed: 32 MiB, reserved: 20 with 15 free. 16 MiB would need one page of 20 → 40 > 32 anyway; but also 20 + 16
    # of `alloc_size` is compared, before any page is looked for (`alloc_block`)
    simulated = allocator("expandable_segments:True,per_process_memory_fraction:0.5", 64 * MIB)
    simulated.malloc(5 * MIB)
    with pytest.raises(DoesNotFitError) as caught:
        simulated.malloc(16 * MIB)
    assert caught.value.out_of_memory.allowed_bytes == 32 * MIB
    assert not [entry for entry in simulated.history if entry.action is Action.SEGMENT_UNMAP]


def test_a_range_without_pages_is_dropped() -> None:
    simulated = allocator("expandable_segments:True", GIB)
    block = simulated.malloc(5 * MIB)
    address = block.address
    simulated.free(block)
    simulated.empty_cache()
    # 1⅛ GiB further on: 1152 MiB in whole pages of 20 MiB are 1160 MiB
    assert simulated.malloc(5 * MIB).address == address + 1160 * MIB


def test_a_request_larger_than_any_guess_of_a_device_without_limit() -> None:
    simulated = allocator("expandable_segments:True")
    block = simulated.malloc(3 * 2**40)
    simulated.free(block)
    simulated.empty_cache()
    assert simulated.stats().reserved_bytes == 0
