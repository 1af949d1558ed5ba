"""Parameters of blocks: at rest off the device, on it for as long as something uses them.

Numbered rules of the mechanism:

1. *At rest* a parameter's data is a spilled tensor with the parameter's own values, so that whoever reads it between
   uses (a checkpoint, an average of weights, a norm) reads what is true.
2. *In a block's forward* copies on the device are the data of whatever parameter objects are in place, originals or
   aliases; afterwards the spilled tensors are, again. Other tensors that are in place are left alone.
3. *What autograd saves* of such a copy (the weight, its transpose) is kept as a note of what it was. The operator that
   needs it in the backward pass gets a copy made then, which goes with it: of a block that is not recomputed, one
   weight is on the device at a time. Anything else that is saved is handed to the hooks that are there already.
4. *Hooks* surround a block's forward, whatever stands in for it. A recomputation runs the forward past them, and
   uses the block by itself (`_modules.in_use`).
5. On CUDA the next block's parameters are copied beside the present one's computations, and in the backward pass the
   weights saved before; on the CPU there is nothing to overlap.

Casts made by autocast are not the parameters' own storage; `_Casts` makes those of products itself, so that they too
are kept as notes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

from memlab.runtime.accelerator import has_streams
from memlab.runtime.aliases import is_in_shared_memory
from memlab.runtime.autocast import without_cached_casts
from memlab.runtime.backward import is_in_backward
from memlab.runtime.callers import handed_over
from memlab.runtime.dispatch import WritesWatch
from memlab.runtime.graphs import is_transformed, why_as_written
from memlab.runtime.homes import rests
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.lazy import as_saved
from memlab.runtime.lifetimes import WhileAlive, is_shared, storage_of
from memlab.runtime.stand_ins import keep_out_of_copies
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.runtime.touch import own_class
from memlab.techniques.offload.spill import PLAIN, Spill, is_dense, is_spilled
from memlab.techniques.offload.transfers import CopyStreams, SideStreams, Ticket

_Slot = tuple[nn.Module, str]


# --- copies ---------------------------------------------------------------------------------------


class ParameterCopies:
    """Copies between a device and where parameters rest, in streams of their own: their tickets may be dropped at any time.

    Example:
        >>> stored = torch.arange(3.0)
        >>> ParameterCopies(stored.device).fetch(stored).wait()
        tensor([0., 1., 2.])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.overlaps = has_streams(device)  # whether copies run beside computations
        self._streams = SideStreams(device) if self.overlaps else CopyStreams()
        # by the storage it goes to, what says that a copy is done that was sent since all was settled
        self._sent: dict[int, Any] = {}

    def fetch(self, stored: torch.Tensor) -> Ticket:
        """Begin to copy to the device what is at rest, or on its way there."""
        # an inference tensor could not take a parameter's version counter
        with torch.inference_mode(False):
            target = stored.new_empty_strided(stored.shape, stored.stride(), device=self.device)
            ticket = self._streams.fetch(target, stored, after=self._sent.get(storage_of(stored)))
        self._streams.release(ticket)
        return ticket

    def send(self, tensor: torch.Tensor, stored: torch.Tensor) -> None:
        """Begin to copy off the device; what was stored may be read after `settle`."""
        with torch.inference_mode(False):
            ticket = self._streams.send(stored, tensor)
        self._streams.release(ticket)
        self._sent[storage_of(stored)] = ticket.left

    def settle(self) -> None:
        """Wait until nothing at rest is read or written any more."""
        self._streams.settle()
        self._sent.clear()


