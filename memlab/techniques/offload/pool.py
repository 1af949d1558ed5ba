"""A pool of bytes off the device that are used again: regions of a file, or of pinned host memory.

Pages of a file that are written for the first time cost ten times as much as pages that are there already, and pinning
host memory costs more still. So the memory of a tensor that is gone is kept for the next one.

Rules:

1. A region is a tensor with a storage of its own, and goes back when that storage dies, however that comes about: its
   graph was used, dropped after an error, or forgotten.
2. Regions are cut from few large slabs, the lowest place that fits first, and neighbours join again when they are free.
   Activations are freed in the reverse order of their making, which leaves no holes.
3. The pool grows by as much as it holds at most, up to `LARGEST_GROWTH_BYTES` or one region that is larger. When
   nothing is in use, slabs go until it holds no more than twice what was in use at most since the last time.
4. A slab on disk is an unlinked file, which nobody but the process can see and nothing outlives. A process that is forked off
   (a worker of a DataLoader) has what lies there to itself, as it has all other memory: it copies that at once (`_Fork`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterator

import torch

from memlab.runtime.lifetimes import Departures, WhileAlive

SMALLEST_GROWTH_BYTES = 2**20
LARGEST_GROWTH_BYTES = 2**28
_ALIGNMENT_BYTES = 512  # as the caching allocator aligns device memory
_GRANULARITY_BYTES = mmap.ALLOCATIONGRANULARITY

Slabs = Callable[[int], memoryview]


def _nothing() -> None:
    pass


def file_slab(size_bytes: int) -> memoryview:
    """Memory that is the content of an unlinked temporary file of its own.

    Args:
        size_bytes: at least so much; rounded up to whole pages.

    Raises:
        OSError: the disk is full. Had nobody asked, the first write to the mapping would kill the process.

    Example:
        >>> len(file_slab(1)) == mmap.ALLOCATIONGRANULARITY
        True

    Known limitations:
        Pages that were written are in the system's page cache until it needs the room, and count there, not as
        memory of the process.
    """
    size_bytes = -(-size_bytes // _GRANULARITY_BYTES) * _GRANULARITY_BYTES
    _fork.listen()
    with tempfile.TemporaryFile(prefix="memlab-") as file:
        _reserve(file.fileno(), size_bytes)
        # the mapping keeps the file open
        return memoryview(mmap.mmap(file.fileno(), size_bytes))


def _reserve(descriptor: int, size_bytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS
        os.truncate(descriptor, size_bytes)
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: offload needs {size_bytes} bytes more in {tempfile.gettempdir()}; make room there, "
            "or set TMPDIR to a folder on a larger disk before Python starts",
        ) from error


class _Slab:
    """Memory, and which ranges of it are free: [start, end), in order, never touching each other."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.size_bytes = len(memory)
        self.free = [(0, self.size_bytes)]

    def used(self) -> Iterator[tuple[int, int]]:
        """Ranges in use: [start, end)."""
        start = 0
        for free_start, free_end in [*self.free, (self.size_bytes, self.size_bytes)]:
            if start < free_start:
                yield start, free_start
            start = free_end

    def take(self, size_bytes: int) -> int | None:
        """The start of a range that is free no longer; None when there is none."""
        for at, (start, end) in enumerate(self.free):
            if end - start >= size_bytes:
                self.free[at : at + 1] = [(start + size_bytes, end)] if end - start > size_bytes else []
                return start
        return None

    def give_back(self, start: int, size_bytes: int) -> None:
        insort(self.free, (start, start + size_bytes))
        at = self.free.index((start, start + size_bytes))
        joined = self.free[max(0, at - 1) : at + 2]
        self.free[max(0, at - 1) : at + 2] = _joined(joined)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged = ranges[:1]
    for start, end in ranges[1:]:
        if start == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


