"""`StepRecorder`: writes down one step of a loop while it runs, by the rules of `tape`."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memlab.errors import WorkloadError
from memlab.runtime.autocast import device_types
from memlab.runtime.batch import Batch
from memlab.runtime.callers import handed_over
from memlab.runtime.graphs import gradient_of
from memlab.runtime.hooks import loss_of
from memlab.runtime.loop_mode import UncompiledMode, called_from_loop
from memlab.runtime.reach import SMALL_BYTES
from memlab.runtime.tree import flatten, holds_tensors, tensors_in
from memlab.session.tape import Tape, TapeCall, TapeEntry, TapePart, TapeUpdate, TapeValue, by_place

_MOST_ENTRIES, _MOST_ENTRIES_OF_ONE = 20_000, 2_000
# integers of one model's step: of a tensor, and of all
_MOST_BYTES, _MOST_BYTES_OF_ALL = 2**20, 2**22
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# recorders by the thread whose loop they follow
_recorders: dict[int, StepRecorder] = {}


class _Alive(weakref.ref[torch.Tensor]):
    """A tensor with a number."""

    __slots__ = ("key", "number")

    number: int
    key: int


def recorder_here() -> StepRecorder | None:
    """Return what records the loop of this thread; None for nothing."""
    return _recorders.get(threading.get_ident()) if _recorders else None


class StepRecorder(UncompiledMode):
    """Records one step of the loop on this thread, from `begin` to `finish`."""

    _is_on_top = True

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        self._models = tuple(models)
        self._optimizers = tuple(optimizers)
        self._places = {
            id(tensor): TapePart(number, place)
            for number, model in enumerate(models)
            for place, tensor in enumerate(chain(model.parameters(), model.buffers()))
        }
        self._known: dict[int, _Alive] = {}
        self._gone: deque[_Alive] = deque()
        # with the version it had when it was first used; None where it has none
        self._given: dict[int, tuple[torch.Tensor, int | None]] = {}
        self._kept_bytes = 0
        self._entries: list[TapeEntry] = []
        self._numbers = 0
        self._within: TapeEntry | None = None  # the call or step under way
        self._is_running = False  # whether a function of torch is under way
        self._was_missing = False  # whether it was not there when it should have been
        self._shapes: Any = ()
        self._keeps_gradients = False
        self._losses = 0  # calls that gave one
        self._problem = ""
        self._process = os.getpid()

    def begin(self) -> None:
        parts = (
            (place, tensor)
            for model in self._models
            for tensor in model.parameters()
            if (place := self._places[id(tensor)])
        )
        self._gradients = [place for place, tensor in parts if gradient_of(tensor) is not None]
        self._first_node = torch._C._autograd._get_sequence_nr()
        _recorders[threading.get_ident()] = self
        super().begin()

    def drop(self) -> None:
        """Stop recording, and keep nothing."""
        self.end()
        for thread in [thread for thread, recorder in _recorders.items() if recorder is self]:
            del _recorders[thread]
        self._known.clear()
        self._given, self._entries = {}, []

    def finish(self, rows: int) -> Tape | None:
        """Stop recording; return the tape, or None where code that was compiled, or another thread, was in the way."""
        was_there = not self._was_missing and recorder_here() is self
        self._note_gone(self._entries[-1].after if self._entries else [])
        whole, problem = self._entries, self._problem
        if any(tensor.grad_fn is not None for tensor, _ in self._given.values()):
            problem = problem or "a tensor with a graph was made where torch does not tell of it"
        models = tuple(weakref.ref(model) for model in self._models)
        optimizers = tuple(weakref.ref(optimizer) for optimizer in self._optimizers)
        given = {number: _reference(tensor) for number, (tensor, _) in self._given.items()}
        # written to, or maybe without a trace, as running statistics are
        written = {
            number
            for number, (tensor, version) in self._given.items()
            if version is None or tensor._version != version or tensor.nbytes <= SMALL_BYTES
        }
        calls = sum(isinstance(entry.what, TapeCall) for entry in whole)
        is_plain = calls == self._losses == 1 and not self._keeps_gradients
        kinds = [type(entry.what) for entry in whole]
        ends = TapeUpdate in kinds and TapeCall not in kinds[kinds.index(TapeUpdate) :]
        if len(models) == 1 and (is_plain or problem):
            whole, given = [], {}  # nobody will run it
        self.drop()
        if not was_there:
            return None
        of_step = (self._shapes, self._keeps_gradients, is_plain, not self._losses, ends, problem)
        return Tape(whole, given, written, self._gradients, models, optimizers, rows, *of_step)

    # -- what is recorded ----------------------------------------------------------------------

    def call(self, model: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of a model, and record it as one."""
        entry = self._own(self._call_begins, model, args, kwargs)
        if entry is None:
            return run(*args, **kwargs)
        try:
            output = run(*args, **kwargs)
        except BaseException:
            self._forget(entry)
            raise
        finally:
            self._come_back()
        self._own(self._call_ended, entry, output)
        return output

    def step_begins(self, optimizer: Optimizer) -> None:
        self._own(self._update_begins, optimizer)

    def step_ended(self) -> None:
        if self._within is not None and isinstance(self._within.what, TapeUpdate):
            self._come_back()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        func, kwargs = handed_over(func), kwargs or {}
        is_deaf = self._within is not None or self._problem or self._is_running
        if is_deaf or recorder_here() is not self or os.getpid() != self._process:
            return called_from_loop(func, args, kwargs)
        entry = self._own(self._function_begins, func, args, kwargs)
        self._is_running = True
        try:
            result = called_from_loop(func, args, kwargs)
        except BaseException:
            self._forget(entry)
            raise
        finally:
            self._is_running = False
        if entry is not None:
            self._own(self._function_ended, entry, func, result)
        return result

    def _own(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do the recorder's own work, of which tensors of the loop's own classes do not hear; what fails makes the tape void."""
        if self._problem:
            return None
        try:
            with torch._C.DisableTorchFunction():
                return work(*args)
        except Exception as error:  # noqa: BLE001 - the loop goes on whatever it is
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])
            return None

    def _give_up(self, problem: str) -> None:
        """Make the tape void, and keep nothing of the loop's."""
        self._problem = problem
        self._known.clear()
        self._given, self._entries = {}, []

    def _call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TapeEntry | None:
        number = next((number for number, each in enumerate(self._models) if each is model), None)
        if self._within is not None:
            if isinstance(self._within.what, TapeUpdate):
                self._give_up("the loop calls a model within an optimizer's step")
            return None
        if number is None:
            return None
        if self._is_running:
            self._give_up("the loop calls a model within a function of torch")
            return None
        if len(self._models) == 1 and not torch.is_grad_enabled():
            self._give_up("the loop calls the model without gradients")
            return None
        if not self._shapes:
            self._shapes = Batch(args, dict(kwargs)).shapes
            self._keeps_gradients = any(gradient_of(p) is not None for each in self._models for p in each.parameters())
        self._within = self._entry(TapeCall(number, model.training), (args, dict(kwargs)))
        self._leave()
        return self._within

    def _call_ended(self, entry: TapeEntry, output: Any) -> None:
        self._number(entry, by_place(output))
        self._losses += loss_of(output) is not None

    def _update_begins(self, optimizer: Optimizer) -> None:
        number = next((number for number, each in enumerate(self._optimizers) if each is optimizer), None)
        if number is None:
            self._give_up(f"{type(optimizer).__name__} is new in this step")
        elif self._is_running:
            self._give_up("an optimizer steps within a function of torch, as in a backward pass")
        elif self._within is None:
            self._within = self._entry(TapeUpdate(number), ())
            self._leave()

    def _function_begins(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TapeEntry:
        if func is torch.Tensor.__deepcopy__:  # with a table of all that is copied
            return self._entry(torch.clone, ((args[0].detach(),), {}))
        return self._entry(func, (args, kwargs))

    def _function_ended(self, entry: TapeEntry, func: Any, result: Any) -> None:
        if func in _BACKWARDS:
            self._note_gone(entry.before)
        tensors = tensors_in(result)
        if tensors or (result is None and any(isinstance(leaf, (TapeValue, TapePart)) for leaf in entry.leaves)):
            self._number(entry, dict(enumerate(tensors)))
        else:
            self._forget(entry)  # a question about a tensor

    def _forget(self, entry: TapeEntry | None) -> None:
        """Take off what has failed, which the loop may catch; nothing is there where whoever records has stopped meanwhile."""
        if self._entries and self._entries[-1] is entry:
            self._entries.pop()

    def _come_back(self) -> None:
        self._within = None
        if self in _recorders.values() and not self._problem:
            super().begin()

    def _leave(self) -> None:
        self._was_missing |= not self._has_begun
        super().end()

    def _entry(self, what: Any, arguments: Any) -> TapeEntry:
        self._note_gone(self._entries[-1].after if self._entries else [])
        leaves, structure = flatten(arguments)
        entry = TapeEntry(what, [self._leaf(what, leaf) for leaf in leaves], structure, _mode())
        most = _MOST_ENTRIES if len(self._models) > 1 else _MOST_ENTRIES_OF_ONE
        if len(self._entries) == most:
            raise WorkloadError(f"the loop calls more than {most:,} functions in one step")
        self._entries.append(entry)
        return entry

    def _leaf(self, what: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if holds_tensors(leaf):
                raise WorkloadError(f"what is in a {type(leaf).__name__} is not known")
            return leaf
        if (place := self._places.get(id(leaf))) is not None:
            return place
        known = self._known.get(id(leaf))
        if known is None or known() is not leaf:
            known = self._remember(leaf)
            self._given[known.number] = self._kept(what, leaf), None if leaf.is_inference() else leaf._version
        return TapeValue(known.number)

    def _kept(self, what: Any, given: torch.Tensor) -> torch.Tensor:
        """Return what to keep of a tensor that the loop was given."""
        if given.layout is not torch.strided:
            raise WorkloadError(f"the loop has a {str(given.layout).removeprefix('torch.')} tensor")
        node = given.grad_fn
        is_used = self._shapes and torch.is_grad_enabled() and what is not torch.Tensor.detach
        # what was made in the step before is none of this step's graph
        is_older = node is not None and node._sequence_nr() < self._first_node and (given.numel() == 1 or not is_used)
        if is_older and given.numel() == 1:
            return given.detach()
        if is_older:
            return _shape_of(given)
        if len(self._models) > 1 or node is not None:
            return given
        size_bytes = given.untyped_storage().nbytes()  # all of which a view keeps
        is_small = size_bytes <= _MOST_BYTES and self._kept_bytes + size_bytes <= _MOST_BYTES_OF_ALL
        if given.is_floating_point() or not is_small:
            return _shape_of(given)
        self._kept_bytes += size_bytes
        return given.detach()

    def _number(self, entry: TapeEntry, results: Mapping[Any, torch.Tensor]) -> None:
        for place, result in results.items():
            known = self._known.get(id(result))
            is_own = id(result) in self._places
            if not is_own and (known is None or known() is not result):
                known = self._remember(result)
            entry.results[place] = -1 if is_own or known is None else known.number

    def _remember(self, tensor: torch.Tensor) -> _Alive:
        self._known[id(tensor)] = alive = _Alive(tensor, self._gone.append)
        alive.key, alive.number = id(tensor), self._numbers
        self._numbers += 1
        return alive

    def _note_gone(self, where: list[int]) -> None:
        while self._gone:
            alive = self._gone.popleft()
            where.append(alive.number)
            if self._known.get(alive.key) is alive:
                del self._known[alive.key]


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return what leads to a tensor; it keeps a parameter, which is another model's, from nobody."""
    return weakref.ref(tensor) if isinstance(tensor, nn.Parameter) else lambda: tensor


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, without values and memory."""
    with torch.inference_mode(False):  # one that counts its versions, whatever the loop is in
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _mode() -> tuple[bool, str, torch.dtype | None]:
    for device_type in reversed(device_types()):
        if torch.is_autocast_enabled(device_type):
            return torch.is_grad_enabled(), device_type, torch.get_autocast_dtype(device_type)
    return torch.is_grad_enabled(), "", None
