"""`Tape`: one step of a loop that trains several models, recorded while it runs, to be run again with others in their place.

What a loop computes between its model calls (criteria, noise, penalties, clipping) is known to nobody but the loop. Rules of the tape:

1. It holds, in order, the calls of the models, the steps of their optimizers, and every function of torch that the loop itself
   calls, with numbers in place of tensors. Which way the loop went, and what it read from tensors, are the step's that was recorded.
2. It goes from the end of one step to the end of the next, so that a `zero_grad()` anywhere is on it.
3. A tensor is let go of where the loop did. What died in a backward pass was held by the graph alone, and is let go of before it.
   What outlives the step is replaced when the next one makes it again, as a variable is.
4. What the loop was given (batches) is kept by reference, parameters of other models weakly, and is there again in every step.
   What the step writes to, or may without a trace, is copied first where it is run for real. A tensor with a graph that comes from
   nowhere, a model call within an optimizer's step and a step of too many functions make a tape void, with the reason in words.
5. Where anything was compiled by ``torch.compile`` nothing is recorded (`memlab.runtime.loop_mode`).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memlab.errors import WorkloadError
from memlab.runtime.loop_mode import UncompiledMode
from memlab.runtime.reach import SMALL_BYTES
from memlab.runtime.tree import Structure, flatten, holds_tensors, tensors_in
from memlab.runtime.workload import Workload

_MOST_ENTRIES = 20_000
_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# recorders by the thread whose loop they follow
_recorders: dict[int, Recorder] = {}


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor that the loop has made, or was given."""

    number: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A parameter or buffer."""

    model: int
    place: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a model."""

    model: int
    is_training: bool


@dataclass(frozen=True, slots=True)
class _Update:
    """A step of an optimizer."""

    optimizer: int


@dataclass(frozen=True)
class _Entry:
    """One thing that the loop did."""

    what: Callable[..., Any] | _Call | _Update
    leaves: Sequence[Any]
    structure: Structure
    mode: tuple[bool, str, torch.dtype | None]  # whether graphs are made; device type and dtype of autocast, if any
    results: list[int] = field(default_factory=list)  # numbers of the tensors that came out
    before: list[int] = field(default_factory=list)  # numbers of those that are let go of before it
    after: list[int] = field(default_factory=list)  # and after it


@dataclass(frozen=True)
class Tape:
    """A recorded step."""

    entries: Sequence[_Entry]
    given: Mapping[int, Callable[[], torch.Tensor | None]]  # what the loop was given, by number; None where it is gone
    written: Collection[int]  # numbers of those that it writes to
    gradients: Sequence[_Part]  # parameters that have a gradient when it begins
    models: tuple[weakref.ref[nn.Module], ...]
    optimizers: tuple[weakref.ref[Optimizer], ...]
    rows: int  # of a step
    problem: str = ""  # why it cannot be run again; empty when it can

    def is_of(self, workloads: Sequence[Workload]) -> bool:
        """Return whether it is of these models and optimizers, in any order."""
        optimizers = {id(optimizer) for each in workloads for optimizer in each.optimizers}
        return {id(model()) for model in self.models} == {id(each.model) for each in workloads} and optimizers == {
            id(optimizer()) for optimizer in self.optimizers
        }


def tape_of(workloads: Sequence[Workload]) -> Tape | None:
    """Return the recorded step of the loop that trains several models, None without one; raise where it cannot be run again."""
    tape = workloads[0].tape
    if len(workloads) < 2 or tape is None or not tape.is_of(workloads):
        return None
    gone = "a model is gone whose parameters it used" if any(given() is None for given in tape.given.values()) else ""
    if problem := tape.problem or gone:
        names = " and ".join(each.name for each in workloads)
        raise WorkloadError(
            f"a step of the loop that trains {names} cannot be run by itself: {problem}; measure plans in the loop, as in "
            "%%memfit --checkpoint"
        )
    return tape


class _Alive(weakref.ref[torch.Tensor]):
    """A tensor with a number."""

    __slots__ = ("key", "number")

    number: int
    key: int


def recorder_here() -> Recorder | None:
    """Return what records the loop of this thread; None for nothing."""
    return _recorders.get(threading.get_ident()) if _recorders else None


