"""Activations off the device between forward and backward.

Tensors that autograd saves go to pinned host memory (beside a GPU) or to a file (beside the CPU) until the backward
pass reads them. Not moved: parameters and buffers, which stay on the device anyway, and tensors too small to be worth
the trip. Tensors that share a storage are stored once. The memory off the device comes from a pool.

Beside a GPU, copies run in streams of their own (`memlab.techniques.offload.transfers`). What leaves is held until it has left,
up to twice the largest tensor saved so far; when backward reads a tensor, the ones saved before it are fetched ahead,
up to twice the largest as well. So the peak is at most four such tensors above that of copies that wait.

Beside the CPU, backward reads the pages of the file in place. They are the system's page cache, which it writes out and
takes back when it needs the room, and which no ledger counts as memory of the process.

Source: `torch.autograd.graph.saved_tensors_hooks`, https://docs.pytorch.org/docs/stable/autograd.html
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.plan import Offloaded, Plan
from memlab.runtime.dispatch import WritesWatch, never_compile
from memlab.runtime.graphs import are_saved_by_hooks_of_the_loop
from memlab.runtime.lazy import as_saved
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.mechanisms import OwnMemory, SeenInCalls
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, ModelCall, Reduces, Traits
from memlab.techniques.offload.spill import Offload, Spill
from memlab.techniques.offload.transfers import Leaving, Ticket, copy_streams_for, copy_streams_of, settle

_SMALLEST_BYTES = 1024
_CALLS_WATCHED = 2  # for writes to what is saved; all of them where there are any
_TENSORS_AHEAD = 2  # of the size of the largest, in each direction
_View = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
# wrapper subclasses keep their data elsewhere
_MOVABLE = (torch.Tensor, FakeTensor)


# --- what one forward pass saved ------------------------------------------------------------------


# part of torch's own error, of `torch.func.grad` and its like
_NO_HOOKS = "support saved tensor hooks"


class _Stored:
    """The bytes of one storage off the device.

    Args:
        passage: of the forward that saved it.
        number: its place among those that forward saved.
        kept: its bytes off the device, [bytes], uint8.
        device: that they come from.
    """

    __slots__ = ("__weakref__", "_fake", "_used", "device", "kept", "number", "passage", "sent")

    def __init__(self, passage: _Passage, number: int, kept: torch.Tensor, device: torch.device) -> None:
        self.passage, self.number, self.kept, self.device = passage, number, kept, device
        self.sent: Any = None  # what says that they have left
        self._used: weakref.ref[torch.UntypedStorage] | None = None
        self._fake: weakref.ref[torch.Tensor] | None = None

    @property
    def is_resident(self) -> bool:
        """Return whether its bytes are on the device, because a tensor made of them is in use."""
        return self._used is not None and self._used() is not None

    @property
    def resident(self) -> torch.Tensor | None:
        """Return its bytes on the device, as long as a tensor made of them is in use."""
        used = None if self._used is None else self._used()
        if used is None or self._fake is None:
            return None if used is None else _bytes_in(used)
        fake = self._fake()
        return None if fake is None else _whole_storage(fake)

    def is_used(self, tensor: torch.Tensor) -> None:
        """A tensor made of its bytes is handed out."""
        # a view does not keep the tensor it was made of, only its storage; that of a fake cannot be seen as a tensor again
        self._used = weakref.ref(tensor.untyped_storage())
        self._fake = weakref.ref(tensor) if isinstance(tensor, FakeTensor) else None


class _Passage:
    """Tensors that one forward pass saved, in their order; kept as long as one of them is, and perhaps read where they lie."""

    def __init__(self, spill: Spill, *, reads_in_place: bool) -> None:
        self._spill, self._reads_in_place = spill, reads_in_place
        self._stored: list[weakref.ref[_Stored]] = []
        self._leaving = Leaving()
        self._arriving: dict[int, Ticket] = {}
        self._arriving_bytes = 0
        self._largest_bytes = 0

    def store(self, source: torch.Tensor) -> _Stored:
        """Send bytes off the device: [bytes], uint8."""
        stored = _Stored(self, len(self._stored), self._spill.empty_like(source), source.device)
        self._stored.append(weakref.ref(stored))
        if self._reads_in_place:
            stored.kept.copy_(source)
            return stored
        self._largest_bytes = max(self._largest_bytes, source.numel())
        self._leaving.retire(self._window_bytes - source.numel())
        ticket = copy_streams_of(source).send(stored.kept, source, reused=True)
        self._leaving.add(ticket)
        stored.sent = ticket.left
        return stored

    def store_again(self, stored: _Stored, source: torch.Tensor) -> None:
        """Send bytes that have been written to since once more."""
        if not self._reads_in_place:
            self._leaving.retire(0)
            settle()
        stored.kept.copy_(source)

    def fetch(self, stored: _Stored) -> torch.Tensor:
        """The bytes again, where the computation can read them."""
        if self._reads_in_place:
            return stored.kept
        here = stored.resident
        if here is None:
            here = self._leaving.take_back(stored.kept)
        if here is None:
            here = self._arrived(stored)
        self._fetch_before(stored.number)
        return here

    @property
    def _window_bytes(self) -> int:
        return _TENSORS_AHEAD * self._largest_bytes

    def _arrived(self, stored: _Stored) -> torch.Tensor:
        if stored.number not in self._arriving:
            return _asked_for(stored).wait()
        self._arriving_bytes -= stored.kept.numel()
        return self._arriving.pop(stored.number).wait()

    def _fetch_before(self, number: int) -> None:
        """Have the tensors on their way that were saved before this one, so are likely to be read next."""
        for earlier in range(number - 1, -1, -1):
            if self._arriving_bytes >= self._window_bytes:
                return
            stored = self._stored[earlier]()
            if stored is None or earlier in self._arriving or self._is_here(stored):
                continue
            if self._arriving_bytes + stored.kept.numel() > self._window_bytes:
                return
            self._arriving[earlier] = _asked_for(stored)
            self._arriving_bytes += stored.kept.numel()

    def _is_here(self, stored: _Stored) -> bool:
        return stored.is_resident or self._leaving.holds(stored.kept)


class _CopiedPassage(_Passage):
    """The same where backward reads copies, which may be under way when the graph goes."""

    def __init__(self, spill: Spill) -> None:
        super().__init__(spill, reads_in_place=False)

    def __del__(self) -> None:
        # a graph that was dropped: its memory must not be given to others while copies run. A Ctrl-C in here is lost;
        # so this class is not the one that a CPU's tensors pass through
        self._leaving.retire(0)
        for ticket in self._arriving.values():
            ticket.wait()


def _asked_for(stored: _Stored) -> Ticket:
    target = torch.empty_like(stored.kept, device=stored.device)
    return copy_streams_for(stored.kept, stored.device).fetch(target, stored.kept, after=stored.sent)


@dataclass(frozen=True)
class _Parked:
    """A saved tensor off the device: its bytes, and how to see them as the tensor again."""

    stored: _Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int

    def bring_back(self) -> torch.Tensor:
        resident = self.stored.passage.fetch(self.stored)
        tensor = resident.view(self.dtype).as_strided(self.size, self.stride, self.storage_offset)
        self.stored.is_used(tensor)
        return tensor


class _Packing:
    """The hook that sends away what one forward pass saves, but for storages that stay."""

    def __init__(self, passage: _Passage, staying: set[int]) -> None:
        self._passage, self._staying = passage, staying
        # one table per forward: an address may be used anew by another tensor later
        self._seen: dict[tuple[int, int], _Seen] = {}
        self.writes_later = False  # whether something that it saved was written to afterwards
        self._alone: list[tuple[weakref.ref[torch.UntypedStorage], _View, weakref.ref[_Stored]]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | _Parked:
        if type(tensor) not in _MOVABLE or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            return as_saved(tensor)
        storage = tensor.untyped_storage()
        storage_bytes = storage.nbytes()
        if storage_bytes < _SMALLEST_BYTES or storage._cdata in self._staying:
            return as_saved(tensor)
        # a small view of a large storage is stored alone; copied, as what has not left yet is taken back with its storage
        if storage_bytes > 2 * tensor.nbytes:
            # its dimensions in the order they lie in, by which kernels choose how to sum
            copied = tensor.detach().clone()
            alone = self._passage.store(_whole_storage(copied))
            view = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
            self._alone.append((weakref.ref(storage), view, weakref.ref(alone)))
            return _Parked(alone, tensor.dtype, tensor.shape, copied.stride(), 0)
        stored = self._stored_whole(tensor, storage)
        return _Parked(stored, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def is_written(self, tensor: torch.Tensor) -> None:
        """Send what is written to after it was saved once more.

        Writes through `.data` count no version, and backward reads what they have written. Where the version counts them, torch
        lets nothing read what was saved before.
        """
        storage = tensor.untyped_storage()
        again = [
            (seen.stored(), _bytes_in(storage))
            for (key, _), seen in self._seen.items()
            if key == storage._cdata and seen.storage()
        ]
        for there, (dtype, *view), alone in self._alone:
            whole = there()
            if whole is not None and whole._cdata == storage._cdata:
                part = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *view)
                again.append((alone(), _bytes_in(part.clone().untyped_storage())))
        for stored, source in again:
            if stored is not None:
                self.writes_later = True
                self._passage.store_again(stored, source)

    def _stored_whole(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Stored:
        """The whole storage of a tensor, off the device."""
        key, first, last = (storage._cdata, tensor._version), *_range(tensor)
        seen = self._seen.get(key)
        stored = None if seen is None else seen.stored_for(first, last)
        if stored is None:
            stored = self._passage.store(_whole_storage(tensor))
            self._seen[key] = _Seen(weakref.ref(storage), weakref.ref(stored), first, last)
        return stored


@dataclass(frozen=True)
class _Seen:
    """A storage that was stored when a tensor over these of its elements was saved.

    Parts of one storage may count their versions apart (`unsafe_chunk`), and be written at other times. What lies
    outside the saved part is therefore not known to be what it was.
    """

    storage: weakref.ref[torch.UntypedStorage]
    stored: weakref.ref[_Stored]
    first: int
    last: int

    def stored_for(self, first: int, last: int) -> _Stored | None:
        """Return what was stored, if it serves a tensor over these elements."""
        is_within = self.first <= first and last <= self.last
        return self.stored() if is_within and self.storage() is not None else None


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last byte of a tensor in its storage."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return first, first + tensor.numel() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + (sum((length - 1) * stride for length, stride in steps) + 1) * size


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes behind a tensor, as uint8: [storage bytes]."""
    storage = tensor.untyped_storage()
    if isinstance(tensor, FakeTensor):  # a fake storage fits no other tensor
        elements = storage.nbytes() // tensor.element_size()
        return tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
    return _bytes_in(storage)


