"""`Tape`: one step of a loop, recorded while it runs, to be run again with other models in place of those it trains.

What a loop computes between its model calls (criteria, noise, penalties, clipping) is known to nobody but the loop. Rules of the tape:

1. It holds, in order, the calls of the models, the steps of their optimizers, and every function of torch that the loop itself
   calls, with numbers in place of tensors. Which way the loop went, and what it read from tensors, are the step's that was recorded.
2. It goes from the end of one step to the end of the next, so that a `zero_grad()` anywhere is on it.
3. A tensor is let go of where the loop did. What died in a backward pass was held by the graph alone, and is let go of before it.
   What outlives the step is replaced when the next one makes it again, as a variable is.
4. What the loop was given (batches) is kept by reference, parameters of other models weakly, and is there again in every step.
   What the step writes to, or may without a trace, is copied first where it is run for real. A tensor with a graph that comes from
   nowhere, a model call within an optimizer's step and a step of too many functions make a tape void, with the reason in words.
   The tape of one model is run on stand-ins alone: it keeps no more than shapes, and integers where they are few. Calls without
   gradients (a validation) make it void.
5. Where anything was compiled by ``torch.compile`` nothing is recorded (`memlab.runtime.loop_mode`).
6. What recording meets that it does not understand makes the tape void, and is no error of the loop's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from memlab.errors import TraceError, WorkloadError
from memlab.runtime.autocast import device_types
from memlab.runtime.batch import Batch
from memlab.runtime.callers import handed_over
from memlab.runtime.graphs import gradient_of
from memlab.runtime.hooks import loss_of
from memlab.runtime.loop_mode import UncompiledMode, called_from_loop
from memlab.runtime.reach import SMALL_BYTES
from memlab.runtime.tree import Structure, flatten, holds_tensors, tensors_in
from memlab.runtime.workload import Workload

_MOST_ENTRIES, _MOST_ENTRIES_OF_ONE = 20_000, 2_000
# integers of one model's step: of a tensor, and of all
_MOST_BYTES, _MOST_BYTES_OF_ALL = 2**20, 2**22
_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# recorders by the thread whose loop they follow
_recorders: dict[int, StepRecorder] = {}


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
    # numbers of the tensors that came out, by their places; -1 for parameters
    results: dict[Any, int] = field(default_factory=dict)
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
    shapes: Any = ()  # of what a model was first called with, as `Batch.shapes`
    keeps_gradients: bool = False  # whether those of the step before are there when a model is first called
    # whether a step has one call, which gives the loss, and begins without gradients
    is_plain: bool = False
    has_own_loss: bool = False  # whether no call gives a loss: the loop computes it
    ends_with_update: bool = False  # whether no model is called after the first update
    problem: str = ""  # why it cannot be run again; empty when it can

    def is_of(self, workloads: Sequence[Workload]) -> bool:
        """Return whether it is of these models and optimizers, in any order."""
        optimizers = {id(optimizer) for each in workloads for optimizer in each.optimizers}
        return {id(model()) for model in self.models} == {id(each.model) for each in workloads} and optimizers == {
            id(optimizer()) for optimizer in self.optimizers
        }


def tape_of(workloads: Sequence[Workload]) -> Tape | None:
    """Return the recorded step of the loop that trains models; None without one, or where one model's batch says as much.

    Raises:
        WorkloadError: the step of several models cannot be run again.
    """
    tape = workloads[0].tape
    if tape is None or not tape.is_of(workloads):
        return None
    gone = "a model is gone whose parameters it used" if any(given() is None for given in tape.given.values()) else ""
    problem = tape.problem or gone
    if len(workloads) == 1:
        one = workloads[0]
        is_known = tape.is_plain or one.loss_fn is not None or tape.shapes != Batch.of(one.batch).shapes
        return None if problem or is_known else tape
    if problem:
        names = " and ".join(each.name for each in workloads)
        raise WorkloadError(
            f"a step of the loop that trains {names} cannot be run by itself: {problem}; measure plans in the loop, as in "
            "%%memfit --checkpoint"
        )
    return tape


def own_step_of(workload: Workload) -> Tape | None:
    """Return the recorded step that a workload trains by, where it has no loss but the loop's own; None where it has one."""
    tape = tape_of([workload])
    return tape if tape is not None and tape.has_own_loss else None


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
            id(tensor): _Part(number, place)
            for number, model in enumerate(models)
            for place, tensor in enumerate(chain(model.parameters(), model.buffers()))
        }
        self._known: dict[int, _Alive] = {}
        self._gone: deque[_Alive] = deque()
        # with the version it had when it was first used; None where it has none
        self._given: dict[int, tuple[torch.Tensor, int | None]] = {}
        self._kept_bytes = 0
        self._entries: list[_Entry] = []
        self._numbers = 0
        self._within: _Entry | None = None  # the call or step under way
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
        calls = sum(isinstance(entry.what, _Call) for entry in whole)
        is_plain = calls == self._losses == 1 and not self._keeps_gradients
        kinds = [type(entry.what) for entry in whole]
        ends = _Update in kinds and _Call not in kinds[kinds.index(_Update) :]
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
        if self._within is not None and isinstance(self._within.what, _Update):
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

    def _call_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Entry | None:
        number = next((number for number, each in enumerate(self._models) if each is model), None)
        if self._within is not None:
            if isinstance(self._within.what, _Update):
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
        self._within = self._entry(_Call(number, model.training), (args, dict(kwargs)))
        self._leave()
        return self._within

    def _call_ended(self, entry: _Entry, output: Any) -> None:
        self._number(entry, _by_place(output))
        self._losses += loss_of(output) is not None

    def _update_begins(self, optimizer: Optimizer) -> None:
        number = next((number for number, each in enumerate(self._optimizers) if each is optimizer), None)
        if number is None:
            self._give_up(f"{type(optimizer).__name__} is new in this step")
        elif self._is_running:
            self._give_up("an optimizer steps within a function of torch, as in a backward pass")
        elif self._within is None:
            self._within = self._entry(_Update(number), ())
            self._leave()

    def _function_begins(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Entry:
        if func is torch.Tensor.__deepcopy__:  # with a table of all that is copied
            return self._entry(torch.clone, ((args[0].detach(),), {}))
        return self._entry(func, (args, kwargs))

    def _function_ended(self, entry: _Entry, func: Any, result: Any) -> None:
        if func in _BACKWARDS:
            self._note_gone(entry.before)
        tensors = tensors_in(result)
        if tensors or (result is None and any(isinstance(leaf, (_Value, _Part)) for leaf in entry.leaves)):
            self._number(entry, dict(enumerate(tensors)))
        else:
            self._forget(entry)  # a question about a tensor

    def _forget(self, entry: _Entry | None) -> None:
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

    def _entry(self, what: Any, arguments: Any) -> _Entry:
        self._note_gone(self._entries[-1].after if self._entries else [])
        leaves, structure = flatten(arguments)
        entry = _Entry(what, [self._leaf(what, leaf) for leaf in leaves], structure, _mode())
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
        return _Value(known.number)

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

    def _number(self, entry: _Entry, results: Mapping[Any, torch.Tensor]) -> None:
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


class Replay:
    """Runs a tape again, step after step."""

    def __init__(
        self,
        tape: Tape,  # without a problem
        models: Mapping[int, nn.Module],  # what stands for each of its models, by the number (`id`) of that one
        optimizers: Mapping[int, Optimizer],  # likewise
        # what stands for a tensor that the loop was given; by default itself, or a copy where the step writes to it
        stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None,
        batch: Batch | None = None,  # what the first call is given; by default what was recorded of it
    ) -> None:
        self._tape = tape
        self._stand_in = stand_in
        self._batch = {} if batch is None else _given_to_first_call(tape, batch)
        self._entries = tape.entries
        self._gradients = tape.gradients
        self._models = [models[id(model())] for model in tape.models]
        self._optimizers = [optimizers[id(optimizer())] for optimizer in tape.optimizers]
        self._parts = [[*model.parameters(), *model.buffers()] for model in self._models]
        self._values: dict[int, torch.Tensor] = {}
        self._give()
        # what outlives the step because a parameter holds it
        self._held = {number for entry in tape.entries if entry.what == _GRADIENT for number in entry.results.values()}
        # of those, what the loop does not let go of within the step: the parameters' alone, as techniques refuse or spare
        # gradients that somebody else has
        gone = {number for entry in tape.entries for number in (*entry.before, *entry.after)}
        self._of_parameters: dict[int, TensorWeakRef | None] = dict.fromkeys(self._held - gone)

    def _give(self) -> None:
        """Have what the loop is given there, also what it let go of in the step before."""
        for number, given in self._tape.given.items():
            tensor = self._batch.get(number, given())
            if number in self._values or tensor is None:
                continue
            if self._stand_in is not None:
                self._values[number] = self._stand_in(tensor)
            else:
                if tensor.is_meta:
                    tensor = torch.zeros_like(tensor, device=next(self._models[0].parameters()).device)
                is_written = number in self._tape.written
                self._values[number] = (
                    tensor.detach().clone().requires_grad_(tensor.requires_grad) if is_written else tensor
                )

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

    def _is_gone(self, number: int) -> bool:
        """Return whether a gradient is not there that was there in the loop, as when a plan has released it."""
        return number in self._held and self._value(number) is None

    def _value(self, number: int) -> torch.Tensor | None:
        reference = self._of_parameters.get(number)
        return self._values.get(number) if reference is None else reference()

    def _keep(self, number: int, tensor: torch.Tensor) -> None:
        if number in self._of_parameters:
            self._of_parameters[number] = TensorWeakRef(tensor)
        else:
            self._values[number] = tensor

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._values.pop(number, None)
            if number in self._of_parameters:
                self._of_parameters[number] = None

    def _run(self, entry: _Entry) -> None:
        what = entry.what
        if isinstance(what, _Update):
            self._optimizers[what.optimizer].step()
            return
        if any(isinstance(leaf, _Value) and self._is_gone(leaf.number) for leaf in entry.leaves):
            self._held.update(entry.results.values())
            return  # a loop leaves out what has no gradient
        args, kwargs = entry.structure.put([self._leaf(leaf) for leaf in entry.leaves])
        if isinstance(what, _Call):
            model = self._models[what.model]
            if model.training is not what.is_training:
                model.train(what.is_training)
            results = _by_place(model(*args, **kwargs))  # which may be fewer, as without a key-value cache
        else:
            results = dict(enumerate(tensors_in(what(*args, **kwargs))))
            if results and len(results) != len(entry.results):
                raise TraceError(f"{what} gives {len(results)} tensors, and gave {len(entry.results)} in the loop")
        del args, kwargs
        for place, number in entry.results.items():
            if number >= 0 and place in results:
                self._keep(number, results[place])

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, _Value):
            value = self._value(leaf.number)
            if value is None:
                raise TraceError("the loop uses an output of the model that there is none of under this plan")
            return value
        return self._parts[leaf.model][leaf.place] if isinstance(leaf, _Part) else leaf


