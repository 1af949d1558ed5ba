"""Number formats of a training step: fp32, tf32, fp16 with loss scaling, bf16, and pure bf16.

fp16 runs the forward under autocast and returns its outputs in fp32; the loop needs no `GradScaler` (`loss_scale`).

Pure bf16 keeps each parameter as bf16 for forward and backward, and the 16 bits it lacks beside it:
together they are the fp32 master, bit for bit, which is what the optimizer updates. Nothing is
rounded away, and switching off gives back the masters. Moments are kept in bf16, rounded
stochastically so that small changes are not lost. Parts of the model that the loop calls by themselves
get and give what the model does: fp32 outside, bf16 within.

Sources: https://docs.pytorch.org/docs/stable/amp.html; Micikevicius et al., "Mixed Precision Training",
https://arxiv.org/abs/1710.03740; Zamirai et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from memlab.errors import MemlabError, RefusalError, first_line
from memlab.plan import Plan, Precision
from memlab.runtime.autocast import without_autocast
from memlab.runtime.hooks import CallHook, is_compiled
from memlab.runtime.interrupts import uninterrupted
from memlab.runtime.optimizer_step import is_separable
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.rng import Randomness
from memlab.runtime.state_layers import at_home
from memlab.runtime.surroundings import Effect, Snapshot
from memlab.runtime.tree import flatten, runs_later, tensors_in
from memlab.runtime.workload import Workload
from memlab.techniques.base import ModelCall, State, Technique
from memlab.techniques.description import Description
from memlab.techniques.precision.loss_scale import LossScale, scaled_gradient
from memlab.techniques.precision.moments import join_master, round_stochastically, split_master
from memlab.techniques.precision.own_form import OwnForm

_AUTOCAST_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


class PrecisionChoice(Technique):
    """Run forward and backward in another number format.

    Tolerances over 100 steps against fp32 are stated and tested in ``tests/techniques/test_precision.py``.

    Known limitations: a loop that runs under autocast itself keeps its own precision (said in the notes). Only the first call is
    looked at for what does not run in half precision.
    """

    field = "precision"
    descriptions = (
        Description(
            flags="--bf16",
            saves="about half of the activations; parameters, gradients and moments stay in fp32",
            costs="none where the hardware supports it (it is faster there); slower elsewhere",
            exactness="gradients within a few % of fp32",
            gives_nothing="16-bit copies of the weights take more than activations save: small batches, large models",
        ),
        Description(
            flags="--fp16",
            saves="as --bf16",
            costs="as --bf16; steps that overflow are skipped while the scale settles",
            exactness="gradients within 1 % of fp32, with loss scaling",
            gives_nothing="as --bf16",
        ),
        Description(
            flags="--precision tf32",
            saves="nothing: it is for speed",
            costs="faster matrix products",
            exactness="10 bits of mantissa in products",
            gives_nothing="always: it saves time, not memory; refused without CUDA",
        ),
        Description(
            flags="--precision pure-bf16",
            saves="parameters, gradients and moments: 16 → 10 bytes per parameter",
            costs="an fp32 copy of one parameter at a time",
            exactness="weights return to fp32 bit for bit, moments are rounded",
            gives_nothing="one embedding is most of the model: its fp32 copy is the peak",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._scaler = LossScale()
        self._masters: dict[int, torch.Tensor] = {}
        self._own_form: OwnForm | None = None
        self._inside: set[int] = set()  # threads in a call of the model, or of a part
        self._to_look_at: nn.Module | None = None  # until the first call is over
        self._seen_parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that the loop has called by themselves
        self._name = ""
        self._generators: dict[torch.device, torch.Generator] = {}
        # within a step: what a bucket's moments were packed in before, which they are again, so that they stay where they are
        self._is_stepping = False
        self._packed: dict[int, State] = {}

    @property
    def changes_state(self) -> bool:  # type: ignore[override]
        return self._is(Precision.PURE_BF16)

    state_per_step = True

    @property
    def may_skip(self) -> bool:  # type: ignore[override]
        return self._is(Precision.FP16)

    def check(self, workload: Workload) -> None:
        precision = self.plan.precision
        # pure bf16 may be what is to be changed
        before = Technique(self.plan) if self.predecessor is None else self.predecessor
        dtypes = {before.canonical_dtype(p) for p in workload.model.parameters() if p.requires_grad}
        if precision is Precision.TF32 and workload.device.type != "cuda":
            raise RefusalError(self.field, "tf32 needs a CUDA GPU of the Ampere generation or newer", "use --bf16 here")
        if precision in (Precision.FP16, Precision.BF16, Precision.PURE_BF16) and dtypes - {torch.float32}:
            found = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes - {torch.float32}))
            raise RefusalError(
                self.field,
                f"--{'precision ' if precision is Precision.PURE_BF16 else ''}{precision} needs float32 parameters, "
                f"{workload.name} has {found} ones",
                "call model.float() and make the optimizer anew, or leave the precision as it is",
            )
        inner = islice(workload.model.named_modules(), 1, None)  # hooks of the model itself are outside of the scale
        hooked = next((name for name, part in inner if part._backward_hooks or part._backward_pre_hooks), None)
        if precision is Precision.FP16 and hooked is not None:
            raise RefusalError(
                self.field,
                f"{workload.name} has a backward hook ({hooked}), which would be given gradients multiplied by the loss scale",
                "use --bf16",
            )
        recurrent = any(isinstance(module, nn.RNNBase) for module in workload.model.modules())
        if precision is Precision.FP16 and workload.device.type == "cpu" and recurrent:
            raise RefusalError(self.field, "the CPU has no fp16 kernels for recurrent layers", "use --bf16 here")

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS) and self.plan.precision in (Precision.FP16, Precision.PURE_BF16):
            raise RefusalError(
                self.field,
                f"{self.plan.precision} cannot serve LBFGS, which evaluates the model inside its step",
                "use --bf16",
            )

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._name = workload.name
        if self.plan.precision in (Precision.FP16, Precision.BF16, Precision.PURE_BF16):
            self._to_look_at = workload.model
            undo.callback(setattr, self, "_to_look_at", None)
        match self.plan.precision:
            case Precision.FP32:
                _set_matmul_precision("highest", undo)
            case Precision.TF32:
                _set_matmul_precision("high", undo)
            case Precision.FP16:
                self._scaler.watch(workload, self._note_once, undo)
            case Precision.PURE_BF16:
                self._split_parameters(workload.model, undo)

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        model, self._to_look_at = self._to_look_at, None
        if model is None:
            return self._lowered(call, args, kwargs)
        try:
            return self._first(self._name, model, call, args, kwargs)
        except RefusalError:
            self._to_look_at = model
            raise

    def _first(
        self, name: str, model: nn.Module, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The first call of a model, or by the loop of a part, whose errors may be those of half precision.

        Raises:
            RefusalError: the model does not run in it; nothing of the call is left behind.
        """
        before = Snapshot(model)
        randomness = Randomness(next(model.parameters()).device, before.generators)
        try:
            output = self._lowered(call, args, kwargs)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, MemlabError):
                raise
            said = first_line(error)
        else:
            left = self._left_unscaled(before.effects())
            later = None if self._is(Precision.PURE_BF16) else _computing_later(output, self.plan.precision)
            if left is None and later is None:
                return output
            said = f"its gradients are scaled at the output, and {left} is past it" if later is None else later
        before.restore(strict=False)
        randomness.restore()
        # within: parts leave their inputs alone as well
        with self._restored([*model.parameters(), *model.buffers()]), self._within():
            call(*args, **kwargs)  # where that fails as well, the error is the model's own
        before.restore(strict=False)
        randomness.restore()
        raise RefusalError(
            self.field, f"{name} does not run in {self.plan.precision}: {said}", "leave its precision as it is"
        )

    def _left_unscaled(self, effects: Mapping[str, Effect]) -> str | None:
        """Return where a tensor is left that gradients come in by past the output."""
        for name, effect in effects.items() if self._is(Precision.FP16) else ():
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flatten(effect.value)[0]):
                return name
        return None

    def _lowered(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        match self.plan.precision:
            case Precision.FP16 | Precision.BF16:
                return self._autocast(call, args, kwargs)
            case Precision.FP32:
                with without_autocast():
                    return call(*args, **kwargs)
            case Precision.PURE_BF16:
                return self._in_bf16(call, args, kwargs)
        return call(*args, **kwargs)

    def evaluate(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is(Precision.PURE_BF16):
            return self._in_bf16(call, args, kwargs)
        return call(*args, **kwargs)

    def _is(self, precision: Precision) -> bool:
        return self.plan.precision is precision

    def _autocast(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        dtype = _AUTOCAST_DTYPES[self.plan.precision]
        device_type = _device_type(args, kwargs)
        is_own = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is dtype
        if self._is(Precision.FP16):
            self._scaler.call_begins(is_own=is_own)
        if is_own:
            self._note_once(f"the loop already runs under autocast ({self.plan.precision}); its own precision is kept")
            return call(*args, **kwargs)
        scale = self._scaler.scale if self._is(Precision.FP16) else 1.0
        if self._is(Precision.FP16):
            args, kwargs = self._scaler.entered((args, dict(kwargs)))
        with torch.autocast(device_type, dtype=dtype):
            output = call(*args, **kwargs)
        return _in_leaves(lambda leaf: scaled_gradient(_as_fp32(leaf), scale), output)

    def _in_bf16(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = tree_map(as_bf16, (args, dict(kwargs)))
        with self._within(), without_autocast():
            return _in_leaves(_as_fp32, call(*args, **kwargs))

    @contextmanager
    def _within(self) -> Iterator[None]:
        """This thread is in a call of the model, or of a part of it."""
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
        if not is_within and torch._C._current_graph_task_id() != -1:
            # what it is given tells who had called it
            given = {leaf.dtype for leaf in tensors_in((args, kwargs)) if leaf.is_floating_point()}
            is_within = torch.bfloat16 in given or torch.float32 not in given
        part = there()
        if is_within or part is None:
            return call(*args, **kwargs)
        if part in self._seen_parts:
            return self._in_bf16(call, args, kwargs)
        output = self._first(type(part).__name__, part, call, args, kwargs)
        self._seen_parts.add(part)
        return output

    def _note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def skips_step(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._is(Precision.FP16) and self._scaler.found_bad_gradients()

    def _split_parameters(self, model: nn.Module, undo: ExitStack) -> None:
        # weights of batch norm stay beside its statistics: torch's kernels want both in one precision
        whole = {id(p) for part in model.modules() if isinstance(part, _BatchNorm) for p in part.parameters()}
        tensors = [t for t in (*model.parameters(), *convertible_buffers(model)) if t.dtype is torch.float32]
        tensors = [t for t in tensors if id(t) not in whole]
        for tensor in tensors:
            undo.callback(self._join, tensor)
            high, self._masters[id(tensor)] = split_master(tensor.data)
            _set_data(tensor, high)
        self._own_form = OwnForm(self._whole, self._restored)
        self._own_form.serve(model, tensors, undo)
        for part in () if is_compiled(model) else model.modules():
            is_split = any(id(p) in self._masters for p in part.parameters())
            if is_split and part is not model and not isinstance(part, torch.jit.ScriptModule):
                CallHook(part, partial(self._part, weakref.ref(part))).install(undo)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor's master, where the tensor rests; None when it is in its place."""
        low = self._masters.get(id(tensor))
        if low is None or tensor.dtype is torch.float32:
            return None
        return join_master(tensor.data.to(low.device), low).to(tensor.device)

    @contextmanager
    def _restored(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """All masters in their places."""
        split: list[Any] = [t for t in tensors if id(t) in self._masters and t.dtype is not torch.float32]
        with uninterrupted(), at_home(self.host.techniques(), split, updates=True), self._with_masters(split):
            yield

    def canonical_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return torch.float32 if id(tensor) in self._masters else tensor.dtype

    @property
    def held_tensors(self) -> Sequence[torch.Tensor]:
        return tuple(self._masters.values())

    def _join(self, tensor: torch.Tensor) -> None:
        low = self._masters.pop(id(tensor), None)
        if low is not None:
            _set_data(tensor, _joined(tensor, low))

    def pack_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: State) -> State:
        before = self._packed.get(id(parameter), {})
        return {key: self._packed_moment(parameter, value, before.get(key)) for key, value in state.items()}

    def unpack_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: State) -> State:
        if self._is_stepping:
            resident = optimizer.state.get(parameter, {})
            self._packed[id(parameter)] = {key: value for key, value in state.items() if value is resident.get(key)}
        return {key: _unpacked_moment(parameter, value) for key, value in state.items()}

    def bucket_coming(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._is_stepping = True

    def bucket_updated(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._packed.clear()

    def buckets_over(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_stepping = False
        self._packed.clear()

    def _packed_moment(self, parameter: nn.Parameter, value: Any, before: torch.Tensor | None) -> Any:
        if not _is_moment(parameter, value, torch.float32):
            return value
        into = before if _is_moment(parameter, before, torch.bfloat16) else None
        return round_stochastically(value, self._generator(value.device), into)

    def _generator(self, device: torch.device) -> torch.Generator:
        # a generator of its own: the user's random numbers stay what they were
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]

    def around_update(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> AbstractContextManager[None]:
        if not self._is(Precision.PURE_BF16):
            return nullcontext()
        if not is_separable(optimizer) and any(p.grad is not None and p.grad.requires_grad for p in parameters):
            raise RefusalError(
                self.field,
                f"{type(optimizer).__name__} may differentiate gradients (create_graph), whose graph is of bf16 parameters",
                "use --bf16",
            )
        return self._with_masters(parameters)

    @contextmanager
    def _with_masters(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        split = [p for p in parameters if id(p) in self._masters]
        gradients = [p.grad for p in split]
        # written to again: new ones at every step would end up in ever other places, and break up the allocator's segments
        halves = {id(p): (p.data, self._masters[id(p)]) for p in split if _belongs(p, self._masters[id(p)])}
        try:
            for parameter in split:
                gradient = parameter.grad
                parameter.grad = None
                parameter.data = _joined(parameter, self._masters[id(parameter)])
                parameter.grad = None if gradient is None else gradient.float()
            yield
        finally:
            joined = [parameter for parameter in split if parameter.dtype is torch.float32]
            # all gradients first: what they give free is what splitting needs
            for parameter in joined:
                parameter.grad = None
            for parameter in joined:
                self._split(parameter, halves.get(id(parameter)))
            for parameter, gradient in zip(split, gradients, strict=True):
                parameter.grad = gradient

    def _split(self, parameter: torch.Tensor, halves: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        try:
            high, low = split_master(parameter.data, halves)
        except torch.OutOfMemoryError:
            # the update is done, and must not be repeated because its last step failed; half of this has been freed
            high, low = split_master(parameter.data, halves)
        parameter.data, self._masters[id(parameter)] = high, low


def _belongs(tensor: torch.Tensor, low: torch.Tensor) -> bool:
    """Return whether a tensor is still what was split, and the loop has not given it other data."""
    return tensor.dtype is torch.bfloat16 and tensor.shape == low.shape


def _joined(tensor: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return join_master(tensor.data, low) if _belongs(tensor, low) else tensor.data.float()


def _computing_later(output: Any, precision: Precision) -> str | None:
    """Say which part of an output computes with low values when the loop calls it, past autocast; None for none."""
    for leaf in flatten(output)[0]:
        held = [*(getattr(leaf, "__closure__", None) or ()), *getattr(leaf, "args", ())] if runs_later(leaf) else []
        held = [each.cell_contents if isinstance(each, types.CellType) else each for each in held]
        if any(isinstance(each, torch.Tensor) and each.dtype is _AUTOCAST_DTYPES.get(precision) for each in held):
            return (
                f"its output is a {type(leaf).__name__}, which computes with {precision} values when the loop calls it"
            )
    return None


def _as_fp32(leaf: Any) -> Any:
    low = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if low else leaf


def _in_leaves(change: Callable[[Any], Any], output: Any) -> Any:
    leaves, structure = flatten(output)
    changed = [change(leaf) for leaf in leaves]
    is_other = any(one is not other for one, other in zip(changed, leaves, strict=True))
    return structure.put(changed) if is_other else output


def as_bf16(leaf: Any) -> Any:
    """An input as a model in bf16 gets it."""
    return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf


def _device_type(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    for value in (*kwargs.values(), *args):
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"


def _set_matmul_precision(precision: str, undo: ExitStack) -> None:
    undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision(precision)


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


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Swap a tensor's data for another dtype's, its gradient along with it."""
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None
    tensor.data = data
    if gradient is not None:
        tensor.grad = gradient.to(data.dtype)


def _is_moment(parameter: nn.Parameter, value: Any, dtype: torch.dtype) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.dtype is dtype and value.shape == parameter.shape and value.dim() > 0
    )


def _unpacked_moment(parameter: nn.Parameter, value: Any) -> Any:
    return value.float() if _is_moment(parameter, value, torch.bfloat16) else value
