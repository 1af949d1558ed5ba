"""`Allocator`: torch's CUDA caching allocator, simulated.

How a request is served (`DeviceCachingAllocator::malloc` in c10/cuda/CUDACachingAllocator.cpp):

1. The smallest free block of its stream and pool that holds it; not one above the split limit for a request
   below it, nor one much larger than a request above it.
2. With a garbage collection threshold and a memory fraction: idle segments older than the average are freed.
3. A new segment from the driver, or new pages of an expandable one.
4. With a split limit: enough unsplit blocks above it are freed, and the driver is asked again.
5. Every segment that is free as a whole is given back, in both pools, and the driver is asked once more
   (`num_alloc_retries`). So a peak of reserved bytes below the capacity does not mean that the first attempt fitted.
6. Out of memory (`num_ooms`).

What is left of a block beyond the request is split off where it is large enough to be worth it, from 512 bytes
in the small pool and in expandable segments, above 1 MiB in the large pool; otherwise it counts as allocated.
"""

from __future__ import annotations

from collections.abc import Iterable

from memlab.allocator.blocks import Block, BlockPool, DeviceMemory, MemorySegment, segments_of
from memlab.allocator.expandable import ExpandableSegments
from memlab.allocator.history import NO_CONTEXT, Action, Context, Entry, Event, EventHistory
from memlab.allocator.settings import Settings
from memlab.allocator.sizes import MIN_BLOCK_BYTES, SMALL_BLOCK_BYTES, UNLIMITED_BYTES, round_size, segment_size
from memlab.allocator.statistics import Counters, DoesNotFitError, OutOfMemory, PoolStatistics, Statistics, values_of
from memlab.errors import MemlabError