def _given_to_first_call(tape: Tape, batch: Batch) -> dict[int, torch.Tensor]:
    first = next(entry for entry in tape.entries if isinstance(entry.what, _Call))
    leaves, structure = flatten((batch.args, dict(batch.kwargs)))
    if structure != first.structure:
        return {}
    pairs = zip(first.leaves, leaves, strict=True)
    return {leaf.number: value for leaf, value in pairs if isinstance(leaf, _Value) and isinstance(value, torch.Tensor)}


def _by_place(output: Any) -> dict[Any, torch.Tensor]:
    """Tensors in what a model returned, by their places: name or number of an item, and number within it."""
    if isinstance(output, Mapping):
        items: Iterable[tuple[Any, Any]] = output.items()
    else:
        items = enumerate(output) if isinstance(output, tuple | list) else ((0, output),)
    found = {(name, place): leaf for name, item in items for place, leaf in enumerate(flatten(item)[0])}
    return {place: leaf for place, leaf in found.items() if isinstance(leaf, torch.Tensor)}


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return what leads to a tensor; it keeps a parameter, which is another model's, from nobody."""
    return weakref.ref(tensor) if isinstance(tensor, nn.Parameter) else lambda: tensor


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, without values and memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _mode() -> tuple[bool, str, torch.dtype | None]:
    for device_type in reversed(device_types()):
        if torch.is_autocast_enabled(device_type):
            return torch.is_grad_enabled(), device_type, torch.get_autocast_dtype(device_type)
    return torch.is_grad_enabled(), "", None


def _enter(modes: ExitStack, has_graph: bool, device_type: str, dtype: torch.dtype | None) -> None:
    modes.enter_context(torch.set_grad_enabled(has_graph))
    if device_type:
        modes.enter_context(torch.autocast(device_type, dtype))
