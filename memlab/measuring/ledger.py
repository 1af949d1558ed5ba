"""The ledger: exact live bytes, from every storage born and freed during real training steps.

Rules of the ledger, in the order in which they matter:

1. Only outputs of operators are looked at, and only of operators that can give birth: views and
   in-place updates are recognised once by their schema and then cost next to nothing.
2. A storage is counted once, from its birth to its death, whatever views and ties point to it. Its
   Python object lives as long as the storage does, so a weak reference to it tells the death. What is called then
   is C code, which only notes it: a Ctrl-C that came in Python code there would be lost. Deaths are recorded before
   anything else is, so that an address that is used again is never taken for the storage that was there before.
3. What lived before the step is known because it is named: parameters, buffers, gradients,
   optimizer state, inputs; and what an observed step left alive is still tracked in the next.
4. Categories are decided when the step is over, when gradients and state have found their place.
5. The ledger lies at the bottom of the stack of dispatch modes. A mode that the user's code enters
   or leaves during the step is then never disturbed: leaving a mode takes whatever is on top.
6. Where the engine of autograd adds two gradients of one tensor, it writes the sum over the first if nobody else holds
   it (torch/csrc/autograd/input_buffer.cpp), but not while a mode watches. Of a GPU, whose own counters say what steps
   take that nobody watches, it is recorded as if it did.
7. Of a product along a dimension (before torch 2.13 of cumulative products, too) torch computes the gradient by another formula while
   a mode watches (`prod_backward` in torch/csrc/autograd/FunctionsManual.cpp), so nobody watches there: it is one operator. Of all formulas tried, none other differs
   (`tests/measuring/test_formulas.py`).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)

from memlab.measuring.holdings import Holding
from memlab.measuring.observation import (
    BACKWARD,
    FORWARD_LIKE,
    MOMENT_OF_PHASE,
    OTHER,
    PHASES,
    RECOMPUTE,
    Observation,
    RawEvent,
)
from memlab.measuring.operator_effects import EFFECTS, OperatorEffect
from memlab.records import Category, Phase
from memlab.runtime.backward import is_in_backward
from memlab.runtime.dispatch import TORCH, WatchingMode, defers, is_within_compiled_call
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.tree import tensors_in
from memlab.techniques.offload.spill import is_spilled
from memlab.units import format_bytes

ADD = torch.ops.aten.add.Tensor
_PRODUCTS = {torch.ops.aten.prod.dim_int, *(() if TORCH >= (2, 13) else (torch.ops.aten.cumprod.default,))}


class _Alive(weakref.ref[torch.UntypedStorage]):
    """A tracked storage: a weak reference that carries what must be recorded when it dies."""

    __slots__ = ("key", "moment", "number", "size_bytes")

    key: int
    moment: int
    number: int
    size_bytes: int


class Ledger(WatchingMode):
    """Exact live bytes of one device type, by watching operators.

    Known limitations:
        Memory that a kernel takes and frees inside one operator is invisible (rule 7 makes one of what a backward pass
        computes again there), as is code made by `torch.compile`, and tensors that lived before the step without being
        named in `begin`.

    Over 300 lines: births and deaths are recorded where the operator is met, as one more call for each would be noticed.
    """

    def __init__(self, device_type: str = "cpu", capacity_bytes: int | None = None) -> None:
        super().__init__()
        self.device_type = device_type  # storages of which devices count
        self.capacity_bytes = capacity_bytes  # size of the device; a birth past it raises `torch.OutOfMemoryError`
        self.peak_bytes = 0  # highest `live_bytes` since `begin`
        self._live_bytes = 0
        # what it enforces now: nothing within `without_limit`
        self.limit_bytes: float = math.inf if capacity_bytes is None else capacity_bytes
        self._live: dict[int, _Alive] = {}
        self._gone: deque[_Alive] = deque()  # deaths that are not recorded yet
        self._assigned: dict[int, Category] = {}
        self._given: set[int] = set()  # numbers of what a model was called with and nobody saw being born
        self.owner = 0  # number of the model whose call is under way, where several train; 0 for none
        self._owners: dict[int, int] = {}
        self._events: list[RawEvent] = []
        self._baseline: dict[int, int] = {}
        self._born = 0
        self._start = 0.0
        self._moment = OTHER
        self.watching = False
        self._failure: Exception | None = None
        self._product: weakref.ref[torch.Tensor] | None = None  # one that has no graph yet
        self._is_aside = False  # while the backward pass of one runs
        self._sums_in_place = device_type != "cpu"
        # births and deaths up to a sum of gradients, what it was written over, the sum
        self._sum: tuple[int, int, _Alive | None] = (0, 0, None)
        self._summed = False  # whether one was recorded as written in place
        self._node = self._before_node = 0  # which function's backward runs; number of the last storage before it
        # reading the attribute is five times as fast as comparing `tensor.device.type`
        self._is_here = (
            attrgetter(f"is_{device_type}") if hasattr(torch.Tensor, f"is_{device_type}") else self._has_type
        )

    def _has_type(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages alive now."""
        self._record_deaths()
        return self._live_bytes

    @property
    def phase(self) -> Phase:
        """Return what runs outside backward; backward is recognised by itself."""
        return PHASES[self._moment]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._record_deaths()
        self._moment = MOMENT_OF_PHASE[phase]

    def begin(self, holdings: Iterable[Holding]) -> None:
        """Begin a step: what lives now is its baseline."""
        # anew, since an error may have come in the middle of a birth or a death
        self._record_deaths()
        self._live = {key: alive for key, alive in self._live.items() if alive() is not None}
        self._live_bytes = sum(alive.size_bytes for alive in self._live.values())
        self._assigned = {alive.number: self._category_of_survivor(alive) for alive in self._live.values()}
        if self._owners:
            self._owners = {a.number: self._owners[a.number] for a in self._live.values() if a.number in self._owners}
        self.know(holdings)
        self._baseline = {alive.number: alive.size_bytes for alive in self._live.values()}
        self._events = []
        self._sum, self._summed = (0, 0, None), False
        self.peak_bytes = self._live_bytes
        self._start = perf_counter()

    def leave_data(self) -> None:
        """Count batches of the steps before no more: what is left of them is the loop's data, like all other data."""
        if self._given:
            self._live = {key: alive for key, alive in self._live.items() if alive.number not in self._given}
            self._given.clear()

    def know(self, holdings: Iterable[Holding]) -> None:
        """Assign categories to tensors; those not tracked yet are counted from now on."""
        self._record_deaths()
        for category, tensor in holdings:
            for storage in _storages_of(tensor, self.device_type):
                self._assign(storage, category)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def belong(self, owner: int, tensors: Iterable[torch.Tensor]) -> None:
        """Say which model tracked tensors are of; what has an owner keeps it."""
        self._record_deaths()
        for tensor in tensors:
            for storage in _storages_of(tensor, self.device_type):
                alive = self._live.get(storage._cdata)
                if alive is not None:
                    self._owners.setdefault(alive.number, owner)

    def know_the_rest(self, category: Category) -> None:
        """Assign a category to every storage that has none yet."""
        for alive in self._live.values():
            self._assigned.setdefault(alive.number, category)

    def finish(self) -> Observation:
        """Return what was seen since `begin`. Raises `Exception`: what an operator gave could not be recorded, so that the rest was not seen."""
        if self._failure is not None:
            raise self._failure
        self._record_deaths()
        return Observation(
            peak_bytes=self.peak_bytes,
            sums_bytes=self.peak_bytes - _highest(self._baseline, self._events) if self._summed else 0,
            baseline=self._baseline,
            assigned=dict(self._assigned),
            raw=tuple(self._events),
            start=self._start,
            owners=self._owners,
        )

    def start(self) -> None:
        """Watch this thread's operators, beneath the dispatch modes that are already there."""
        if self not in _get_current_dispatch_mode_stack():
            _restack(lambda modes: [self, *modes])
        self.watching, self._is_aside = True, False

    def stop(self) -> None:
        """Stop watching; on another thread than `start`, and within compiled code, the mode stays there as a mere pass-through."""
        self.watching = self._is_aside = False
        if self in _get_current_dispatch_mode_stack() and not is_within_compiled_call():
            _restack(lambda modes: [mode for mode in modes if mode is not self])

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Watch, and let everything be born whatever the capacity."""
        limit, self.limit_bytes = self.limit_bytes, math.inf
        try:
            with self:
                yield
        finally:
            self.limit_bytes = limit

    def close(self) -> None:
        self.stop()
        self._live.clear()
        self._assigned.clear()
        self._owners = {}
        self._baseline = {}
        self._events = []
        self._gone.clear()
        self._live_bytes = self.peak_bytes = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and defers(types):
            return NotImplemented
        if self._product is not None:
            self._leave_alone(self._product())
        first = self._born
        out = func(*args, **kwargs) if kwargs else func(*args)
        effect = EFFECTS[func]
        if not effect or not self.watching:
            return out
        if func in _PRODUCTS:
            self._product = weakref.ref(out)
        try:
            if self._gone:
                self._record_deaths()
            in_backward = self._sums_in_place and self._in_backward()
            if type(out) is torch.Tensor and effect == 1 and out.layout is torch.strided:
                if self._is_here(out):
                    storage = out.untyped_storage()
                    if storage._cdata not in self._live:
                        self._track(storage)
            else:
                self._see(out, effect)
            if in_backward and func is ADD:
                self._note_sum(args[0], out)
        except Exception as error:  # noqa: BLE001 - the operator has run, and who runs it must not hear of this; `finish` says it
            self._failure = error
            self.watching = False
            return out
        if self._live_bytes > self.peak_bytes or self._live_bytes > self.limit_bytes:
            if self._live_bytes > self.limit_bytes and (self._born > first or effect == OperatorEffect.RESIZE):
                # the traceback keeps this frame: it must not keep the newborn and the inputs alive
                out = args = kwargs = storage = None  # type: ignore[assignment] # nothing reads them again
                self._refuse(first)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return out

    def _leave_alone(self, product: torch.Tensor | None) -> None:
        """Have nobody watch the backward pass of a product, which now has its graph."""
        self._product = None
        node = None if product is None else product.grad_fn
        if node is None or not node.name().startswith(("Prod", "Cumprod")):
            return
        there = weakref.ref(self)

        def before(_gradients: Any) -> None:
            ledger = there()
            if ledger is not None and ledger.watching:
                ledger.stop()
                ledger._is_aside = True

        def after(gradients: Any, _outer: Any) -> None:
            ledger = there()
            if ledger is not None and ledger._is_aside:
                ledger.start()
                ledger._see(gradients, OperatorEffect.BIRTH)
                ledger.peak_bytes = max(ledger.peak_bytes, ledger.live_bytes)

        node.register_prehook(before)
        node.register_hook(after)

    def _see(self, out: Any, effect: int) -> None:
        """Record the outputs of an operator that are not simply one new tensor."""
        for tensor in tensors_in(out):
            for storage in _storages_of(tensor, self.device_type):
                alive = self._live.get(storage._cdata)
                if alive is None:
                    self._track(storage)
                elif effect == OperatorEffect.RESIZE:
                    self._resized(alive, storage.nbytes())

    def _track(self, storage: torch.UntypedStorage) -> None:
        size_bytes = storage.nbytes()
        if not size_bytes or is_spilled(storage):
            return
        alive = _Alive(storage, self._gone.append)
        alive.key = key = storage._cdata
        alive.size_bytes = size_bytes
        alive.number = number = self._born = self._born + 1
        alive.moment = moment = self._now()
        self._live[key] = alive
        self._live_bytes += size_bytes
        self._events.append((perf_counter(), size_bytes, number, moment))
        if self.owner:
            self._owners[number] = self.owner

    def _record_deaths(self) -> None:
        """Record what has died since this was last called."""
        while self._gone:
            self._died(self._gone.popleft())

    def _in_backward(self) -> bool:
        """Return whether an operator of a backward pass is about to be recorded, and note of which function."""
        if not is_in_backward():
            return False
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node:
            self._node, self._before_node = number, self._born
        return True

    def _note_sum(self, first: Any, out: torch.Tensor) -> None:
        # what a view is of holds the storage, too; sparse gradients have none
        if first._is_view() or not (first.layout is out.layout is torch.strided):
            return
        old, new = (self._live.get(tensor.untyped_storage()._cdata) for tensor in (first, out))
        # one that was there before this function's backward came out of another's: the engine adds, and no formula
        if old is not None and new is not None and old.number <= self._before_node and old.size_bytes == new.size_bytes:
            self._sum = (len(self._events), old.number, new)

    def _died(self, alive: _Alive) -> None:
        events, number, new = self._sum
        if new is not None and (events, number) == (len(self._events), alive.number):
            self._sum = (0, 0, None)  # the sum takes the number, and its own death is to be told
            if self._live.pop(alive.key, None) is not None:
                self._summed = True
                self._events.pop()  # the birth of the sum
                self._live_bytes -= alive.size_bytes
                new.number = number
            return
        if self._live.pop(alive.key, None) is not None:
            self._live_bytes -= alive.size_bytes
            self._events.append((perf_counter(), -alive.size_bytes, alive.number, self._now()))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has another size now; no operator says so where an engine resizes storages itself."""
        self._record_deaths()
        alive = self._live.get(storage._cdata)
        if alive is not None:
            self._resized(alive, storage.nbytes())
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        elif self.watching and storage.device.type == self.device_type:
            self._track(storage)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _resized(self, alive: _Alive, size_bytes: int) -> None:
        change_bytes = size_bytes - alive.size_bytes
        if change_bytes:
            alive.size_bytes = size_bytes
            self._live_bytes += change_bytes
            self._events.append((perf_counter(), change_bytes, alive.number, self._now()))

    def _now(self) -> int:
        if not is_in_backward():
            return self._moment
        return RECOMPUTE if torch.is_grad_enabled() else BACKWARD

    def _assign(self, storage: torch.UntypedStorage, category: Category) -> None:
        if storage._cdata not in self._live:
            self._track(storage)
            if category is Category.ACTIVATIONS:
                self._given.add(self._born)
        alive = self._live.get(storage._cdata)
        if alive is not None and self._assigned.get(alive.number) is not Category.PARAMETERS:
            self._assigned[alive.number] = category

    def _category_of_survivor(self, alive: _Alive) -> Category:
        """A storage that outlived its step unnamed is an output the loop still holds, unless the step made it."""
        unnamed = Category.ACTIVATIONS if alive.moment in FORWARD_LIKE else Category.TEMPORARIES
        return self._assigned.get(alive.number, unnamed)

    def _refuse(self, first: int) -> None:
        """Raise as the allocator of a GPU would; the newborn storages have just been dropped."""
        self._record_deaths()
        asked_bytes = sum(size for _, size, number, _ in self._events if number > first and size > 0)
        survivors = {alive.number for alive in self._live.values()}
        self._events = [event for event in self._events if event[2] <= first or event[2] in survivors]
        raise torch.OutOfMemoryError(_refusal(asked_bytes, self._live_bytes, int(self.limit_bytes), len(self._live)))


