"""Parameters of repeated blocks off the device, visiting it block by block; gradients leave it as they are made.

Numbered rules of the mechanism:

1. The large parameters of repeated blocks rest in host memory beside a GPU, or in files beside the CPU
   (`block_streaming`). What is outside of blocks stays (embeddings, norms, heads), as do parameters that blocks share with
   the rest, and the model's first ones, by which loops find out its device.
2. A gradient goes where its parameter rests as soon as it is complete, also that of an alias (accumulation, rescue).
   Further backward passes add to it: on the CPU where it is, on CUDA on the device, and it leaves again.
3. For the update, parameters and gradients visit the device in small buckets (`at_home`), and the results are written
   to where they rest. Optimizer state is not touched: it stays on the device, or goes with ``--offload optimizer``.
4. Parameters are the same objects throughout. Between uses they hold their values, on the device they rest on; beside a GPU
   the loop's own code finds them there (`lending`).

Exact: bytes are copied, and computed with on the device as always.

Known limitations: on a GPU ``torch.autograd.grad`` with respect to parameters at rest finds no graph there. Blocks must be called
as modules: weights that a model reads past a block's forward are used where they rest. What is written to ``weight.data``
within a forward is lost.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.errors import RefusalError
from memlab.plan import Offloaded, Plan, Precision
from memlab.runtime.backward import is_added, is_in_backward
from memlab.runtime.buckets import counts_on_device, group_of, is_separable
from memlab.runtime.callers import module_of
from memlab.runtime.lifetimes import called_while_alive, gradient_is_held, held_by_others, is_saved, storage_of
from memlab.runtime.loop_reading import made_one_graph, of_one_graph
from memlab.runtime.mechanisms import LoopChecks, OwnMemory, SeenInCalls, StateForm, Visiting
from memlab.runtime.modules import repeated_blocks
from memlab.runtime.state_entries import State
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.runtime.touch import own_class
from memlab.runtime.workload import Workload
from memlab.techniques.base import HOLDS_GRADIENTS, Description, ModelCall, Reduces, Traits, process_count
from memlab.techniques.offload.block_streaming import (
    BlockStreaming,
    ParameterCopies,
    can_rest,
    slots_of,
)
from memlab.techniques.offload.lending import Lending, set_gradient
from memlab.techniques.offload.spill import PLAIN, Offload, Spill, is_spilled

# what in a loop has the values of weights
_HELD = "as p.data, in a state dict, as NumPy arrays, in a graph that is still alive"

Optimizer = torch.optim.Optimizer
Parameter = nn.Parameter


class OffloadParams(Offload, Visiting, LoopChecks, SeenInCalls, OwnMemory):
    """Stream the parameters of repeated blocks; see the module for the rules and the known limitations."""

    what = Offloaded.PARAMS
    traits = Traits(Reduces.MODEL_STATES, needs_uncompiled=True)
    was_reached = True
    descriptions = (
        Description(
            flags="--offload params",
            saves="weights and gradients of repeated blocks: 8 → ~0 bytes per parameter",
            costs="each block is copied to the device twice a step, its gradient back once",
            exactness="bit for bit",
            gives_nothing="the peak is outside of blocks: embeddings, head, loss; refused where no block repeats",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._spill: Spill | None = None
        self._lending: Lending | None = None  # beside a GPU
        self._state: list[StateForm] = []  # likewise; on the CPU parameters rest on the very device they are used on
        # parameters that are on the device for an update or a change of state
        self._visiting: frozenset[int] = frozenset()
        # once it is attached
        self._streaming: BlockStreaming
        self._gradients: _Gradients

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        # pure bf16 makes other data of parameters, and must find them on their device
        return super().setting(plan), plan.precision is Precision.PURE_BF16

    # -- whether it applies --------------------------------------------------------------------

    def check(self, workload: Workload) -> None:
        self._tier(workload.device)
        self._check_parameters_move(workload)
        if process_count() > 1:
            raise RefusalError(
                self.field,
                "several processes train together, and reduce gradients that must stay on the device for it",
                "use the engine's own sharding with offload (FSDP2, ZeRO-3)",
            )
        blocks = repeated_blocks(workload.model)
        if not blocks:
            raise RefusalError(
                self.field,
                f"params: {workload.name} repeats no block (a ModuleList or Sequential of several modules that have parts, all of one class)",
                "use --offload optimizer,activations",
            )
        if self.host.predecessor(self) is None and any(
            gradient_is_held(p) for block in blocks for p in block.parameters()
        ):
            raise RefusalError(
                self.field,
                f"params: {HOLDS_GRADIENTS}, which would be others off the device",
                "use --offload optimizer,activations, or drop them first (optimizer.zero_grad())",
            )
        if self.host.predecessor(self) is None and not _movable(workload.model, blocks):
            raise RefusalError(
                self.field,
                f"params: no parameter in the blocks of {workload.name} is large enough ({SMALL_ELEMENTS} elements) "
                "and its own to be moved",
                "use --offload optimizer,activations",
            )

    def check_loop(self, workload: Workload, frame: FrameType) -> None:
        if name := made_one_graph(frame, workload.model, calls_it=True):
            raise RefusalError(self.field, *of_one_graph(name, workload.name))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise RefusalError(
                self.field,
                "LBFGS updates all parameters at once and evaluates the loss several times in a step",
                "use torch.optim.AdamW with --offload params, or LBFGS without it",
            )

    # -- in and out ----------------------------------------------------------------------------

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        model = workload.model
        blocks = repeated_blocks(model)
        movable = _movable(model, blocks)
        held = held_by_others(movable, self.host.aliases())
        parameters = [parameter for parameter in movable if id(parameter) not in held]
        if not parameters:
            raise RefusalError(
                self.field,
                f"params: the loop holds the values of all weights in the blocks of {workload.name} ({_HELD})",
                "use --offload optimizer,activations, or let go of them first (del)",
            )
        if len(parameters) < len(movable):
            self.notes.append(
                f"{len(movable) - len(parameters)} of {len(movable)} weights stay where they are: the loop holds their values ({_HELD})"
            )
        self._parameters = parameters
        link = ParameterCopies(parameters[0].device)
        self._spill = Spill(self._tier(workload.device), say=self.notes.once)
        self._gradients = _Gradients(self._spill, link)
        self._streaming = BlockStreaming(blocks, link, self._spill, self._gradients.watch)
        self._gradients.serve(self._streaming)
        undo.callback(self._gradients.end)
        for parameter in parameters:
            undo.callback(self._bring_back, parameter)
            # a backward pass is to find there what the loop has built on it before the plan came; it rests afterwards
            if not (link.overlaps and is_saved(parameter)):
                self._send_away(parameter)
        for block in blocks:
            self._streaming.stream(block, undo)
        undo.callback(self._leave_broken_pass)
        if link.overlaps:
            self._lending = Lending(
                [] if self.plan.precision is Precision.PURE_BF16 else parameters,  # which looks after them itself
                parameters,
                self._streaming,
                self._send_away,
                self._gradients.send,
            )
            self._gradients.is_held = self._lending.holds_gradient
            undo.callback(self._lending.taken_over)
            self._state = [_StateAtHome(link.device, self._is_away)]

    def attach_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        if not is_separable(optimizer):
            self.notes.append(
                f"{type(optimizer).__name__} is not known to update each parameter independently: all of them visit the "
                "device together for its step"
            )

    @cached_property
    def _held(self) -> set[int]:
        """`id`s of parameters at rest whose values the loop has as well, when the first comes back."""
        return held_by_others(self._parameters, self.host.aliases() + 1)

    def _send_away(self, parameter: Parameter) -> None:
        gradient = parameter.grad
        stored = None if gradient is None else self._streaming.spill.store(gradient)
        parameter.grad = None
        self._streaming.send_away(parameter)
        parameter.grad = stored

    def _bring_back(self, parameter: Parameter) -> None:
        stored = self._streaming.resting(parameter)
        link, gradient = self._streaming.link, parameter.grad
        if stored is None:  # it has other data, or the loop holds what it was lent
            if gradient is not None and gradient.device != parameter.device == link.device:
                set_gradient(parameter, link.fetch(gradient).wait())
            return
        link.settle()
        self._streaming.bring_back(parameter, is_held=stored.device == link.device and id(parameter) in self._held)
        link.settle()

    # -- passes --------------------------------------------------------------------------------

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Any) -> Any:
        self._leave_broken_pass()
        try:
            with self._streaming.call():
                return call(*args, **kwargs)
        finally:
            self._streaming.pass_ended()

    evaluate = forward

    def _leave_broken_pass(self) -> None:
        """Put to rest what a backward pass that broke off has left on the device; within one nothing."""
        if not is_in_backward():
            self._streaming.pass_ended()
            self._gradients.pass_ended()

    # -- updates -------------------------------------------------------------------------------

    @contextmanager
    def at_home(self, parameters: Sequence[Parameter], *, updates: bool = True) -> Iterator[None]:
        self._leave_broken_pass()
        if not updates and not self._streaming.link.overlaps:  # they rest on the very device they are used on
            yield
            return
        visits: list[_Visit] = []
        before = self._visiting
        if self._lending is not None:
            self._lending.leave(parameters)
        try:
            for parameter in parameters:
                stored = self._streaming.resting(parameter)
                if stored is not None:
                    visits.append(_Visit(parameter, stored, self._streaming.link, updates=updates))
                    self._visiting = self._visiting | {id(parameter)}
            yield
        finally:
            self._visiting = before
            self._end(visits)
            if self._lending is not None:
                self._lending.visit_over(parameters)

    def _end(self, visits: list[_Visit]) -> None:
        """Write everything to where it rests; when interrupted, first finish, then raise."""
        try:
            _leave_all(visits)
        except BaseException:
            _leave_all(visits)
            raise
        finally:
            self._streaming.link.settle()

    def brings(self) -> Iterator[object]:
        yield from (self, self._lending, *self._state)

    def _is_away(self, parameter: Parameter) -> bool:
        return self._streaming.resting(parameter) is not None or id(parameter) in self._visiting

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if self._streaming.link.overlaps and _is_scaled_by_the_loop():
            raise RefusalError(
                self.field,
                "params: the loop's own GradScaler has unscaled gradients that rest on the host without waiting for the scale",
                "use --fp16 in place of the loop's scaler, or bf16",
            )
        if self._lending is not None:
            self._lending.rest_again()

    @property
    def host_bytes(self) -> int:
        return self._spill.peak_bytes if self._spill else 0


class _Visit:
    """A parameter and its gradient, on the device for an update."""

    def __init__(self, parameter: Parameter, stored: torch.Tensor, link: ParameterCopies, *, updates: bool) -> None:
        self._parameter, self._stored, self._link = parameter, stored, link
        self._updates = updates
        self._gradient = self._kept = gradient = parameter.grad
        self._data = link.fetch(stored).wait()
        # one that has just been made is on the device still
        self._is_new = gradient is not None and gradient.device == self._data.device != stored.device
        self._brought = gradient if updates else None
        if self._brought is not None and not self._is_new:
            self._brought = link.fetch(self._brought).wait()
        self._version = -1 if self._brought is None else self._brought._version
        parameter.grad = None
        parameter.data = self._data
        parameter.grad = self._brought

    def leave(self) -> None:
        """End the stay on the device; may be called again when it was interrupted."""
        parameter, stored = self._parameter, self._stored
        if parameter.device != self._data.device:  # the loop has moved it
            return
        if storage_of(parameter) != storage_of(stored):
            self._kept = self._at_rest(parameter.grad)
            if self._updates:
                self._link.send(parameter.data, stored)
            # autograd leaves a new one beside a parameter at rest; `grad` takes it only from one on the same device
            parameter.grad = self._kept if self._is_new else None
            parameter.data = stored
        if not self._is_new:
            parameter.grad = self._kept

    def _at_rest(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if not self._updates:
            return self._gradient
        if gradient is None or self._gradient is None or self._brought is None:
            return None
        # fused kernels unscale it, foreach SGD adds momentum to it
        if gradient is not self._gradient and gradient._version != self._version:
            self._link.send(gradient, self._gradient)
        return self._gradient


def _leave_all(visits: list[_Visit]) -> None:
    while visits:
        visits[-1].leave()
        visits.pop()


# --- gradients ------------------------------------------------------------------------------------


class _Gradients:
    """Sends gradients where their parameters rest, as they are made."""

    def __init__(self, spill: Spill, link: ParameterCopies) -> None:
        self._spill = spill
        self._link = link
        self._watched: Any = WeakTensorKeyDictionary()  # hooks by parameter; aliases take theirs with them
        self._aside: list[tuple[Parameter, torch.Tensor]] = []
        self._streaming: BlockStreaming  # where the parameters rest, see `serve`
        # whether the loop holds a gradient, which stays then
        self.is_held: Callable[[Parameter], bool] = gradient_is_held
        self._adding = _OneAtATime()

    def serve(self, streaming: BlockStreaming) -> None:
        """Have gradients follow the parameters that it streams."""
        self._streaming = streaming
        streaming.backward_ended = self.pass_ended

    def watch(self, parameter: Parameter) -> None:
        """Have the gradients of a parameter, or an alias of one, leave; harmless when that is so already, and of a view, which gets none."""
        if parameter in self._watched or not parameter.is_leaf:
            return
        complete = called_while_alive(self._is_complete)
        handles = [parameter.register_post_accumulate_grad_hook(complete)]  # type: ignore[no-untyped-call]
        if self._link.overlaps:
            comes = partial(called_while_alive(self._comes), weakref.ref(parameter))
            handles.append(parameter.register_hook(comes))  # type: ignore[no-untyped-call]
        self._watched[parameter] = handles

    def end(self) -> None:
        """Take all hooks away."""
        for handles in list(self._watched.values()):
            for handle in handles:
                handle.remove()
        self._watched.clear()

    def pass_ended(self) -> None:
        """A backward pass is over; what was set aside in one that broke off comes back."""
        self._adding = _OneAtATime()
        while self._aside:
            parameter, gradient = self._aside.pop()
            if parameter.grad is None:
                set_gradient(parameter, gradient)

    def _comes(self, referred: weakref.ref[Parameter], gradient: torch.Tensor | None) -> None:
        """Bring a gradient before another is added to it: autograd cannot add across devices."""
        parameter = referred()
        if parameter is None or gradient is None or not is_added(torch._C._current_autograd_node()):
            return
        self._adding.begin()
        if parameter.grad is None:
            return
        if gradient.device != self._link.device:  # gathered by accumulation; what it is added to may be on its way
            self._link.settle()
        if parameter.grad.device == gradient.device:
            return
        self._aside.append((parameter, parameter.grad))
        parameter.grad = None
        self._streaming.settles_after_backward()

    def _is_complete(self, parameter: Parameter) -> None:
        """A gradient is complete for this backward pass."""
        try:
            self._put_to_rest(parameter)
        finally:
            self._adding.end()

    def _put_to_rest(self, parameter: Parameter) -> None:
        is_held = self.is_held(parameter)
        gradient, before = parameter.grad, self._taken_from_aside(parameter)
        if gradient is None or gradient.requires_grad or type(gradient) not in PLAIN:
            return
        if gradient.layout is not torch.strided or (before is None and self._rests(gradient)):
            return
        if before is not None:
            gradient = self._sum(gradient, before)
        if is_held or before is gradient or self._streaming.resting(parameter) is None:
            set_gradient(parameter, gradient)
            return
        stored = self._spill.empty_like(gradient) if before is None else before
        self._link.send(gradient, stored)
        parameter.grad = stored
        self._streaming.settles_after_backward()

    def _sum(self, gradient: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Both on the device, in the one that was there before where that is there: the loop may hold it."""
        there = self._link.device
        gradient, other = (t if t.device == there else self._link.fetch(t).wait() for t in (gradient, before))
        return before.add_(gradient) if other is before else gradient.add_(other)

    def _rests(self, gradient: torch.Tensor) -> bool:
        return gradient.device != self._link.device or is_spilled(gradient.untyped_storage())

    def send(self, parameter: Parameter) -> None:
        """Put the gradient of a parameter at rest there, whatever reads it first waits for it."""
        gradient = parameter.grad
        assert gradient is not None
        stored = self._spill.empty_like(gradient)
        self._link.send(gradient, stored)
        self._link.settle()
        parameter.grad = stored

    def _taken_from_aside(self, parameter: Parameter) -> torch.Tensor | None:
        for at, (other, gradient) in enumerate(self._aside):
            if other is parameter:
                del self._aside[at]
                return gradient
        return None


