"""Number formats of a training step: fp32, tf32, fp16 with loss scaling, bf16, and pure bf16.

fp16 runs the forward under autocast and returns its outputs in fp32; the loop needs no `GradScaler` (`loss_scale`).

Pure bf16 keeps each parameter as bf16 for forward and backward, and the 16 bits it lacks beside it:
together they are the fp32 master, bit for bit, which is what the optimizer updates. Nothing is
rounded away, and switching off gives back the masters. Moments are kept in bf16, rounded
stochastically so that small changes are not lost (`packed_moments`). What the model and its parts see of weights, and what
the loop does, is in `pure_bf16`.

Sources: https://docs.pytorch.org/docs/stable/amp.html; Micikevicius et al., "Mixed Precision Training",
https://arxiv.org/abs/1710.03740; Zamirai et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MemlabError, RefusalError, first_line
from memlab.plan import Plan, Precision
from memlab.runtime.aliases import is_in_shared_memory
from memlab.runtime.autocast import as_fp32, without_autocast
from memlab.runtime.backward import around_backward_passes, is_in_backward
from memlab.runtime.fp32_products import Fp32Products
from memlab.runtime.graphs import why_as_written
from memlab.runtime.lifetimes import called_while_alive, gradient_is_held
from memlab.runtime.loop_mode import has_compiled_code
from memlab.runtime.loop_reading import made_one_graph, of_one_graph
from memlab.runtime.mechanisms import LoopChecks
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.state_layers import at_home
from memlab.runtime.tree import Lent, flatten, in_leaves
from memlab.runtime.workload import Workload
from memlab.techniques.base import HOLDS_GRADIENTS, Description, ModelCall, Reduces, Technique, Traits
from memlab.techniques.precision.cast_outputs import CastOutputs
from memlab.techniques.precision.first_call import (
    AUTOCAST_DTYPES,
    FirstCalls,
    is_awaited_with_others,
    names_half,
    refusal_of,
    refuse_backward_hooks,
    refuse_computing_later,
)
from memlab.techniques.precision.loss_scale import LossScale
from memlab.techniques.precision.masters import Masters
from memlab.techniques.precision.packed_moments import PackedMoments
from memlab.techniques.precision.pure_bf16 import PureBf16

_HELD = (
    f"{HOLDS_GRADIENTS}, which would be others in bf16",
    "use --bf16, or drop them first (optimizer.zero_grad())",
)
_TOGETHER = (
    "a hook waits for the gradients of several weights (register_multi_grad_hook), which torch would not call any more once "
    "they are in bf16",
    "use --bf16, or a hook for each (register_hook)",
)
_FIRST_WITH_TF32 = (8, 0)  # compute capability
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that torch gives each


class PrecisionChoice(Technique, LoopChecks):
    """Run forward and backward in another number format.

    Tolerances over 100 steps against fp32 are stated and tested in ``tests/techniques/test_precision.py``.

    Known limitations: a loop that runs under autocast itself keeps its own precision (said in the notes). Only the first call is
    looked at for what does not run in half precision.

    Over 300 lines: a third is words of its settings and refusals; the formats share first calls and the casts around a call.
    """

    field = "precision"
    traits = Traits(Reduces.FORMATS)
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
        self._masters = Masters()
        self._pure: PureBf16 | None = None
        self._outputs = CastOutputs()
        self._moments = PackedMoments(self.notes.once, lambda: self.host.techniques())
        self._model: Callable[[], nn.Module | None] = lambda: None
        # parts that were there in a call that was looked at, by whether it had gradients and whether the model was in training mode
        self._known: defaultdict[tuple[bool, bool], MutableMapping[nn.Module, None]] = defaultdict(WeakIdKeyDictionary)
        self._is_looked_at = False  # in this step
        self._name = ""

    def brings(self) -> Iterator[object]:
        yield from (self, self._masters, self._pure)
        if self._is(Precision.PURE_BF16):
            yield self._moments
        if self._is(Precision.FP16):
            yield self._scaler

    def check(self, workload: Workload) -> None:
        precision = self.plan.precision
        # pure bf16 may be what is to be changed
        before = self.host.predecessor(self)
        masters = self._masters if before is None else before._masters
        dtypes = {masters.canonical_dtype(p) for p in workload.model.parameters() if p.requires_grad}
        if precision is Precision.TF32 and (workload.compute_capability or (0, 0)) < _FIRST_WITH_TF32:
            raise RefusalError(self.field, "tf32 needs a CUDA GPU of the Ampere generation or newer", "use --bf16 here")
        if precision in (Precision.FP16, Precision.BF16, Precision.PURE_BF16) and dtypes - {torch.float32}:
            others = dtypes - {torch.float32}
            found = ", ".join(sorted(str(d).removeprefix("torch.") for d in others))
            # which leaves complex ones as they are
            cast = "" if any(d.is_complex for d in others) else "call model.float() and make the optimizer anew, or "
            raise RefusalError(
                self.field,
                f"--{'precision ' if precision is Precision.PURE_BF16 else ''}{precision} needs float32 parameters, "
                f"{workload.name} has {found} ones",
                f"{cast}leave the precision as it is",
            )
        if precision is Precision.PURE_BF16 and any(map(is_in_shared_memory, workload.model.parameters())):
            raise RefusalError(
                self.field,
                f"{workload.name} shares its weights with other processes (share_memory), which would not see those in bf16",
                "use --bf16",
            )
        if precision is Precision.PURE_BF16 and any(map(gradient_is_held, workload.model.parameters())):
            raise RefusalError(self.field, *_HELD)
        if precision is Precision.PURE_BF16:
            self._refuse_hooks_together(workload.model)
        if precision is Precision.FP16:
            refuse_backward_hooks(workload.name, workload.model)
        recurrent = any(isinstance(module, nn.RNNBase) for module in workload.model.modules())
        if precision is Precision.FP16 and workload.device.type == "cpu" and recurrent:
            raise RefusalError(self.field, "the CPU has no fp16 kernels for recurrent layers", "use --bf16 here")

    def check_loop(self, workload: Workload, frame: FrameType) -> None:
        if self._is(Precision.PURE_BF16) and (name := made_one_graph(frame, workload.model, calls_it=True)):
            raise RefusalError(self.field, *of_one_graph(name, workload.name))

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS) and self.plan.precision in (Precision.FP16, Precision.PURE_BF16):
            raise RefusalError(
                self.field,
                f"{self.plan.precision} cannot serve LBFGS, which evaluates the model inside its step",
                "use --bf16",
            )

    def check_traced(self) -> None:
        if self._masters:
            raise RefusalError(
                self.field,
                f"the loop traces {self._name} (torch.export, torch.jit.trace), and --precision pure-bf16 keeps its weights in "
                "two parts",
                "trace copy.deepcopy(model), or undo it before (%memfit undo)",
            )

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._name = workload.name
        if self.plan.precision in (Precision.FP16, Precision.BF16, Precision.PURE_BF16):
            self._model = weakref.ref(workload.model)
            # comes last, when weights are in fp32 again
            undo.callback(self._raise_what_calls_keep, {(id(part), name) for part, _, name, _ in _kept(workload.model)})
        if self.plan.precision in AUTOCAST_DTYPES:
            around_backward_passes(self._around_backward, undo)
        if self.plan.precision in (*AUTOCAST_DTYPES, Precision.PURE_BF16):
            around_backward_passes(self._outputs.around, undo)
        match self.plan.precision:
            case Precision.FP32:
                _set_matmul_precision("highest", undo)
            case Precision.TF32:
                _set_matmul_precision("high", undo)
            case Precision.FP16:
                self._scaler.watch(workload, self.notes.once, self._withdraw, undo)
            case Precision.PURE_BF16:
                for optimizer in workload.optimizers:
                    self._moments.expect(optimizer)
                self._pure = PureBf16(
                    workload.model, self._masters, self._outputs, self._first, self._at_home, self.host.aliases(), undo
                )

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
        if self._pure is not None:
            undo.callback(
                optimizer.register_load_state_dict_pre_hook(called_while_alive(self._pure.moments_coming)).remove
            )

    def _raise_what_calls_keep(self, before: set[tuple[int, str]]) -> None:
        """Raise to fp32 what calls have left in the model in half precision (a recurrent state, say)."""
        model = self._model()
        places = [] if model is None else [each for each in _kept(model) if (id(each[0]), each[2]) not in before]
        raised = in_leaves(as_fp32, [value for *_, value in places])
        for (_, table, name, _), value in zip(places, raised, strict=True):
            table[name] = value

    def _withdraw(self, refusal: RefusalError) -> bool:
        return self.host.withdraw(refusal)

    def _at_home(self, tensors: Sequence[Any]) -> ExitStack:
        return at_home(self.host.techniques(), tensors, updates=True)

    # -- calls ---------------------------------------------------------------------------------

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._pure is not None and self._pure.refuses_call():
            raise RefusalError(self.field, *_HELD)
        model = self._model()
        if self._pure is not None and model is not None:
            self._refuse_hooks_together(model)
        if is_in_backward():
            # run again by the loop's own checkpointing, which ends it by an exception
            return self._lowered(call, args, kwargs)
        model = None if self._is_looked_at else model
        if model is not None and self._is(Precision.FP16):
            refuse_backward_hooks(self._name, model)
        output = self._looked_at(model, call, args, kwargs)
        refuse_computing_later(self._name, output, self.plan.precision)
        self._is_looked_at = True
        return output

    def _looked_at(
        self, model: nn.Module | None, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a call, and refuse a model that does not run in half precision; one that is None is known."""
        known = None if model is None else self._known[torch.is_grad_enabled(), model.training]
        if model is not None and known is not None and not all(part in known for part in model.modules()):
            output = self._first(self._name, model, call, args, kwargs)
            known.update((part, None) for part in model.modules())
            return output
        try:
            return self._lowered(call, args, kwargs)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, MemlabError) or not self.host.on_trial():
                raise
            self._refuse_later(lambda: call(*args, **kwargs), error)

    def _refuse_later(self, run: Callable[[], Any], error: Exception) -> NoReturn:
        """Raise the refusal of a model that does something new, which does not run in half precision, or its own error."""
        model = self._model()  # None in full precision
        if model is None:
            raise error
        # only what trains is run again from where it began
        is_late = not (torch.is_grad_enabled() and model.training)
        self._first_calls().refuse_later(self._name, model, run, error, is_late=is_late)

    def _refuse_hooks_together(self, model: nn.Module) -> None:
        if any(map(is_awaited_with_others, model.parameters())):
            raise RefusalError(self.field, *_TOGETHER)

    def _first_calls(self) -> FirstCalls:
        return FirstCalls(self.plan.precision, self._lowered, self._masters, self._in_fp32)

    def _first(
        self, name: str, model: nn.Module, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return self._first_calls().run(name, model, call, args, kwargs)

    @contextmanager
    def _around_backward(self, _roots: Sequence[Any], _inputs: Sequence[Any] | None) -> Iterator[None]:
        """Refuse a model whose backward pass does not run in half precision, where an error names that."""
        try:
            yield
        except RuntimeError as error:
            is_of_torch = not (is_out_of_memory(error) or isinstance(error, MemlabError))
            # where the model was not called since its step, the pass is one of another's
            if not (is_of_torch and self._is_looked_at and names_half(error)):
                raise
            refusal = refusal_of(self._name, self.plan.precision, f"in its backward pass, {first_line(error)}")
            refusal.in_loop = True
            raise refusal from error

    def evaluate(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._pure is None:
            return call(*args, **kwargs)
        if is_in_backward() or why_as_written():
            return self._lowered(call, args, kwargs)
        return self._looked_at(self._model(), call, args, kwargs)

    def _lowered(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        match self.plan.precision:
            case Precision.FP16 | Precision.BF16:
                return self._autocast(call, args, kwargs)
            case Precision.FP32:
                with without_autocast():
                    return call(*args, **kwargs)
            case Precision.PURE_BF16:
                assert self._pure is not None
                return self._pure.run(call, args, kwargs)
        return call(*args, **kwargs)

    def _is(self, precision: Precision) -> bool:
        return self.plan.precision is precision

    def _autocast(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        dtype = AUTOCAST_DTYPES[self.plan.precision]
        device_type = _device_type(args, kwargs)
        is_own = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is dtype
        if self._is(Precision.FP16):
            self._scaler.call_begins(is_own=is_own)
        if is_own:
            self.notes.once(f"the loop already runs under autocast ({self.plan.precision}); its own precision is kept")
            return call(*args, **kwargs)
        entered, left = (self._scaler.entered, self._scaler.left) if self._is(Precision.FP16) else (_same, _same)

        def change(leaf: Any) -> Any:
            return left(as_fp32(leaf))

        with Lent(entered, change) as lent:
            args, kwargs = lent.lend((args, dict(kwargs)))
            with torch.autocast(device_type, dtype=dtype):
                output = call(*args, **kwargs)
        # compiled code takes no tensor that waits, and gradients of one would go past the loss scale or the node of a guarded call
        waits = self._is(Precision.BF16) and not (has_compiled_code() or self.host.is_guarded())
        return self._outputs.cast(change, output, waits=waits)

    @contextmanager
    def _in_fp32(self, model: nn.Module) -> Iterator[None]:
        if self._pure is None:
            yield
            return
        # where the loop is guarded, aliases of weights are in their places
        masters = (each for each in self._masters.tensors if each.numel() and not isinstance(each, FakeTensor))
        of = {tensor.data_ptr(): tensor for tensor in masters}
        tensors = [*model.parameters(), *model.buffers()]
        others = [each for each in tensors if each not in self._masters] if of else []
        aliases = [(each, of[each.data_ptr()]) for each in others if each.data_ptr() in of]
        try:
            # within: parts leave their inputs alone as well
            with self._pure.restored([*tensors, *(own for _, own in aliases)]), self._pure.within():
                for alias, own in aliases:
                    alias.data = own.data
                yield
        finally:
            for alias, own in aliases:
                alias.data = own.data

    # -- steps ---------------------------------------------------------------------------------

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        self._is_looked_at = False
        if self._pure is not None:
            self._pure.step_ended()


def _kept(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any], str, Any]]:
    """Return attributes of a model's parts that hold tensors in half precision, with their names."""
    are_low: dict[int, bool] = {}  # by value: parts share their configuration

    def is_low(value: Any) -> bool:
        if id(value) not in are_low:
            are_low[id(value)] = any(as_fp32(leaf) is not leaf for leaf in flatten(value)[0])
        return are_low[id(value)]

    return [
        (part, table, name, value)
        for part in model.modules()
        for table in (vars(part), part._buffers)
        for name, value in table.items()
        if name not in _OF_MODULES and is_low(value)
    ]


def _device_type(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    for value in (*kwargs.values(), *args):
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"


def _same(leaf: Any) -> Any:
    return leaf


def _set_matmul_precision(precision: str, undo: ExitStack) -> None:
    undo.callback(Fp32Products().restore)
    torch.set_float32_matmul_precision(precision)