class _Fork:
    """Gives a process that is forked off slabs in files of its own, while the process it comes from waits."""

    _FIXED = 0x10  # MAP_FIXED, at a place where something is mapped already; not in Python's `mmap`

    def __init__(self) -> None:
        self.slabs: weakref.WeakSet[_Slab] = weakref.WeakSet()
        self._is_listening = False
        self._waiting: dict[int, tuple[int, int]] = {}  # by thread: both ends of a pipe

    def listen(self) -> None:
        """Hear of forks from now on."""
        if not self._is_listening and hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)
            self._is_listening = True

    def _mapped(self) -> list[_Slab]:
        return [slab for slab in self.slabs if isinstance(slab.memory.obj, mmap.mmap) and any(slab.used())]

    def _before(self) -> None:
        if self._mapped():
            self._waiting[threading.get_ident()] = os.pipe()

    def _in_parent(self) -> None:
        ends = self._waiting.pop(threading.get_ident(), None)
        if ends is not None:
            reading, writing = ends
            os.close(writing)
            os.read(reading, 1)  # nothing when the child has ended
            os.close(reading)

    def _in_child(self) -> None:
        ends = self._waiting.pop(threading.get_ident(), None)
        self._waiting.clear()
        if ends is None:
            return
        try:
            for slab in self._mapped():
                self._move(slab)
        finally:
            os.close(ends[0])
            os.write(ends[1], b"1")
            os.close(ends[1])

    def _move(self, slab: _Slab) -> None:
        """Have a slab where it is, in a file of its own; in memory of its own where the disk is full."""
        system = ctypes.CDLL(None, use_errno=True)
        system.mmap.restype = ctypes.c_void_p
        system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = ctypes.addressof(ctypes.c_char.from_buffer(slab.memory))
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | self._FIXED
        with tempfile.TemporaryFile(prefix="memlab-") as file:
            descriptor, kept = file.fileno(), []
            try:
                _reserve(descriptor, slab.size_bytes)
                for start, end in slab.used():
                    file.seek(start)
                    file.write(slab.memory[start:end])  # past the pages of a mapping, which would each be asked for
                file.flush()
            except OSError:
                descriptor, flags = -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | self._FIXED
                kept = [(start, bytes(slab.memory[start:end])) for start, end in slab.used()]
            if system.mmap(address, slab.size_bytes, protection, flags, descriptor, 0) != address:
                os._exit(1)  # else it would go on to write into the memory of the process it comes from
        for start, content in kept:
            slab.memory[start : start + len(content)] = content


_fork = _Fork()
# a slab outlives its pool as long as a region of it is alive
_slabs_in_use: WhileAlive[_Slab] = WhileAlive()


class Pool:
    """Regions cut from slabs, and used again.

    Args:
        slabs: makes a slab of at least so many bytes.
        release: called before slabs go.

    Attributes:
        used_bytes: in regions that are alive, rounded to their alignment.
        held_bytes: in all slabs.

    Example:
        >>> pool = Pool(file_slab)
        >>> region = pool.take(1000)
        >>> region.shape, pool.used_bytes, pool.held_bytes
        (torch.Size([1000]), 1024, 1048576)
        >>> address = region.data_ptr()
        >>> del region
        >>> pool.take(500).data_ptr() == address
        True
    """

    def __init__(self, slabs: Slabs, release: Callable[[], None] = _nothing) -> None:
        self._make = slabs
        self._release = release
        self._slabs: list[_Slab] = []
        self._returned: Departures[tuple[_Slab, int, int]] = Departures()
        self._peak_bytes = 0
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        self._take_back()
        return self._used_bytes

    @property
    def held_bytes(self) -> int:
        return sum(slab.size_bytes for slab in self._slabs)

    def take(self, size_bytes: int) -> torch.Tensor:
        """A region, with whatever was in it before: [size_bytes], uint8. Raises `OSError`: the disk is full."""
        self._take_back()
        taken_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        slab, start = self._found(taken_bytes)
        region = torch.frombuffer(slab.memory[start : start + size_bytes], dtype=torch.uint8)
        self._used_bytes += taken_bytes
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        self._returned.watch(region.untyped_storage(), (slab, start, taken_bytes))
        _slabs_in_use.keep(region.untyped_storage(), slab)
        return region

    def _found(self, size_bytes: int) -> tuple[_Slab, int]:
        for slab in self._slabs:
            if (start := slab.take(size_bytes)) is not None:
                return slab, start
        growth_bytes = min(max(self.held_bytes, SMALLEST_GROWTH_BYTES), LARGEST_GROWTH_BYTES)
        slab = _Slab(self._make(max(size_bytes, growth_bytes)))
        _fork.slabs.add(slab)
        # a slab may outlive its pool, together with regions of it
        weakref.finalize(slab, self._release).atexit = False
        self._slabs.append(slab)
        start = slab.take(size_bytes)
        assert start is not None
        return slab, start

    def _take_back(self) -> None:
        for slab, start, size_bytes in self._returned.new():
            slab.give_back(start, size_bytes)
            self._used_bytes -= size_bytes
        if not self._used_bytes and self._peak_bytes:
            self._trim()
            self._peak_bytes = 0

    def _trim(self) -> None:
        """Let slabs go that are not needed for twice the most that was in use."""
        for slab in sorted(self._slabs, key=lambda slab: -slab.size_bytes):
            if self.held_bytes > 2 * self._peak_bytes and self.held_bytes - slab.size_bytes >= self._peak_bytes:
                self._slabs.remove(slab)