def fills_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether nothing else is in a tensor's storage."""
    return is_dense(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes


def can_rest(parameter: nn.Parameter, device: torch.device) -> bool:
    """Return whether a parameter of a device is large enough to leave it, plain, and alone in its storage."""
    return (
        own_class(parameter) in PLAIN
        and parameter.layout is torch.strided
        and parameter.numel() >= SMALL_ELEMENTS
        and parameter.device == device
        and not is_in_shared_memory(parameter)
        and fills_its_storage(parameter)
    )


# --- what rests, and what of it is in use -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Guest:
    """A parameter whose copy is on the device for a while."""

    parameter: nn.Parameter
    stored: torch.Tensor  # its values at rest
    copy: torch.Tensor
    version: int

    def leave(self, *, was_written: bool) -> None:
        parameter, stored = self.parameter, self.stored
        if storage_of(parameter) != storage_of(self.copy):
            return  # the model has put other data there
        with torch.inference_mode(False), torch.no_grad():
            if was_written or (not parameter.is_inference() and parameter._version != self.version):
                stored.copy_(self.copy)  # the forward has changed it
            parameter.data = stored


@dataclass(frozen=True, slots=True)
class _Known:
    """The parameter whose values a storage on the device holds."""

    stored: torch.Tensor  # the same at rest
    dtype: torch.dtype


class _Saved:
    """Note of what autograd saved of a copy: the parameter, and the view of it."""

    __slots__ = ("__weakref__", "_dtype", "_geometry", "arrival", "previous", "stored")

    def __init__(self, stored: torch.Tensor, tensor: torch.Tensor, previous: Callable[[], _Saved | None]) -> None:
        self.stored = stored
        self._dtype = tensor.dtype
        self.previous = previous  # saved before, and needed after
        self.arrival: Ticket | None = None
        self._geometry = tensor.size(), tensor.stride(), tensor.storage_offset()

    def restored(self, link: ParameterCopies) -> torch.Tensor:
        arrival, self.arrival = self.arrival or link.fetch(self.stored), None
        copy = arrival.wait()
        with torch.no_grad():
            return copy.to(self._dtype).as_strided(*self._geometry)


class BlockStreaming:
    """Streams the parameters of blocks.

    Example:
        >>> from memlab.plan import Tier
        >>> block, streaming = nn.Linear(2, 2), None
        >>> streaming = BlockStreaming([block], ParameterCopies(block.weight.device), Spill(Tier.DISK))
        >>> streaming.send_away(block.weight)
        >>> resting = block.weight.data_ptr()
        >>> with streaming.in_use(block):
        ...     block.weight.data_ptr() == resting
        False
        >>> block.weight.data_ptr() == resting
        True
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],  # in the order in which a forward pass runs them
        link: ParameterCopies,  # to the device they are used on
        spill: Spill,  # where they rest
        # called with each parameter that a block uses while gradients are recorded
        on_use: Callable[[nn.Parameter], None] = lambda _parameter: None,
        # further modules that are used by themselves, which nothing is fetched ahead for; each with where it has parameters
        others: Sequence[tuple[nn.Module, Sequence[_Slot]]] = (),
    ) -> None:
        self.link, self.spill = link, spill
        # called at the end of a backward pass that `settles_after_backward` was told of
        self.backward_ended: Callable[[], None] = _nothing
        self.on_use = on_use
        # called with parameters that are about to be used on the device, and that are at rest again
        self.arrived: Callable[[Sequence[nn.Parameter]], None] = _let_be
        self.left: Callable[[Sequence[nn.Parameter]], None] = _let_be
        self._slots = {id(block): list(slots_of(block)) for block in blocks} | {id(m): [*slots] for m, slots in others}
        self._places = {id(block): place for place, block in enumerate(blocks)}
        self._blocks = list(blocks)
        self._at_rest: dict[int, torch.Tensor] = {}  # by the storage at rest
        self._copies: WhileAlive[_Known] = WhileAlive()  # of storages of copies that are in use
        self._in_use: set[int] = set()
        # by the storage at rest, what a forward has written to past its version (`.data`): seen in the first one of a block
        self._written: set[int] = set()
        self._watched: set[tuple[int, bool]] = set()  # blocks that have had one, and whether with gradients
        self._graph_task = -1  # the backward pass at whose end there is something to do
        self._open: list[tuple[int, ExitStack]] = []  # blocks whose forward is under way
        self._ahead: dict[int, Ticket] = {}  # by the storage at rest; on the way for the next block
        self._most_ahead_bytes = 0
        self._newest: Callable[[], _Saved | None] = _nothing

    # -- coming and going ----------------------------------------------------------------------

    def send_away(self, parameter: nn.Parameter) -> None:
        """Put a parameter's values to rest."""
        stored = self.spill.store(parameter)
        rests(stored, self.link.device)
        self._at_rest[storage_of(stored)] = stored
        self._most_ahead_bytes = max(self._most_ahead_bytes, stored.nbytes)
        parameter.data = stored

    def bring_back(self, parameter: nn.Parameter, *, is_held: bool) -> None:
        """Have a parameter on the device again, with its gradient, and stream it no longer.

        One whose values at rest the loop holds stays there, where that is the device's own memory: the loop would hold something else.
        """
        stored, gradient = self.resting(parameter), parameter.grad
        if stored is None:
            return
        if is_held and stored.device == self.link.device:
            self.forget(parameter)
            return
        data = ParameterCopies.fetch(self.link, stored).wait()  # whatever a link makes of copies that are in use
        if gradient is not None and (
            gradient.device != self.link.device
            or (gradient.layout is torch.strided and is_spilled(gradient.untyped_storage()))
        ):
            gradient = ParameterCopies.fetch(self.link, gradient).wait()
        self.forget(parameter)
        parameter.grad = None
        parameter.data = data
        parameter.grad = gradient

    def forget(self, parameter: nn.Parameter) -> None:
        """Stream a parameter no longer."""
        self._at_rest.pop(storage_of(parameter), None)

    def resting(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with the values of a parameter that is at rest; None where it is not."""
        # a transform of torch.func has put something in its place that has no storage
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(parameter)
        return None if is_wrapped else self._at_rest.get(storage_of(parameter))

    # -- using a block -------------------------------------------------------------------------

    @contextmanager
    def in_use(self, block: nn.Module) -> Iterator[None]:
        """The block's parameters are on the device, for a forward or its recomputation."""
        if id(block) in self._in_use:
            yield
            return
        # copies are none of what transforms of torch.func look at
        with temporarily_clear_interpreter_stack() if is_transformed() else nullcontext():
            guests = self._arrived(_distinct(self._slots[id(block)]))
        if self.link.overlaps:
            self._look_ahead(block)
            self.settles_after_backward()
        self._in_use.add(id(block))
        try:
            with self._present(guests):
                yield
        finally:
            self._in_use.discard(id(block))

    @contextmanager
    def _present(self, guests: Sequence[_Guest], written: Collection[int] = ()) -> Iterator[None]:
        try:
            for guest in guests:
                guest.parameter.data = guest.copy
                self._copies.keep(guest.copy.untyped_storage(), _Known(guest.stored, guest.copy.dtype))
            self.arrived([guest.parameter for guest in guests])
            yield
        finally:
            for guest in guests:
                self._copies.forget(guest.copy.untyped_storage())
                was_written = storage_of(guest.stored) in self._written or id(guest.parameter) in written
                guest.leave(was_written=was_written)
            self.left([guest.parameter for guest in guests])

    @contextmanager
    def lent(self, parameters: Sequence[nn.Parameter], written: Collection[int] = ()) -> Iterator[None]:
        """Parameters are on the device for a function of the loop's own, and stay there as long as it holds what it got.

        Where there is no room they are used where they rest. The function writes to those of the ids in `written`, and maybe to
        others.
        """
        guests: list[_Guest] = []
        with ExitStack() as use:
            with suppress(torch.OutOfMemoryError):
                guests = self._arrived(parameters)
            use.enter_context(self._present(guests, written))
            if torch.is_grad_enabled():
                use.enter_context(_noting(self._noted, self._restored))
            yield
        for guest in guests:
            if storage_of(guest.parameter) == storage_of(guest.stored) and is_shared(guest.copy):
                guest.parameter.data = guest.copy

    @contextmanager
    def in_use_again(self, block: nn.Module) -> Iterator[None]:
        """The block's parameters are on the device for a recomputation, and stay as far as it saves them for backward."""
        with self.in_use(block), _passing_on(self._kept):
            yield

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch keeps the very object of what is not trained, which is at rest again when the backward pass comes to it
        is_copy = isinstance(tensor, nn.Parameter) and self._copies.of(tensor.untyped_storage()) is not None
        return tensor.detach() if is_copy else tensor

    def stream(self, block: nn.Module, undo: ExitStack) -> None:
        """Have a block's parameters on the device whenever it is called, until undone."""
        keep_out_of_copies(block, undo)
        undo.callback(block.register_forward_pre_hook(_Begins(self, block)).remove)
        undo.callback(block.register_forward_hook(partial(self._ended, block), always_call=True).remove)

    def begin(self, block: nn.Module) -> None:
        """A block is about to run its forward; of one within another, all is there."""
        if all(self.resting(parameter) is None for parameter in _distinct(self._slots[id(block)])):
            self._open.append((id(block), ExitStack()))
            return
        with ExitStack() as use:
            use.enter_context(self.in_use(block))
            records, is_as_written = torch.is_grad_enabled(), bool(why_as_written())
            if records and not is_as_written:  # else there are no hooks on saved tensors
                use.enter_context(_noting(self._noted, self._restored))
                if _autocast_dtype(self.link.device) is not None:
                    use.enter_context(without_cached_casts(self.link.device.type))
                    use.enter_context(_Casts(self._copies, self.link.device))
            if (id(block), records) not in self._watched and not is_as_written:
                self._watched.add((id(block), records))
                use.enter_context(WritesWatch(self._is_written))
            self._open.append((id(block), use.pop_all()))

    def _is_written(self, tensor: torch.Tensor) -> None:
        if (known := self._copies.of(tensor.untyped_storage())) is not None:
            self._written.add(storage_of(known.stored))

    def end(self, block: nn.Module) -> None:
        """A block has run its forward, or broken off; likewise those within it that were interrupted."""
        if any(begun == id(block) for begun, _ in self._open):
            begun = -1
            while begun != id(block):
                begun, use = self._open.pop()
                use.close()

    def _ended(self, block: nn.Module, *_: Any) -> None:
        with deferred_interrupts(), torch._C.DisableTorchFunction():
            self.end(block)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context of a call of the model: at its end no block is left that it has begun, also where a backward pass makes the call."""
        begun = len(self._open)
        try:
            yield
        finally:
            while len(self._open) > begun:  # a Ctrl-C passes hooks by
                self._open.pop()[1].close()

    @property
    def is_open(self) -> bool:
        """Return whether a block's forward is under way."""
        return bool(self._open)

    def pass_ended(self) -> None:
        """A forward or backward pass is over: nothing is on its way, and what is at rest may be read and written."""
        while self._open and not is_in_backward():  # a Ctrl-C passes hooks by
            self._open.pop()[1].close()
        self._ahead.clear()
        self.link.settle()

    def _arrived(self, parameters: Sequence[nn.Parameter]) -> list[_Guest]:
        """Copies of what is at rest among some parameters; nothing is changed yet, should memory run out."""
        found = [(p, r) for p in parameters if (r := self.resting(p)) is not None]
        arrivals: dict[int, Ticket] = {}
        for _, stored in found:
            key = storage_of(stored)
            if key not in arrivals:
                arrivals[key] = self._ahead.pop(key) if key in self._ahead else self.link.fetch(stored)
        guests = []
        for parameter, stored in found:
            if torch.is_grad_enabled() and parameter.requires_grad:
                self.on_use(parameter)
            copy = arrivals[storage_of(stored)].wait()
            guests.append(_Guest(parameter, stored, copy, -1 if parameter.is_inference() else parameter._version))
        return guests

    def _look_ahead(self, block: nn.Module) -> None:
        """Begin to fetch the block that comes next: the one before, when a backward pass recomputes."""
        is_backward = is_in_backward()
        self._ahead.clear()
        if id(block) not in self._places:
            return
        place = self._places[id(block)] + (-1 if is_backward else 1)
        if not 0 <= place < len(self._blocks):
            return
        for parameter in _distinct(self._slots[id(self._blocks[place])]):
            stored = self.resting(parameter)
            if stored is not None:
                self._ahead[storage_of(stored)] = self.link.fetch(stored)

    def settles_after_backward(self) -> None:
        """Have `pass_ended` called when the backward pass that is under way is over; outside of one nothing."""
        task = torch._C._current_graph_task_id()
        if self.link.overlaps and task not in (-1, self._graph_task):
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._graph_task = -1
        self.pass_ended()
        self.backward_ended()

    # -- what autograd saves -------------------------------------------------------------------

    def _noted(self, tensor: torch.Tensor) -> _Saved | None:
        """Return what stands for a saved tensor, if it is a copy of a parameter; None for others."""
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or is_transformed():
            return None
        known = self._copies.of(tensor.untyped_storage())
        if known is None or tensor.dtype is not known.dtype:
            return None
        saved = _Saved(known.stored, tensor, self._newest)
        self._newest = weakref.ref(saved)
        return saved

    def _restored(self, saved: _Saved) -> torch.Tensor:
        if self.link.overlaps:
            self._fetch_earlier(saved)
            self.settles_after_backward()
        return saved.restored(self.link)

    def _fetch_earlier(self, saved: _Saved) -> None:
        """Begin to fetch what was saved before, up to the size of the largest parameter."""
        ahead_bytes, earlier = 0, saved.previous()
        saved.arrival = saved.arrival or self.link.fetch(saved.stored)
        while earlier is not None and ahead_bytes < self._most_ahead_bytes:
            ahead_bytes += earlier.stored.nbytes
            earlier.arrival = earlier.arrival or self.link.fetch(earlier.stored)
            earlier = earlier.previous()


class _Begins:
    """Called before a block's forward."""

    def __init__(self, streaming: BlockStreaming, block: nn.Module) -> None:
        self._streaming, self._block = streaming, block

    def __call__(self, *_: Any) -> None:
        # copies are none of the loop's functions, as a tape has them
        with deferred_interrupts(), torch._C.DisableTorchFunction():
            self._streaming.begin(self._block)

    def in_use(self) -> AbstractContextManager[None]:
        """See `memlab.runtime.modules.in_use`."""
        return self._streaming.in_use_again(self._block)


def slots_of(block: nn.Module) -> Iterator[_Slot]:
    """Yield where a block has parameters: the module and the name; those of code of TorchScript cannot be exchanged."""
    for module in block.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        yield from ((module, name) for name, parameter in module._parameters.items() if parameter is not None)


def _distinct(slots: Iterable[_Slot]) -> list[nn.Parameter]:
    """The parameters that are in place now, each once."""
    here = (module._parameters.get(name) for module, name in slots)
    return list({id(parameter): parameter for parameter in here if parameter is not None}.values())


def _nothing() -> None:
    return None


def _let_be(_parameters: Sequence[nn.Parameter]) -> None:
    return None


# --- hooks on what autograd saves -------------------------------------------------------------------


@contextmanager
def _noting(note: Callable[[torch.Tensor], _Saved | None], restore: Callable[[_Saved], torch.Tensor]) -> Iterator[None]:
    """Keep copies of parameters as notes; anything else goes to the hooks that are there already."""
    there = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = there or (as_saved, as_saved)

    def packed(tensor: torch.Tensor) -> Any:
        saved = note(tensor)
        return pack(tensor) if saved is None else saved

    def unpacked(value: Any) -> Any:
        return restore(value) if type(value) is _Saved else unpack(value)

    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        yield


@contextmanager
def _passing_on(changed: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Hand what autograd saves to the hooks that are there already, changed."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (as_saved, as_saved)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: pack(changed(tensor)), unpack):
        yield


# --- autocast ---------------------------------------------------------------------------------------

# products that autocast runs in 16 bits on every device, as modules call them
_PRODUCTS = frozenset(
    (
        F.linear,
        torch.addmm,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.bmm,
        torch.baddbmm,
        F.conv1d,
        F.conv2d,
        F.conv3d,
    )
)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class _Casts(TorchFunctionMode):
    """Casts weights before products, as autocast does within them, and so gets to know the casts."""

    def __init__(self, copies: WhileAlive[_Known], device: torch.device) -> None:
        super().__init__()
        self._copies = copies  # what is known of storages on the device; casts are added, for as long as they live
        self._device = device  # of the block

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = handed_over(func)
        dtype = _autocast_dtype(self._device) if func in _PRODUCTS else None
        if dtype is None:
            return func(*args, **(kwargs or {}))
        return func(
            *(self._cast(value, dtype) for value in args),
            **{name: self._cast(value, dtype) for name, value in (kwargs or {}).items()},
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if type(value) not in PLAIN or value.dtype is not torch.float32:
            return value
        known = self._copies.of(value.untyped_storage())
        # a part of a weight is cast to something that does not lie as the weight does
        if known is None or value.numel() != known.stored.numel() or not is_dense(value):
            return value
        cast = value.to(dtype)
        if cast.stride() == value.stride():
            self._copies.keep(cast.untyped_storage(), _Known(known.stored, dtype))
        return cast