class _OneAtATime:
    """Autograd adds gradients of the host and of a GPU to one parameter in two threads, where a loop uses it beside its model."""

    # a backward pass that breaks off while it adds does not come to the end
    _LONGEST_SECONDS = 1.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = -1

    def begin(self) -> None:
        """A thread is about to add."""
        thread = threading.get_ident()
        if self._thread != thread and self._lock.acquire(timeout=self._LONGEST_SECONDS):
            self._thread = thread

    def end(self) -> None:
        """End it; harmless when done."""
        if self._thread == threading.get_ident():
            self._thread = -1
            self._lock.release()


# --- which parameters -----------------------------------------------------------------------------


def _movable(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Parameter]:
    """Parameters of blocks that can leave: large, their own storage's only tensor, and of no use elsewhere."""
    inside = {id(module) for block in blocks for module, _ in slots_of(block)}
    outside = {id(p) for module in model.modules() if id(module) not in inside for p in module._parameters.values()}
    everything = list(model.parameters())
    first = {id(everything[0]), id(next(p for p in everything if p.requires_grad))}
    storages = [storage_of(p) for p in everything if own_class(p) in PLAIN]
    return [
        p
        for p in {id(p): p for block in blocks for p in block.parameters()}.values()
        if id(p) not in outside | first and can_rest(p, everything[0].device) and storages.count(storage_of(p)) == 1
    ]


# --- state and scalers ----------------------------------------------------------------------------


class _StateAtHome(StateForm):
    """State on the device its parameter is used on: `load_state_dict` puts it where the parameter rests."""

    def __init__(self, home: torch.device, is_away: Callable[[Parameter], bool]) -> None:
        self._home, self._is_away = home, is_away

    def pack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        if not self._is_away(parameter):
            return state
        on_device = counts_on_device(group_of(optimizer, parameter))
        return {name: _placed(value, self._home, on_device=on_device) for name, value in state.items()}


def _placed(value: Any, home: torch.device, *, on_device: bool) -> Any:
    moves = isinstance(value, torch.Tensor) and (value.dim() > 0 or on_device) and not hasattr(value, "is_paged")
    return value.to(home) if moves else value


def _is_scaled_by_the_loop() -> bool:
    """Return whether a `GradScaler` calls the step."""
    return any(module_of(frame) == "torch.amp.grad_scaler" for frame, _ in walk_stack(sys._getframe(1)))
