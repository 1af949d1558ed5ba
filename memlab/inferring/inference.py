"""`Inference`: a model whose calls run forward only, for as long as a cell or a ``with`` block.

What a call gets, and why:

1. *Gradients off* by `torch.no_grad`, in the model's calls and nowhere else, so that other things may be trained on
   what they return. `torch.inference_mode` saves no memory beyond that, and its tensors could not be: "Inference
   tensors cannot be saved for backward".
2. *Eval mode* while a call runs: a model left in train mode generates with dropout. Modes are put back after each
   call, so the cell sees, and may set, its own.
3. *Weights in half precision* where asked for (`weights.py`), for all of the time.
4. *A place in the record* (`calls.py`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map

from memlab.errors import PlanError, RefusalError, SessionError, TraceError, WorkloadError
from memlab.inferring.cache import caches_in, shape_of
from memlab.inferring.calls import CallMeter
from memlab.inferring.weights import HalfWeights
from memlab.measuring.device import Device, device_for
from memlab.measuring.holdings import Holding, gradients_of, parameters_of, state_of
from memlab.plan import Plan, Precision
from memlab.plan.plan import BY_NAME
from memlab.records import Category
from memlab.records.inference import InferenceRecord
from memlab.runtime.accelerator import is_accelerator, most_bytes
from memlab.runtime.batch import Batch
from memlab.runtime.hooks import CallHook, is_compiled, on_each_step
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.out_of_memory import with_room
from memlab.runtime.ownership import steps_some_of, unwrap_model
from memlab.runtime.stand_ins import stand_in
from memlab.runtime.workload import Workload
from memlab.session import session_of
from memlab.trace.tracer import Tracer

_NO_GRADIENT = ("does not require grad", "does not have a grad_fn")
_TRAINS = "train it without --inference (from Python: outside of memlab.inference)"
# one per model: a second one would round its weights again
_attached: dict[int, Inference] = {}


class Inference:
    """A model whose calls run forward only. Use `memlab.inference` to make one.

    Args:
        model: the model; wrappers of Accelerate, Fabric and DDP are looked through.
        precision: KEEP, FP16 or BF16.
        device: what memory is counted on.
        optimizers: of the model, whose state takes memory too.

    Attributes:
        model: without wrappers.
    """

    def __init__(
        self, model: nn.Module, precision: Precision, device: Device, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self.model = unwrap_model(model)
        self._precision = precision
        self._optimizers = optimizers
        self._modules = tuple(self.model.modules())
        self._half = HalfWeights(self.model, precision) if precision is not Precision.KEEP else None
        self._host_bytes = 0
        self._notes: list[str] = []
        self._meter = CallMeter(device, self._held, shape_of(self.model))
        self._records: tuple[InferenceRecord, ...] | None = None
        self._switched: list[nn.Module] = []  # in eval mode while a call runs
        self._with_graph: Batch | None = None  # the largest forward for which gradients were on
        self._depth = 0  # calls of the cell's own that are running, on several threads perhaps
        self._thread: int | None = None  # whose call is measured
        self._idle = threading.Condition()
        self._undo = ExitStack()
        self._attach()

    # -- for people ----------------------------------------------------------------------------

    @property
    def records(self) -> tuple[InferenceRecord, ...]:
        """Return what was measured so far, one record for each kind of call: forwards, generations."""
        if self._records is not None:
            return self._records
        return self._meter.records(str(self._precision), self._host_bytes, tuple(self._notes))

    @property
    def record(self) -> InferenceRecord:
        """Return the record of the calls that need most memory.

        Raises:
            WorkloadError: there was no call.
        """
        records = self.records
        if not records:
            raise WorkloadError(
                f"no call of {type(self.model).__name__} was seen: forward (model(…)) and generate are; other methods are not"
            )
        return max(records, key=lambda record: record.peak_allocated_bytes)

    def graph_bytes(self) -> int | None:
        """Bytes that the graph of the largest forward would have kept, had gradients been on; predicted on a twin.

        Returns:
            None when the cell had switched gradients off itself, no parameter could get one, there was no forward
            outside of a generation, or the model cannot be predicted.
        """
        batch = self._with_graph
        if batch is None or not any(parameter.requires_grad for parameter in self.model.parameters()):
            return None
        try:
            return Tracer(Workload(self.model, batch=batch)).one_graph()
        except TraceError:
            return None

    @property
    def capacity_bytes(self) -> int | None:
        """Return what the device holds: the size it was given, or on CUDA what others do not use; None where it has no size."""
        device, where = self._meter.device, next(self.model.parameters()).device
        if device.capacity_bytes is not None or not is_accelerator(where):
            return device.capacity_bytes
        return most_bytes(where)

    @property
    def attached(self) -> bool:
        """Return whether the model's calls are taken over; False after `undo`."""
        return _attached.get(id(self.model)) is self

    def undo(self) -> None:
        """Restore the model as it was. Does nothing when called again; waits for a call on another thread.

        Raises:
            torch.OutOfMemoryError: there is no room for the weights as they were. It can be called again once
                memory is free; until then nothing is lost.
        """
        if not self.attached:
            return
        with self._idle:
            self._idle.wait_for(lambda: not self._depth or self._thread == threading.get_ident())
        with deferred_interrupts():
            if self._records is None:
                self._records = self.records
            self._meter.close()
            self._with_graph = None
            if self._half is not None:
                with_room(self._half.restore)
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.undo()
        if error is not None and (sentence := explained(error)):
            raise SessionError(sentence) from error

    def __repr__(self) -> str:
        state = "" if self.attached else ", over"
        return f"<memlab inference of {type(self.model).__name__}, {self._precision}{state}>"

    # -- attaching -----------------------------------------------------------------------------

    def _attach(self) -> None:
        with deferred_interrupts(), ExitStack() as undo:
            _attached[id(self.model)] = self
            undo.callback(_attached.pop, id(self.model), None)
            CallHook(self.model, self._on_forward).install(undo)
            if callable(getattr(self.model, "generate", None)):
                generate: Any = self.model.generate
                handled = functools.wraps(generate)(lambda *args, **kwargs: self._on_generate(generate, args, kwargs))
                stand_in(self.model, "generate", handled, undo)
            on_each_step(self._on_step, undo)
            self._round()
            self._undo = undo.pop_all()

    def _round(self) -> None:
        if self._half is None:
            return
        try:
            self._half.convert()
        except BaseException:
            self._half.restore()
            raise
        self._host_bytes = self._half.host_bytes
        if not self._host_bytes:
            kinds = sorted({str(p.dtype).removeprefix("torch.") for p in self.model.parameters()})
            self._notes.append(f"nothing was rounded: the weights are {', '.join(kinds)} already")

    def _held(self) -> Iterator[Holding]:
        """Yield what lives all the time."""
        yield from parameters_of(self.model)
        session = session_of(self.model)
        if session is not None:
            yield from ((Category.PARAMETERS, tensor) for tensor in session.in_force.held_tensors)
        yield from gradients_of(self.model)
        if self._half is not None:
            yield from ((Category.GRADIENTS, gradient) for gradient in self._half.gradients)
        yield from state_of(self._optimizers)

    # -- the hooks -----------------------------------------------------------------------------

    def _on_forward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch, was_on = Batch(args, kwargs), torch.is_grad_enabled()
        if self._is_inside():
            return self._measured_pass(original, batch)
        with self._quiet():
            output = self._measured_pass(original, batch)
            if was_on:
                self._remember(batch)
            return self._widened(output)

    def _on_generate(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch = Batch(args, kwargs)
        if self._is_inside():  # of assisted decoding, say
            return self._run(original, batch)
        with self._quiet():
            if not self._is_mine():
                return self._run(original, batch)
            self._meter.generation_begins(batch)
            try:
                output = self._run(original, batch)
                self._meter.generation_ended(self._new_tokens(output, batch))
            except BaseException:
                self._meter.interrupted()
                raise
            return self._widened(output)

    def _remember(self, batch: Batch) -> None:
        """Note the largest forward for which gradients were on: its graph may be asked for."""
        if caches_in(batch.kwargs) or not self._is_mine():
            return
        if self._with_graph is None or batch.elements > self._with_graph.elements:
            self._with_graph = _noted(batch)

    def _widened(self, output: Any) -> Any:
        return output if self._half is None else self._half.widened(output)

    def _run(self, original: Callable[..., Any], batch: Batch) -> Any:
        if self._half is None:
            return original(*batch.args, **batch.kwargs)
        return self._half.called(original, batch.args, batch.kwargs)

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        if steps_some_of(optimizer, self.model):
            raise SessionError(
                f"{type(optimizer).__name__} steps {type(self.model).__name__} under --inference, where its calls have no gradients: {_TRAINS}"
            )

    # -- one call ------------------------------------------------------------------------------

    def _is_inside(self) -> bool:
        """Return whether this thread is in a call already."""
        return self._depth > 0 and self._is_mine()

    def _is_mine(self) -> bool:
        return self._thread == threading.get_ident()

    def _measured_pass(self, original: Callable[..., Any], batch: Batch) -> Any:
        """Run a forward, and tell the meter of it."""
        if not self._is_mine():  # another thread's call is being measured
            return self._run(original, batch)
        self._meter.pass_begins(batch)
        try:
            output = self._run(original, batch)
            self._meter.pass_ended(output)
        except BaseException:
            self._meter.interrupted()
            raise
        return output

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """No gradients, and eval mode, while a call of the cell's own runs."""
        with self._idle:
            self._depth += 1
            if self._depth == 1:
                self._thread = threading.get_ident()
                self._switch_to_eval()
        try:
            with torch.no_grad():
                yield
        finally:
            with self._idle:
                self._depth -= 1
                if self._is_mine():
                    self._thread = None
                if not self._depth:
                    self._switch_back()
                self._idle.notify_all()

    def _switch_to_eval(self) -> None:
        self._switched = [module for module in self._modules if module.training]
        for module in self._switched:
            module.training = False
        note = "the model was in train mode: its calls ran in eval mode, without dropout"
        if self._switched and note not in self._notes:
            self._notes.append(note)

    def _switch_back(self) -> None:
        for module in self._switched:
            module.training = True
        self._switched = []

    def _new_tokens(self, output: Any, batch: Batch) -> int:
        """Tokens that `generate` added, of all rows; as many as it has passes where its output does not say."""
        sequences = output if isinstance(output, torch.Tensor) else getattr(output, "sequences", None)
        if not isinstance(sequences, torch.Tensor) or sequences.dim() != 2:
            return 0
        config = getattr(self.model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return sequences.shape[0] * (sequences.shape[1] - 1)
        ids = batch.kwargs.get("input_ids", batch.kwargs.get("inputs", next(iter(batch.args), None)))
        prompt = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 0
        return sequences.shape[0] * (sequences.shape[1] - prompt)


def inference(
    model: nn.Module, flags: str = "", *, device: Device | None = None, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Inference:
    """Run the calls of a model forward only, and measure them.

    Args:
        model: the model; parts of it that are called by themselves, and methods other than forward and ``generate``,
            are not taken over.
        flags: "--fp16" or "--bf16" rounds the weights for the time being; empty keeps their format.
        device: what memory is counted on, with its capacity; by default that of the model.
        optimizers: whose state takes memory beside the model.

    Returns:
        The inference in force: it ends with the ``with`` block, or by `undo`.

    Raises:
        PlanError: flags that cannot be read, or mean nothing where nothing is trained.
        RefusalError: the model cannot be taken over, or cannot run in that format.
        SessionError: it is under inference already; or, at the end of the block, the block tried to train it.
        WorkloadError: no model with parameters.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2))
        >>> with inference(model) as run:
        ...     output = model(torch.zeros(3, 4))
        >>> output.requires_grad, run.record.calls[0].rows, run.record.notes
        (False, 3, ('the model was in train mode: its calls ran in eval mode, without dropout',))
    """
    precision = precision_of(Plan.parse(flags))
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if parameter is None:
        raise WorkloadError(f"inference: expected a torch.nn.Module with parameters, got {type(model).__name__}")
    inner = unwrap_model(model)
    if is_compiled(inner):
        raise RefusalError(
            "inference",
            f"{type(inner).__name__} is compiled, and the compiled code no longer calls model.forward",
            "use the uncompiled model (model._orig_mod)",
        )
    if id(inner) in _attached:
        raise SessionError(f"{type(inner).__name__} is under inference already: leave that block, or call its undo()")
    counted_on = device or device_for(parameter.device)
    made = None
    try:
        with deferred_interrupts():
            made = Inference(inner, precision, counted_on, optimizers)
    except BaseException:
        # whoever does not get it could not undo it
        if made is not None:
            made.undo()
        raise
    return made


def inference_of(model: nn.Module) -> Inference | None:
    """Return what holds a model, or None."""
    return _attached.get(id(unwrap_model(model)))


def precision_of(plan: Plan) -> Precision:
    """The precision in a plan for calls that only run forward.

    Raises:
        PlanError: a setting that means nothing there, with the reason.
    """
    for name in plan.changes():
        if name != "precision":
            raise PlanError(f"{BY_NAME[name].flag} with --inference: {BY_NAME[name].untrained}; leave it out")
    if plan.precision not in (Precision.KEEP, Precision.FP16, Precision.BF16):
        raise PlanError(
            f"--precision {plan.precision} with --inference: allowed are --fp16 and --bf16, which keep the weights in that "
            f"format meanwhile"
        )
    return plan.precision


def explained(error: BaseException) -> str:
    """Return what an error of code that trains means under inference; empty for other errors."""
    if isinstance(error, RuntimeError) and all(words in str(error) for words in _NO_GRADIENT):
        return f"backward() under --inference, where the model's calls have no gradients: {_TRAINS}"
    return ""


def _noted(batch: Batch) -> Batch:
    """A batch of which only integers (tokens, masks) are held: values of floats decide nothing."""

    def noted(leaf: Any) -> Any:
        is_floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return torch.empty_like(leaf, device="meta") if is_floats else leaf

    args, kwargs = tree_map(noted, (batch.args, dict(batch.kwargs)))
    return Batch(args, kwargs)