def _bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# where torch's compiler leaves out the model's own frame, it would take those of hooks for the model
never_compile(_Packing.__call__)


@never_compile
def _unpack(saved: torch.Tensor | _Parked) -> torch.Tensor:
    return saved.bring_back() if isinstance(saved, _Parked) else saved


# --- the technique --------------------------------------------------------------------------------


class OffloadActivations(Offload, SeenInCalls, OwnMemory):
    """Keep saved activations in host memory or in a file until the backward pass needs them.

    Known limitations:
        From a GPU to disk copies are not overlapped: files are not pinned. A saved tensor that is written to before
        backward reads it goes unnoticed, where torch without this would raise an error.
    """

    what = Offloaded.ACTIVATIONS
    traits = Traits(Reduces.ACTIVATIONS)
    descriptions = (
        Description(
            flags="--offload activations",
            saves="activations between forward and backward pass",
            costs="they are copied both ways once a step",
            exactness="bit for bit",
            gives_nothing="together with --checkpoint, when the peak is in a block that is recomputed; small tensors stay",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._model: nn.Module | None = None
        self.spill: Spill | None = None
        self._reads_in_place = self._is_twin = False
        self._calls, self._writes_later = 0, False  # whether activations are written to once they were saved

    def check(self, workload: Workload) -> None:
        self._tier(workload.device)

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._model = workload.model
        self.spill = Spill(self._tier(workload.device), pooled=True, say=self.notes.once)
        self._reads_in_place = workload.device.type == "cpu"
        self._is_twin = not workload.has_values
        undo.callback(self._forget_pool)

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._model is None or self.spill is None:
            return call(*args, **kwargs)  # run again by a backward pass that comes when the plan has gone
        if are_saved_by_hooks_of_the_loop():  # of several hooks torch calls the newest alone
            self.notes.once(
                "activations stay where a call is within hooks of the loop's own on what is saved for backward"
            )
            return call(*args, **kwargs)
        staying = {
            storage_of(tensor) for tensors in (self._model.parameters(), self._model.buffers()) for tensor in tensors
        }
        in_place = self._reads_in_place
        passage = _Passage(self.spill, reads_in_place=True) if in_place else _CopiedPassage(self.spill)
        packing = _Packing(passage, staying)
        watched = not self._is_twin and (self._writes_later or self._calls < _CALLS_WATCHED)
        watching = WritesWatch(packing.is_written) if watched else nullcontext()
        try:
            with torch.autograd.graph.saved_tensors_hooks(packing, _unpack), watching:
                output = call(*args, **kwargs)
        except RuntimeError as error:
            if _NO_HOOKS not in str(error):
                raise
            raise RefusalError(
                self.field,
                f"{type(self._model).__name__} differentiates by torch.func in its forward pass, where torch lets nobody move what "
                "is saved",
                "use --checkpoint",
            ) from None
        self._calls += 1
        self._writes_later |= packing.writes_later
        return output

    def trial_over(self) -> None:
        if self.spill is not None and self._model is not None:
            self.spill = Spill(self.spill.tier, pooled=True, say=self.notes.once)

    @property
    def host_bytes(self) -> int:
        return self.spill.peak_bytes if self.spill else 0

    def _forget_pool(self) -> None:
        """Forget the pool: what is in use keeps its memory until it dies."""
        settle()
        self._model = self.spill = None
