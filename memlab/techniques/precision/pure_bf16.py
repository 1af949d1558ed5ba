"""`PureBf16`: a model whose weights are kept in bf16, with what is needed to update them in fp32.

Rules:

1. Within a call of the model, or of a part of it, and within a backward pass, weights are in bf16; outside they are the loop's.
   What it gives to a call and gets from it is in fp32.
2. Whatever the loop does with weights, before a call, after it, in hooks of the backward pass or after the step, is done with
   the fp32 masters (`Touch`). Graphs lead to the weights as they are kept, which are written to only as the loop does.
3. What the loop holds of weights (``p.data``, views, a state dict) follows them, as without memlab: such a master stays
   whole for as long (`Masters`).
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import RefusalError
from memlab.runtime.autocast import as_fp32, without_autocast
from memlab.runtime.backward import around_backward_passes, is_in_backward
from memlab.runtime.buckets import is_separable
from memlab.runtime.callers import is_in_hook
from memlab.runtime.graphs import Beginning, nodes_of
from memlab.runtime.hooks import CallHook, is_compiled
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.lifetimes import held_by_others, is_shared
from memlab.runtime.mechanisms import SeenInCalls, Turns, Updating
from memlab.runtime.touch import Touch
from memlab.runtime.tree import Lent, is_plain, tensors_in
from memlab.techniques.base import ModelCall
from memlab.techniques.precision.cast_outputs import CastOutputs
from memlab.techniques.precision.masters import Masters
from memlab.techniques.precision.own_form import OwnForm

# who asks for the gradient of one has another tensor, in fp32
_LEAF = "the forward pass {}, which would be one of its own in bf16"


@dataclass(frozen=True, eq=False)
class _Given:
    """A gradient that the loop has given a weight, and has elsewhere as well."""

    weight: torch.Tensor
    gradient: torch.Tensor  # the loop's
    made: torch.Tensor  # in bf16, which the weight has
    version: int  # of that, when it was made


class PureBf16(Updating, Turns, SeenInCalls):
    """Weights in bf16 for the model, and in fp32 for the loop."""

    changes_parameters = True

    def __init__(
        self,
        model: nn.Module,
        masters: Masters,  # of its weights, which are split here
        outputs: CastOutputs,  # of its calls
        # runs the first call of each part that the loop calls by itself: its name, itself, the call and its arguments
        first: Callable[..., Any],
        # context in which weights are on the device they are used on
        at_home: Callable[[Sequence[Any]], AbstractContextManager[Any]],
        aliases: int,  # of each weight, which are not the loop's
        undo: ExitStack,  # takes all of it back
    ) -> None:
        self._model = weakref.ref(model)
        self._masters, self._outputs = masters, outputs
        self._first = first
        self._at_home = at_home
        self._is_loops_turn = False  # whether it is the loop that goes on, and not memlab within a call
        self._inside: set[int] = set()  # threads in a call of the model, or of a part
        # parts that the loop has called by themselves, by whether the call had gradients and whether they were in training mode
        self._seen: defaultdict[tuple[bool, bool], MutableMapping[nn.Module, None]] = defaultdict(WeakIdKeyDictionary)
        # weights of batch norm stay beside its statistics: torch's kernels want both in one precision
        whole = {id(p) for part in model.modules() if isinstance(part, _BatchNorm) for p in part.parameters()}
        found = {id(tensor): tensor for tensor in (*model.parameters(), *convertible_buffers(model))}
        split = [
            each
            for each in found.values()
            if each.dtype is torch.float32 and id(each) not in whole and _is_numbers(each)
        ]
        held = held_by_others(split, aliases)
        self._given: dict[int, _Given] = {}  # by id of the weight
        self._is_refused = False  # a call is, because of these
        self._is_over = False
        self._began: Beginning | None = Beginning()  # None once a step has ended
        around_backward_passes(self._refuse_older, undo)
        undo.callback(self._give_gradients_back)
        for tensor in split:
            undo.callback(masters.join, tensor)
            masters.split(tensor, whole=id(tensor) in held)
        undo.callback(self._forget_dropped)
        undo.callback(self._end)
        self._touch = Touch(
            lambda: masters.tensors, self._read_by_loop, masters.keep, self._replaced_by_loop, self._gradient_given
        )
        undo.callback(self._leave_alone)
        self._own_form = OwnForm(masters, self.restored)
        self._own_form.serve(model, masters.tensors, undo)
        for part in () if is_compiled(model) else model.modules():
            is_split = any(p in masters for p in part.parameters())
            if is_split and part is not model and not isinstance(part, torch.jit.ScriptModule):
                CallHook(part, partial(self._part, weakref.ref(part)), breaks_graphs=True).install(undo)

    # -- calls ---------------------------------------------------------------------------------

    def run(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of the model, or of a part, in bf16."""
        _require_in_force(self)
        if self._began is not None:
            self._began.seen_here()
        with Lent(as_bf16, as_fp32) as lent:
            args, kwargs = lent.lend((args, dict(kwargs)))
            plain = [leaf for leaf in tensors_in((args, kwargs)) if not leaf.requires_grad]
            with self._others_lowered(), self.within(), without_autocast():
                output = call(*args, **kwargs)
        if any(leaf.requires_grad for leaf in plain):
            raise RefusalError("precision", _LEAF.format("has an argument require gradients"), "use --bf16")
        return self._outputs.cast(lambda leaf: self._as_loops(lent.own(leaf)), output)

    def _as_loops(self, leaf: Any) -> Any:
        """An output as the loop gets it, whose backward pass is refused once weights are whole again."""
        output = as_fp32(leaf)
        if isinstance(output, LazyTensor):  # to ask for its graph would compute it
            return output if output is leaf else output.with_gradient(self._refused_later)
        if output is not leaf and leaf.requires_grad and leaf.is_leaf and not isinstance(leaf, nn.Parameter):
            raise RefusalError("precision", _LEAF.format("returns a leaf that requires gradients"), "use --bf16")
        return output if output is leaf else self._refused_later(output)

    def _refused_later(self, output: torch.Tensor) -> torch.Tensor:
        """Return values by which no gradient comes in once weights are whole again."""
        passed = output.view_as(output) if output.is_leaf and output.requires_grad else output
        if passed.grad_fn is not None:
            there = weakref.ref(self)  # a loss that the loop keeps keeps no weights
            passed.grad_fn.register_prehook(lambda _: _require_in_force(there()))
        return passed

    def _end(self) -> None:
        self._is_over = True

    def step_ended(self) -> None:
        """Weights are no longer what an older graph was computed with: torch itself says so."""
        self._began = None

    @contextmanager
    def _refuse_older(self, roots: Sequence[Any], _inputs: Sequence[Any] | None) -> Iterator[None]:
        """Refuse, before it begins, a backward pass of what was computed with weights that were whole."""
        began = self._began
        if began is not None:
            began.seen_here()
        older = () if began is None else filter(began.is_after, nodes_of(roots))
        ends = (getattr(following, "variable", None) for node in older for following, _ in node.next_functions)
        if any(end in self._masters for end in ends):
            raise RefusalError(
                "precision",
                "this was computed before pure bf16 came, with weights in fp32",
                "compute it again, or have pure bf16 come after backward()",
                in_loop=True,
            )
        yield

    @contextmanager
    def _others_lowered(self) -> Iterator[None]:
        """Weights that came to the model later, by the loop or for one call (`functional_call`), in bf16 for a call."""
        model = None if self._inside else self._model()
        own = [
            (part._parameters, name, tensor)
            for part in (() if model is None else model.modules())
            if not isinstance(part, _BatchNorm)
            for name, tensor in part._parameters.items()
            if tensor is not None and tensor.dtype is torch.float32 and tensor not in self._masters
        ]
        lowered: list[Any] = [tensor.bfloat16() for _, _, tensor in own]
        try:
            for (table, name, _), low in zip(own, lowered, strict=True):
                table[name] = low
            yield
        finally:
            for (table, name, tensor), low in zip(own, lowered, strict=True):
                if table.get(name) is low:
                    table[name] = tensor

    @contextmanager
    def within(self) -> Iterator[None]:
        """Context in which this thread is in a call of the model, or of a part of it."""
        thread = threading.get_ident()
        is_outermost = thread not in self._inside
        self._inside.add(thread)
        try:
            yield
        finally:
            if is_outermost:
                self._inside.discard(thread)

    def _part(
        self, there: weakref.ref[nn.Module], call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A call of a part: by the model, by a backward pass that runs it again, or by the loop."""
        is_within = threading.get_ident() in self._inside
        if not is_within and is_in_backward():
            self._lend_to_backward()
            # what it is given tells who had called it
            given = {leaf.dtype for leaf in tensors_in((args, kwargs)) if leaf.is_floating_point()}
            is_within = torch.bfloat16 in given or torch.float32 not in given
        part = there()
        if is_within or part is None:
            return call(*args, **kwargs)
        is_loops_turn = self._is_loops_turn
        self.taken_over()
        try:
            seen = self._seen[torch.is_grad_enabled(), part.training]
            if part in seen:
                return self.run(call, args, kwargs)
            output = self._first(type(part).__name__, part, call, args, kwargs)
            seen[part] = None
            self.was_reached = True
            return output
        finally:
            if is_loops_turn:
                self.handed_back()

    # -- whose turn it is ----------------------------------------------------------------------

    def taken_over(self) -> None:
        """The model goes on, or the plan is about to change."""
        self._leave_alone()
        if not self._is_models():
            with deferred_interrupts(), torch.no_grad(), temporarily_clear_interpreter_stack():
                self._masters.settle()

    def handed_back(self) -> None:
        """The loop goes on."""
        self._is_loops_turn = True
        self._touch.watch()

    def _leave_alone(self) -> None:
        self._is_loops_turn = False
        self._touch.leave()

    def _lend_to_backward(self) -> None:
        """Run what a backward pass runs again as a call is run, until the pass is over."""
        if self._is_loops_turn:
            self._leave_alone()
            Variable._execution_engine.queue_callback(self.handed_back)

    def _is_models(self, frame: FrameType | None = None) -> bool:
        """Return whether this thread is within the model or a backward pass, which compute with weights as they are kept."""
        if threading.get_ident() in self._inside:
            return True
        return is_in_backward() and not (frame is not None and is_in_hook(frame))

    # -- what the loop sees --------------------------------------------------------------------

    def _read_by_loop(self, tensor: torch.Tensor, frame: FrameType) -> torch.Tensor | None:
        if self._is_models(frame) or torch._C._are_functorch_transforms_active():
            return None
        return self._masters.values(tensor)

    def moments_coming(self, *_optimizer_and_state: Any) -> None:
        """An optimizer is about to load moments, which torch casts to the dtype that weights say they have."""
        self._touch.say_own_dtype()

    def _replaced_by_loop(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        with torch.no_grad():
            return self._masters.replace(tensor, values)

    def _gradient_given(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        made = gradient.to(tensor.dtype)
        if made is not gradient and is_shared(gradient):
            self._given[id(tensor)] = _Given(tensor, gradient, made, made._version)
        return made

    def _forget_dropped(self) -> None:
        if not self._is_refused:  # another plan that goes as well may have made others of them
            self._given = {key: each for key, each in self._given.items() if each.weight.grad is each.made}

    def refuses_call(self) -> bool:
        """Return whether a backward pass would add to gradients that the loop has elsewhere, and not be seen there."""
        self._forget_dropped()
        self._is_refused = bool(self._given)
        return self._is_refused

    def _give_gradients_back(self) -> None:
        for each in self._given.values():
            if each.made._version != each.version:
                each.gradient.copy_(each.made)
            each.weight.grad = each.gradient
        self._given.clear()

    @contextmanager
    def restored(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which tensors are their masters, for the loop's own code: moves, casts, loading."""
        split = [tensor for tensor in tensors if tensor in self._masters and tensor.dtype is not torch.float32]
        with deferred_interrupts(), self._at_home(split), self.updated(split):
            yield

    def around_update(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> AbstractContextManager[None]:
        if not is_separable(optimizer) and any(p.grad is not None and p.grad.requires_grad for p in parameters):
            raise RefusalError(
                "precision",
                f"{type(optimizer).__name__} may differentiate gradients (create_graph), whose graph is of bf16 parameters",
                "use --bf16",
            )
        return self.updated(parameters)

    @contextmanager
    def updated(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which tensors are their masters, on the device where they are."""
        self._touch.leave(tensors)
        try:
            with self._masters.in_place(tensors):
                yield
        finally:
            if self._is_loops_turn:
                self._touch.watch([tensor for tensor in tensors if tensor in self._masters])


def _require_in_force(pure: PureBf16 | None) -> None:
    """Refuse what comes when weights are whole again."""
    if pure is None or pure._is_over:
        raise RefusalError(
            "precision",
            "this was computed with weights in pure bf16, which was taken off before its backward pass",
            "compute it again, or take pure bf16 off after backward()",
        )


def as_bf16(leaf: Any) -> Any:
    """An input as a model in bf16 gets it."""
    return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf


def _is_numbers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is what its numbers are: quantised weights say that they are fp32, and are not."""
    if tensor.is_meta:
        return False
    return is_plain(tensor) or isinstance(tensor, FakeTensor) or type(tensor).__name__ == "DTensor"


def convertible_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Floating-point buffers that are saved with the model.

    Tables computed on the fly (rotary frequencies) and running statistics keep their precision, as in
    Transformers' own loading.
    """
    found = {
        id(buffer): buffer  # once, also where several modules hold it
        for module in model.modules()
        if not isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    yield from found.values()
