"""Expandable segments: one growing range of addresses per stream and pool, mapped page by page.

1. A range is larger than any device's memory, and nothing of it is mapped at first.
2. A request that fits no free block takes the lowest addresses where free and unmapped blocks together hold it;
   pages are mapped until they do.
3. Pages are 2 MiB in the small pool and as large as a large segment (20 MiB) in the large one.
4. Giving back unmaps whole pages inside free blocks; what is free on a page partly in use stays.
5. A range of which nothing is mapped any more is dropped.
"""

from __future__ import annotations

from memlab.allocator.blocks import Block, BlockPool, DeviceMemory, Range
from memlab.allocator.history import Action, Context, EventHistory
from memlab.allocator.sizes import SMALL_SEGMENT_BYTES, round_up

# torch sets 1⅛ times the device's memory aside (`find_expandable_block`)
_RANGE_BYTES = 2**40


class ExpandableSegments:
    """Maps and unmaps pages for both pools."""

    def __init__(self, device: DeviceMemory, large_page_bytes: int, history: EventHistory) -> None:
        self._device = device
        self._large_page_bytes = large_page_bytes
        self._history = history

    def grow(self, pool: BlockPool, stream: int, size: int, context: Context) -> Block:
        """A free block of at least `size` (`try_allocate_expandable_block`)."""
        block = self._find(pool, stream, size)
        if not block.mapped:
            self._map(block, min(block.size, size), context)
        while block.size < size:
            beyond = block.next
            assert beyond is not None, "the addresses found hold the whole request"
            self._map(beyond, min(size - block.size, beyond.size), context)
            block = beyond  # it has merged with the block before it
        return block

    def shrink(self, block: Block) -> None:
        """Unmap the whole pages inside a free block, and drop its range when that leaves it empty."""
        self._unmap(block)
        if not block.mapped and not block.is_split:
            block.pool.remove(block)

    def _find(self, pool: BlockPool, stream: int, size: int) -> Block:
        for _, unmapped in pool.unmapped[stream]:
            before = unmapped.prev
            start = before if before is not None and not before.allocated else unmapped
            if _holds(start, size):
                return start
        return self._new_range(pool, stream, size)

    def _new_range(self, pool: BlockPool, stream: int, size: int) -> Block:
        page = SMALL_SEGMENT_BYTES if pool.is_small else self._large_page_bytes
        length = round_up(max(_RANGE_BYTES, size), page)
        address = self._device.new_addresses(length)
        block = Block(address, length, stream, pool, Range(address, length, page))
        block.mapped = False
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int, context: Context) -> None:
        """Back the low end of an unmapped block with all the pages that `size` needs."""
        assert block.range is not None
        mapped_bytes = round_up(size, block.range.page_bytes)
        self._device.take(mapped_bytes)
        pool, address = block.pool, block.address
        pool.remove(block)
        if mapped_bytes < block.size:
            _cut_tail(block, mapped_bytes)
        block.mapped = True
        block.absorb(block.prev)
        block.absorb(block.next)
        pool.insert(block)
        self._history.add(Action.SEGMENT_MAP, address, mapped_bytes, block.stream, context)

    def _unmap(self, block: Block) -> None:
        begin, end = _whole_pages(block)
        if begin >= end:
            return
        pool = block.pool
        pool.remove(block)
        if begin > block.address:
            pool.insert(block.split_off(begin - block.address))
        if end < block.address + block.size:
            pool.insert(_cut_tail(block, end - begin, mapped=True))
        block.mapped = False
        block.absorb(block.prev)
        block.absorb(block.next)
        pool.insert(block)
        self._device.give_back(end - begin)
        self._history.add(Action.SEGMENT_UNMAP, begin, end - begin, block.stream)


def _cut_tail(block: Block, keep: int, *, mapped: bool = False) -> Block:
    """Leave `keep` bytes in the block and put a new one behind it; unmapped ones go to their pool at once."""
    tail = Block(block.address + keep, block.size - keep, block.stream, block.pool, block.range)
    tail.mapped = mapped
    block.size = keep
    tail.link(block, block.next)
    if not mapped:
        block.pool.insert(tail)
    return tail


def _holds(start: Block, size: int) -> bool:
    """Return whether free and unmapped blocks from here on, without a gap, hold `size`."""
    found, block = 0, start
    while found < size and not block.allocated:
        found += block.size
        if block.next is None:
            break
        block = block.next
    return found >= size


def _whole_pages(block: Block) -> tuple[int, int]:
    """Return where the pages that lie completely inside a block begin and end."""
    assert block.range is not None
    page, base = block.range.page_bytes, block.range.address
    begin = base + round_up(block.address - base, page)
    end = base + (block.address + block.size - base) // page * page
    return begin, end
