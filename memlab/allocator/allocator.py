"""`Allocator`: torch's CUDA caching allocator on a device without a limit, simulated.

How a request is served (`DeviceCachingAllocator::malloc` in c10/cuda/CUDACachingAllocator.cpp):

1. The smallest free block of its stream and pool that holds it; not one above the split limit for a request
   below it, nor one much larger than a request above it.
2. A new segment from the driver, or new pages of an expandable one.

What is left of a block beyond the request is split off where it is large enough to be worth it, from 512 bytes
in the small pool and in expandable segments, above 1 MiB in the large pool; otherwise it counts as allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from memlab.allocator.blocks import Block, BlockPool, DeviceMemory, MemorySegment, segments_of
from memlab.allocator.expandable import ExpandableSegments
from memlab.allocator.history import NO_CONTEXT, Action, Context, Entry, EventHistory
from memlab.allocator.settings import Settings
from memlab.allocator.sizes import SMALL_BLOCK_BYTES, round_size, segment_size
from memlab.errors import MemlabError

# sizes with addresses of all that is free, and the address of the next segment
Free = tuple[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Change:
    """Difference that births of large blocks, and deaths among these, make to an allocator."""

    free: Free  # what is free afterwards
    born: tuple[tuple[int, int, int], ...]  # address, size and requested bytes of each block that stays in use
    taken_bytes: int  # from the driver
    most_bytes: int  # that were allocated at once, above what was before


class Allocator:
    """Serves requests for bytes as torch would on a CUDA device, and counts as torch counts.

    Known limitations: a device has as much as it is asked for, so that nothing is given back for want of memory. Memory
    used on several streams at once (`record_stream`), private pools of CUDA graphs and memory shared between processes
    are not simulated. Addresses are never used twice.

    Example:
        >>> allocator = Allocator()
        >>> block = allocator.malloc(12_000_000)
        >>> block.size, allocator.allocated_bytes  # the rest of its segment is too small to split off
        (12582912, 12582912)
        >>> allocator.free(block)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (0, 12582912)
    """

    def __init__(
        self,
        settings: Settings | None = None,  # torch's defaults when left out
        *,
        history: bool = False,  # whether to keep every step for `memlab.allocator.memory_viz`
    ) -> None:
        self.settings = settings or Settings()
        self.allocated_bytes = 0  # of the blocks in use
        self.peak_allocated_bytes = 0  # the most there were, as `torch.cuda.max_memory_allocated` says it
        self._device = DeviceMemory()
        self._expandable = self.settings.expandable_segments
        self._small, self._large = (BlockPool(is_small=each, is_expandable=self._expandable) for each in (True, False))
        self._history = EventHistory(history)
        self._ranges = ExpandableSegments(self._device, self.settings.large_segment_bytes, self._history)
        self._active: dict[int, Block] = {}
        # looked up once: these are read on every request
        self._divisions = self.settings.roundup_power2_divisions
        self._max_split = self.settings.max_split_bytes
        self._block_bytes: dict[int, int] = {}  # by bytes requested
        self._changed: Free | None = None  # what is free, where blocks do not say so yet

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver, in use or not."""
        return self._device.used_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes held from the driver, as `torch.cuda.max_memory_reserved` says it."""
        return self._device.peak_bytes

    @property
    def free_memory(self) -> Free:
        """Large blocks that are free for the default stream, which decide of what large requests and their deaths do."""
        return self._changed or (self._large.entries(), self._device.next_address)

    def change(self, change: Change) -> list[Block]:
        """Do what was done to an allocator with the same free memory; return the blocks that stay in use, in order."""
        blocks = []
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes + change.most_bytes)
        for address, size, requested in change.born:
            block = self._active[address] = Block(address, size, 0, self._large)
            block.allocated, block.requested = True, requested
            self.allocated_bytes += size
            blocks.append(block)
        self._device.take(change.taken_bytes)
        self._changed = change.free
        return blocks

    def _catch_up(self) -> None:
        """Have blocks say what is free after a change: not before that is asked, as another may follow."""
        assert self._changed is not None
        entries, self._device.next_address = self._changed
        self._changed = None
        self._large.refill(entries, [block for block in self._active.values() if block.pool is self._large])

    def malloc(self, size: int, stream: int = 0, context: Context = NO_CONTEXT) -> Block:
        if self._changed is not None:
            self._catch_up()
        rounded = self._block_bytes.get(size)
        if rounded is None:
            if size < 1:
                raise MemlabError(f"malloc({size}): expected 1 byte or more; torch never asks its allocator for less")
            rounded = self._block_bytes[size] = round_size(size, self._divisions)
        pool = self._small if rounded <= SMALL_BLOCK_BYTES else self._large
        is_unsplit = rounded >= self._max_split
        limit = rounded + self.settings.unsplit_slack_bytes if is_unsplit else self._max_split
        block = pool.take_best(rounded, stream, limit)
        if block is None:
            block = self._fresh(pool, rounded, stream, context)
        # what is left of it is split off where it is worth it; the program gets the low end
        if block.size - rounded >= pool.least_rest_bytes and not (is_unsplit and pool.keeps_large):
            rest, block = block, block.split_off(rounded)
            pool.insert(rest)
        block.allocated, block.requested, block.context = True, size, context
        self._active[block.address] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:  # noqa: PLR1730, RUF100 - max() costs a call, millions of times
            self.peak_allocated_bytes = self.allocated_bytes
        if self._history.on:
            self._history.add(Action.ALLOC, block.address, size, stream, context)
        return block

    def free(self, block: Block) -> None:
        """Free a block: it merges with free neighbours and stays cached.

        Raises:
            MemlabError: the block is not in use.
        """
        if self._changed is not None:
            self._catch_up()
        if self._active.get(block.address) is not block:
            raise MemlabError(
                f"free({block}): not in use; each block is freed once, by the allocator that handed it out"
            )
        del self._active[block.address]
        if self._history.on:
            for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
                self._history.add(action, block.address, block.requested, block.stream, block.context)
        self.allocated_bytes -= block.size
        block.allocated, block.requested, block.context = False, 0, NO_CONTEXT
        # asked here as well: a call costs more than the question
        if (other := block.prev) is not None and not other.allocated:
            block.absorb(other)
        if (other := block.next) is not None and not other.allocated:
            block.absorb(other)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give back every segment, and every page of an expandable one, of which nothing is in use."""
        if self._changed is not None:
            self._catch_up()
        for pool in (self._large, self._small):
            for block in list(pool.free_blocks()):
                if block.range is not None:
                    self._ranges.shrink(block)
                elif not block.is_split:
                    block.pool.remove(block)
                    self._device.give_back(block.size)
                    self._history.add(Action.SEGMENT_FREE, block.address, block.size, block.stream)

    def reset_peaks(self) -> None:
        """Let peaks start from what there is now, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_allocated_bytes, self._device.peak_bytes = self.allocated_bytes, self.reserved_bytes

    def snapshot(self) -> tuple[MemorySegment, ...]:
        """Every segment with its blocks, by address; of an expandable one, every stretch that is mapped."""
        if self._changed is not None:
            self._catch_up()
        free = (block for pool in (self._small, self._large) for block in pool.free_blocks())
        return segments_of([*self._active.values(), *free])

    @property
    def history(self) -> tuple[Entry, ...]:
        """Return what happened, when the allocator keeps a history."""
        return tuple(self._history.entries)

    def set_time(self, seconds: float) -> None:
        """Say what time it is, for the history."""
        self._history.seconds = seconds

    def _fresh(self, pool: BlockPool, size: int, stream: int, context: Context) -> Block:
        """A block of new memory, which no pool has."""
        if self._expandable:
            block = self._ranges.grow(pool, stream, size, context)
            pool.remove(block)
            return block
        size = segment_size(size, self.settings.large_segment_bytes)
        self._device.take(size)
        block = Block(self._device.new_addresses(size), size, stream, pool)
        self._history.add(Action.SEGMENT_ALLOC, block.address, size, stream, context)
        return block