def _highest(baseline: Mapping[int, int], events: Iterable[RawEvent]) -> int:
    """Return the highest live bytes of what was recorded."""
    return max(itertools.accumulate((size_bytes for _, size_bytes, _, _ in events), initial=sum(baseline.values())))


def _refusal(asked_bytes: int, live_bytes: int, capacity_bytes: int, storages: int) -> str:
    free_bytes = max(0, capacity_bytes - live_bytes)
    return (
        f"memlab CPU device out of memory. Tried to allocate {format_bytes(asked_bytes)}. "
        f"Capacity {format_bytes(capacity_bytes)}, of which {format_bytes(free_bytes)} is free. "
        f"{format_bytes(live_bytes)} is held by {storages} live storages."
    )


def _restack(change: Callable[[list[TorchDispatchMode]], list[TorchDispatchMode]]) -> None:
    """Rebuild this thread's stack of dispatch modes, bottom first; a Ctrl-C on the way would lose the loop's own."""
    with deferred_interrupts():
        modes = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        for mode in change(modes[::-1]):
            _push_mode(mode)


def _storages_of(tensor: torch.Tensor, device_type: str) -> Iterator[torch.UntypedStorage]:
    """Storages behind a tensor on a device; of a wrapper subclass those of the tensors it holds."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)  # of a DTensor also its mesh
            if isinstance(inner, torch.Tensor):
                yield from _storages_of(inner, device_type)
    elif tensor.layout is torch.sparse_coo:
        yield from _storages_of(tensor._indices(), device_type)
        yield from _storages_of(tensor._values(), device_type)
    elif tensor.device.type == device_type:
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            # opaque tensors have no storage that could be counted
            return