class Allocator:
    """Serves requests for bytes as torch would on a CUDA device, and counts as torch counts.

    It is long because a request goes through torch's own steps in torch's order (cached block, driver, collection,
    splitting), each of which changes the same pools and counters.

    Known limitations: memory used on several streams at once (`record_stream`), private pools of CUDA graphs
    and memory shared between processes are not simulated. Addresses are never used twice.

    Example:
        >>> allocator = Allocator(capacity_bytes=64 * 2**20)
        >>> block = allocator.malloc(12_000_000)
        >>> block.size, allocator.stats().allocated_bytes  # the rest of its segment is too small to split off
        (12582912, 12582912)
        >>> allocator.free(block)
        >>> allocator.stats().allocated_bytes, allocator.stats().reserved_bytes
        (0, 12582912)
    """

    def __init__(
        self,
        settings: Settings | None = None,  # as parsed from PYTORCH_ALLOC_CONF; torch's defaults when left out
        capacity_bytes: int | None = None,  # what the driver can give, None for no limit
        *,
        # all memory of the device, of which a memory fraction is a share; the capacity when left out
        device_bytes: int | None = None,
        history: bool = False,  # whether to keep every step for `memlab.allocator.memory_viz`
    ) -> None:
        _check_positive("capacity_bytes", capacity_bytes)
        _check_positive("device_bytes", device_bytes)
        self.settings = settings or Settings()
        self._device = DeviceMemory(capacity_bytes, device_bytes)
        self._allowed = _allowed_bytes(self.settings, capacity_bytes, device_bytes)
        self._counters = Counters()
        self._meters = {"all": PoolStatistics(), "small_pool": PoolStatistics(), "large_pool": PoolStatistics()}
        self._small = BlockPool(is_small=True, meters=(self._meters["all"], self._meters["small_pool"]))
        self._large = BlockPool(is_small=False, meters=(self._meters["all"], self._meters["large_pool"]))
        self._history = EventHistory(history)
        self._ranges = ExpandableSegments(
            self._device, self.settings.large_segment_bytes, self._counters, self._history
        )
        self._active: dict[int, Block] = {}
        self._storages: dict[int, Block] = {}
        # looked up once: these are read on every request
        self._expandable = self.settings.expandable_segments
        self._divisions = self.settings.roundup_power2_divisions
        self._max_split = self.settings.max_split_bytes
        self._collects = self._allowed is not None and self.settings.garbage_collection_threshold > 0

    def malloc(self, size: int, stream: int = 0, context: Context = NO_CONTEXT) -> Block:
        """Allocate. Raises `DoesNotFitError`: there is no room, even with the cache given back."""
        if size < 1:
            raise MemlabError(f"malloc({size}): expected 1 byte or more; torch never asks its allocator for less")
        rounded = round_size(size, self._divisions)
        pool = self._small if rounded <= SMALL_BLOCK_BYTES else self._large
        block = self._cached(pool, rounded, stream)
        if block is None:
            block = self._fresh(pool, rounded, stream, size, context)
        return self._hand_out(block, rounded, size, context)

    def free(self, block: Block) -> None:
        """Free a block: it merges with free neighbours and stays cached.

        Raises:
            MemlabError: the block is not in use.
        """
        if self._active.get(block.address) is not block:
            raise MemlabError(
                f"free({block}): not in use; each block is freed once, by the allocator that handed it out"
            )
        del self._active[block.address]
        for action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            self._history.add(action, block.address, block.requested, block.stream, block.context)
        size, requested, pool = block.size, block.requested, block.pool
        block.allocated, block.requested, block.context = False, 0, NO_CONTEXT
        absorbed = [merged for merged in (block.absorb(block.prev), block.absorb(block.next)) if merged]
        pool.insert(block)
        for meter in pool.meters:
            meter.take_back(size, requested)
        if size >= self._max_split:
            self._counters.oversize_allocations.remove(1)
        # idle parts of expandable segments are not counted: whole pages of them can always be given back
        if not self._expandable:
            self._count_idle(block, absorbed)

    def empty_cache(self) -> None:
        """Give back every segment, and every page of an expandable one, of which nothing is in use."""
        self._counters.num_sync_all_streams += 1
        for pool in (self._large, self._small):
            for block in list(pool.free_blocks()):
                if block.range is not None:
                    self._ranges.shrink(block)
                elif not block.is_split:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Let peaks start from what there is now, as `torch.cuda.reset_peak_memory_stats` does."""
        for meter in self._meters.values():
            for _, stat in meter.stats():
                stat.peak = stat.current

    def replay(self, events: Iterable[Event]) -> Statistics:
        """Serve what a program asked for, in order, up to its end or to the first request that does not fit.

        Storages stay alive from one replay to the next: a second one continues where the first one ended.

        Returns:
            The numbers after the last event, with what did not fit when something did not.

        Raises:
            MemlabError: a storage born while it is alive, or freed while it is not.

        Example:
            >>> events = [Event(1, 2**20), Event(2, 3 * 2**20), Event(1, -(2**20))]
            >>> statistics = Allocator().replay(events)
            >>> statistics.peak_allocated_bytes, statistics.allocated_bytes, statistics.peak_reserved_bytes
            (4194304, 3145728, 23068672)
        """
        for event in events:
            self.set_time(event.seconds)
            try:
                self._serve(event)
            except DoesNotFitError as error:
                return self.stats(error.out_of_memory)
        return self.stats()

    def stats(self, out_of_memory: OutOfMemory | None = None) -> Statistics:
        """The numbers `torch.cuda.memory_stats` would show."""
        return Statistics(values_of(self._meters, self._counters, self._max_split), out_of_memory)

    def snapshot(self) -> tuple[MemorySegment, ...]:
        """Every segment with its blocks, by address; of an expandable one, every stretch that is mapped."""
        free = (block for pool in (self._small, self._large) for block in pool.free_blocks())
        return segments_of([*self._active.values(), *free])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return self._meters["all"].allocated_bytes.current

    @property
    def history(self) -> tuple[Entry, ...]:
        """Return what happened, when the allocator keeps a history."""
        return tuple(self._history.entries)

    def set_time(self, seconds: float) -> None:
        """Say what time it is, for the history."""
        self._history.seconds = seconds

    def _serve(self, event: Event) -> None:
        if event.size_bytes > 0:
            if event.storage in self._storages:
                raise MemlabError(f"replay: storage {event.storage} is born a second time; free it first")
            self._storages[event.storage] = self.malloc(event.size_bytes, event.stream, event.context)
        elif event.size_bytes < 0:
            if event.storage not in self._storages:
                raise MemlabError(f"replay: storage {event.storage} is freed but not alive; its birth must come first")
            self.free(self._storages.pop(event.storage))

    def _cached(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        if self._collects:
            pool.lookups += 1
        block = pool.best_fit(size, stream)
        if block is None or (self._max_split != UNLIMITED_BYTES and not self._may_serve(block, size)):
            return None
        return block

    def _may_serve(self, block: Block, size: int) -> bool:
        if size < self._max_split:
            return block.size < self._max_split
        return block.size < size + self.settings.unsplit_slack_bytes

    def _fresh(self, pool: BlockPool, size: int, stream: int, requested: int, context: Context) -> Block:
        if self._collects:
            self._collect_garbage()
        block = self._ask_driver(pool, size, stream, context)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._ask_driver(pool, size, stream, context)
        if block is None:
            self.empty_cache()
            self._counters.num_alloc_retries += 1
            block = self._ask_driver(pool, size, stream, context)
        if block is None:
            raise DoesNotFitError(self._out_of_memory(size, stream, requested, context))
        return block

    def _ask_driver(self, pool: BlockPool, size: int, stream: int, context: Context) -> Block | None:
        wanted = segment_size(size, self.settings.large_segment_bytes)
        # torch compares with the size of a segment also where only pages would be mapped (`alloc_block`)
        if self._allowed is not None and self._device.used_bytes + wanted > self._allowed:
            return None
        if self._expandable:
            return self._ranges.grow(pool, stream, size, context)
        return self._new_segment(pool, wanted, stream, context)

    def _new_segment(self, pool: BlockPool, size: int, stream: int, context: Context) -> Block | None:
        if not self._device.take(size):
            return None
        block = Block(self._device.new_addresses(size), size, stream, pool)
        pool.insert(block)
        for meter in pool.meters:
            meter.segment.add(1)
            meter.reserved_bytes.add(size)
        if size >= self._max_split:
            self._counters.oversize_segments.add(1)
        self._counters.num_device_alloc += 1
        self._history.add(Action.SEGMENT_ALLOC, block.address, size, stream, context)
        return block

    def _hand_out(self, block: Block, size: int, requested: int, context: Context) -> Block:
        """Take a free block out of its pool, split off what is left of it, and give it to the program."""
        pool, was_split = block.pool, block.is_split
        pool.remove(block)
        if self._should_split(block, size):
            rest, block = block, block.split_off(size)
            pool.insert(rest)
            idle = (0, -size) if was_split else (1, rest.size)
        else:
            idle = (-1, -block.size) if was_split else (0, 0)
        block.allocated, block.requested, block.context = True, requested, context
        self._active[block.address] = block
        for meter in pool.meters:
            meter.hand_out(block.size, requested)
            if not self._expandable:
                meter.change_idle(*idle)
        if block.size >= self._max_split:
            self._counters.oversize_allocations.add(1)
        self._history.add(Action.ALLOC, block.address, requested, block.stream, context)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if self._expandable or block.pool.is_small:
            return rest >= MIN_BLOCK_BYTES
        return size < self._max_split and rest > SMALL_BLOCK_BYTES

    def _count_idle(self, block: Block, absorbed: list[int]) -> None:
        blocks, size = -len(absorbed), -sum(absorbed)
        if block.is_split:
            blocks, size = blocks + 1, size + block.size
        for meter in block.pool.meters:
            meter.change_idle(blocks, size)

    def _release(self, block: Block) -> None:
        """Give a segment that is free as a whole back to the driver."""
        block.pool.remove(block)
        self._device.give_back(block.size)
        for meter in block.pool.meters:
            meter.segment.remove(1)
            meter.reserved_bytes.remove(block.size)
        if block.size >= self._max_split:
            self._counters.oversize_segments.remove(1)
        self._counters.num_device_free += 1
        self._history.add(Action.SEGMENT_FREE, block.address, block.size, block.stream)

    def _release_oversize(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Free blocks above the split limit, enough for the request (`release_available_cached_blocks`)."""
        if self._max_split == UNLIMITED_BYTES:
            return False
        wanted = max(size, self._max_split)
        oversize = [block for block_size, _, block in pool.free_on(stream) if block_size >= self._max_split]
        oversize = [block for block in oversize if block.range is None]
        large_enough = [block for block in oversize if block.size >= wanted]
        if large_enough:
            self._release(large_enough[0])
            return True
        released = 0
        while oversize and released < wanted:
            released += oversize[-1].size
            self._release(oversize.pop())
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Free idle segments of the large pool, the oldest first (`garbage_collect_cached_blocks`).

        The age of a segment is the number of requests to its pool since it was last used.
        """
        assert self._allowed is not None
        target = self._device.used_bytes - int(self.settings.garbage_collection_threshold * self._allowed)
        idle = [block for block in self._large.free_blocks() if not block.is_split and block.range is None]
        while target > 0 and idle:
            ages = [self._large.lookups - block.lookups_before for block in idle]
            average = sum(ages) / len(ages)
            target -= sum(block.size for block, age in zip(idle, ages, strict=True) if age >= average)
            idle = self._release_older(idle, average)

    def _release_older(self, idle: list[Block], average: float) -> list[Block]:
        """Free the blocks of at least average age, past the target too, so that this does not come up often."""
        younger = []
        for block in idle:
            if self._large.lookups - block.lookups_before >= average:
                self._release(block)
            else:
                younger.append(block)
        return younger

    def _out_of_memory(self, size: int, stream: int, requested: int, context: Context) -> OutOfMemory:
        self._counters.num_ooms += 1
        self._history.add(Action.OOM, self._device.free_bytes, size, stream, context)
        return OutOfMemory(
            requested_bytes=requested,
            attempted_bytes=segment_size(size, self.settings.large_segment_bytes),
            allocated_bytes=self._meters["all"].allocated_bytes.current,
            reserved_bytes=self._device.used_bytes,
            capacity_bytes=self._device.capacity_bytes,
            allowed_bytes=self._allowed,
        )


def _check_positive(name: str, size: int | None) -> None:
    if size is not None and size < 1:
        raise MemlabError(f"{name}={size}: expected 1 byte or more, or None for no limit")


def _allowed_bytes(settings: Settings, capacity_bytes: int | None, device_bytes: int | None) -> int | None:
    """Return what a memory fraction below 1 permits; None without one, or on a device without a limit."""
    total = device_bytes or capacity_bytes
    if settings.per_process_memory_fraction >= 1 or total is None:
        return None
    return int(settings.per_process_memory_fraction * total)