class Recorder(UncompiledMode):
    """Records one step of the loop on this thread, from `begin` to `finish`."""

    _is_on_top = True

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        self._models = tuple(models)
        self._optimizers = tuple(optimizers)
        self._places = {
            id(tensor): _Part(number, place)
            for number, model in enumerate(models)
            for place, tensor in enumerate(chain(model.parameters(), model.buffers()))
        }
        self._known: dict[int, _Alive] = {}
        self._gone: deque[_Alive] = deque()
        # with the version it had when it was first used; None where it has none
        self._given: dict[int, tuple[torch.Tensor, int | None]] = {}
        self._entries: list[_Entry] = []
        self._numbers = 0
        self._within: _Entry | None = None  # the call or step under way
        self._was_missing = False  # whether it was not there when it should have been
        self._problem = ""

    def begin(self) -> None:
        parts = (
            (place, tensor)
            for model in self._models
            for tensor in model.parameters()
            if (place := self._places[id(tensor)])
        )
        self._gradients = [place for place, tensor in parts if tensor.grad is not None]
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
        """Stop recording; return the tape, or None where code that was compiled was in the way."""
        self._note_gone(self._entries[-1].after if self._entries else [])
        whole, problem = self._entries, self._problem
        if any(tensor.grad_fn is not None for tensor, _ in self._given.values()):
            problem = problem or "a tensor with a graph was made where torch does not tell of it"
        was_there = not self._was_missing
        models = tuple(weakref.ref(model) for model in self._models)
        optimizers = tuple(weakref.ref(optimizer) for optimizer in self._optimizers)
        given = {number: _reference(tensor) for number, (tensor, _) in self._given.items()}
        # written to, or maybe without a trace, as running statistics are
        written = {
            number
            for number, (tensor, version) in self._given.items()
            if version is None or tensor._version != version or tensor.nbytes <= SMALL_BYTES
        }
        self.drop()
        return Tape(whole, given, written, self._gradients, models, optimizers, rows, problem) if was_there else None

    # -- what is recorded ----------------------------------------------------------------------

    def call(self, model: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of a model, and record it as one."""
        number = next((number for number, each in enumerate(self._models) if each is model), None)
        if self._within is not None or number is None:
            if self._within is not None and isinstance(self._within.what, _Update):
                self._problem = "the loop calls a model within an optimizer's step"
            return run(*args, **kwargs)
        with self._entered(_Call(number, model.training), (args, dict(kwargs))) as entry:
            output = run(*args, **kwargs)
            self._number(entry, flatten(output)[0])
        return output

    def step_begins(self, optimizer: Optimizer) -> None:
        number = next((number for number, each in enumerate(self._optimizers) if each is optimizer), None)
        if number is None:
            self._problem = f"{type(optimizer).__name__} is new in this step"
        elif self._within is None:
            self._within = self._entry(_Update(number), ())
            self._leave()

    def step_ended(self) -> None:
        if self._within is not None:
            self._come_back()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._within is not None or self._problem:
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:  # what comes out of an iterator would not be known
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args, kwargs))
        entry = self._entry(func, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self._forget(entry)
            raise
        if func in _BACKWARDS:
            self._note_gone(entry.before)
        tensors = tensors_in(result)
        if tensors or (result is None and any(isinstance(leaf, (_Value, _Part)) for leaf in entry.leaves)):
            self._number(entry, tensors)
        else:
            self._entries.pop()  # a question about a tensor
        return result

    def _forget(self, entry: _Entry) -> None:
        """Take off what has failed, which the loop may catch; nothing is there where whoever records has stopped meanwhile."""
        if self._entries and self._entries[-1] is entry:
            self._entries.pop()

    def _come_back(self) -> None:
        self._within = None
        if self in _recorders.values():
            super().begin()

    def _leave(self) -> None:
        self._was_missing |= not self._has_begun
        super().end()

    @contextmanager
    def _entered(self, what: _Call, arguments: Any) -> Iterator[_Entry]:
        self._within = entry = self._entry(what, arguments)
        self._leave()
        try:
            yield entry
        except BaseException:
            self._forget(entry)
            raise
        finally:
            self._come_back()

    def _entry(self, what: Any, arguments: Any) -> _Entry:
        self._note_gone(self._entries[-1].after if self._entries else [])
        leaves, structure = flatten(arguments)
        entry = _Entry(what, [self._leaf(leaf) for leaf in leaves], structure, _mode())
        self._entries.append(entry)
        if len(self._entries) > _MOST_ENTRIES:
            self._problem = f"the loop calls more than {_MOST_ENTRIES:,} functions in one step"
        return entry

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if holds_tensors(leaf):
                self._problem = f"what is in a {type(leaf).__name__} is not known"
            return leaf
        if (place := self._places.get(id(leaf))) is not None:
            return place
        known = self._known.get(id(leaf))
        if known is None or known() is not leaf:
            known = self._remember(leaf)
            # a number of the step before is none of this step's graph
            given = leaf.detach() if leaf.numel() == 1 and leaf.grad_fn is not None else leaf
            self._given[known.number] = given, None if leaf.is_inference() else leaf._version
        return _Value(known.number)

    def _number(self, entry: _Entry, results: Sequence[Any]) -> None:
        for result in results:
            if not isinstance(result, torch.Tensor):
                continue
            known = self._known.get(id(result))
            is_own = id(result) in self._places
            if not is_own and (known is None or known() is not result):
                known = self._remember(result)
            entry.results.append(-1 if is_own or known is None else known.number)

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


class Replay:
    """Runs a tape again, step after step."""

    def __init__(
        self,
        tape: Tape,  # without a problem
        models: Mapping[int, nn.Module],  # what stands for each of its models, by the number (`id`) of that one
        optimizers: Mapping[int, Optimizer],  # likewise
        # what stands for a tensor that the loop was given; by default itself, or a copy where the step writes to it
        stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._tape = tape
        self._stand_in = stand_in
        self._entries = tape.entries
        self._gradients = tape.gradients
        self._models = [models[id(model())] for model in tape.models]
        self._optimizers = [optimizers[id(optimizer())] for optimizer in tape.optimizers]
        self._parts = [[*model.parameters(), *model.buffers()] for model in self._models]
        self._values: dict[int, torch.Tensor] = {}
        self._give()
        # what outlives the step because a parameter holds it
        self._held = [number for entry in tape.entries if entry.what == _GRADIENT for number in entry.results]

    def _give(self) -> None:
        """Have what the loop is given there, also what it let go of in the step before."""
        for number, given in self._tape.given.items():
            tensor = given()
            if number in self._values or tensor is None:
                continue
            if self._stand_in is not None:
                self._values[number] = self._stand_in(tensor)
            elif number in self._tape.written:
                self._values[number] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            else:
                self._values[number] = tensor

    def begin(self) -> None:
        """Make the gradients that are there when the step begins."""
        for parameter in map(self._leaf, self._gradients):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        """Run the step once more; what outlives it is there in the next."""
        self._give()
        with ExitStack() as modes:
            mode: Any = None
            for entry in self._entries:
                if entry.mode != mode:
                    modes.close()
                    mode = entry.mode
                    _enter(modes, *mode)
                self._drop(entry.before)
                self._run(entry)
                self._drop(entry.after)
        self._drop(self._held)

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._values.pop(number, None)

    def _run(self, entry: _Entry) -> None:
        what = entry.what
        if isinstance(what, _Update):
            self._optimizers[what.optimizer].step()
            return
        args, kwargs = entry.structure.put([self._leaf(leaf) for leaf in entry.leaves])
        if isinstance(what, _Call):
            model = self._models[what.model]
            if model.training is not what.is_training:
                model.train(what.is_training)
            results = flatten(model(*args, **kwargs))[0]
        else:
            results = tensors_in(what(*args, **kwargs))
        del args, kwargs
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        if len(tensors) != len(entry.results) and tensors:
            raise WorkloadError(f"{what} gives {len(tensors)} tensors, and gave {len(entry.results)} in the loop")
        for number, result in zip(entry.results, tensors, strict=False):  # gradients may be gone
            if number >= 0:
                self._values[number] = result

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, _Value):
            return self._values[leaf.number]
        return self._parts[leaf.model][leaf.place] if isinstance(leaf, _Part) else leaf


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return what leads to a tensor; it keeps a parameter, which is another model's, from nobody."""
    return weakref.ref(tensor) if isinstance(tensor, nn.Parameter) else lambda: tensor


def _mode() -> tuple[bool, str, torch.dtype | None]:
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type):
            return torch.is_grad_enabled(), device_type, torch.get_autocast_dtype(device_type)
    return torch.is_grad_enabled(), "", None


def _enter(modes: ExitStack, has_graph: bool, device_type: str, dtype: torch.dtype | None) -> None:
    modes.enter_context(torch.set_grad_enabled(has_graph))
    if device_type:
        modes.enter_context(torch.autocast(device_type, dtype))
