"""Converting a live optimizer, with its moments, while it stays the same object.

Rules:

1. A delegate performs the update. It borrows `optimizer.state` and groups made from
   `optimizer.param_groups` for the length of one update and holds neither in between, so that learning
   rates are always the current ones and no parameter is kept alive.
2. Only `optimizer.state` changes: its entries are in the delegate's format while the technique is on.
3. What the delegate's format cannot hold is parked off the device. As long as no step has been taken
   it is given back bit for bit; a step makes it stale, and it is dropped.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.errors import RefusalError
from memlab.extras import require
from memlab.plan import OptimizerChoice, Plan, Tier
from memlab.runtime.optimizer_step import unhooked_step
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.runtime.workload import Workload
from memlab.techniques.base import State, Stepper, Technique
from memlab.techniques.description import Description
from memlab.techniques.offload.spill import Spill, resolve_tier
from memlab.techniques.optimizer.state_formats import (
    AdafactorFormat,
    BnbAdamFormat,
    NoMomentsFormat,
    StateFormat,
    TorchAdamFormat,
)

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter
Group = Mapping[str, Any]

_8BIT = (OptimizerChoice.ADAM8BIT, OptimizerChoice.PAGED_ADAM8BIT)
_NOTES = {
    OptimizerChoice.ADAMW: "moments are converted to fp32; going back to 8 bits is not bit-exact",
    OptimizerChoice.ADAM8BIT: "moments are kept in 8 bits; turning them into fp32 again is close, not bit-exact",
    OptimizerChoice.PAGED_ADAM8BIT: "moments are kept in 8 bits; turning them into fp32 again is close, not bit-exact",
    OptimizerChoice.ADAFACTOR: (
        "Adafactor keeps row and column means of the second moment and no first moment; both come back as they "
        "were until the first step, after that the first moment starts again from zero"
    ),
    OptimizerChoice.SGD: (
        "SGD keeps no moments and may need another learning rate; the moments come back as they were until the "
        "first step, after that they start again from zero"
    ),
}
_PAGED_NOTE = "bitsandbytes returns paged memory only when the kernel ends"


class OptimizerConversion(Technique):
    """AdamW, 8-bit Adam, Adafactor or SGD in place of the user's Adam, moments converted.

    Known limitations:
        Parameters are updated by the delegate's arithmetic: 8-bit and factored moments are
        approximations. Groups keep their own lr, weight decay, betas and eps; Adafactor and SGD read the
        first two only.
    """

    field = "optimizer"
    descriptions = (
        Description(
            flags="--adam8bit",
            saves="moments: 8 → 2.03 bytes per parameter",
            costs="two conversions an update",
            exactness="8-bit moments: loss within 0.1 % over 100 steps of fine-tuning",
            gives_nothing="the peak is mostly activations; parameters below 4096 elements stay as they are; refused for optimizers other than Adam and AdamW",
        ),
        Description(
            flags="--optim paged-adam8bit",
            saves="the same, and moments move to the host when memory is short",
            costs="copies while memory is short",
            exactness="as --adam8bit",
            gives_nothing="as --adam8bit; refused without CUDA",
        ),
        Description(
            flags="--optim adafactor",
            saves="moments: 8 → 0.02 bytes per parameter",
            costs="row and column means instead of moments",
            exactness="another algorithm, without first moments",
            gives_nothing="the peak is mostly activations",
        ),
        Description(
            flags="--optim sgd",
            saves="all moments",
            costs="no time per update, but often more steps",
            exactness="another algorithm",
            gives_nothing="the peak is mostly activations",
        ),
    )
    changes_state = True
    is_of_optimizer = True

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.choice = plan.optimizer
        self._conversions: weakref.WeakKeyDictionary[Optimizer, _Conversion] = weakref.WeakKeyDictionary()

    def check(self, workload: Workload) -> None:
        for name, module in workload.model.named_modules():
            if getattr(module, "sparse", False) is True:
                raise _sparse_gradients(self.choice, name)
        for optimizer in workload.optimizers:
            self.check_optimizer(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if not _is_already(optimizer, self.choice):
            for refuse in _REFUSALS:
                refuse(optimizer, self.choice)

    def attach_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        if _is_already(optimizer, self.choice):
            self._note(f"already {type(optimizer).__name__}: --optim {self.choice} changes nothing")
            return
        undo.callback(self._conversions.pop, optimizer, None)
        self._conversions[optimizer] = _Conversion(optimizer, self.choice)
        self._note(_NOTES[self.choice])
        if self.choice is OptimizerChoice.PAGED_ADAM8BIT:
            self._note(_PAGED_NOTE)

    def pack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        conversion = self._conversions.get(optimizer)
        return state if conversion is None else conversion.pack(optimizer, parameter, state)

    def unpack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        conversion = self._conversions.get(optimizer)
        return state if conversion is None else conversion.unpack(optimizer, parameter, state)

    def stepper(self, optimizer: Optimizer) -> Stepper | None:
        conversion = self._conversions.get(optimizer)
        return None if conversion is None else partial(conversion.update, optimizer)

    def step_ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        conversion = self._conversions.get(optimizer)
        if conversion is not None and not skipped:
            conversion.drop_stale(optimizer)

    @property
    def host_bytes(self) -> int:
        return sum(conversion.host_bytes for conversion in self._conversions.values())

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


class _Conversion:
    """One optimizer's delegate and the two formats its state goes between."""

    def __init__(self, optimizer: Optimizer, choice: OptimizerChoice) -> None:
        self._choice = choice
        self._source = _format_of(optimizer)
        self._target = _TARGETS[choice]()
        self._delegate = _delegate(choice)
        self._spills: dict[Tier, Spill] = {}
        self._parked: MutableMapping[torch.Tensor, State] = WeakTensorKeyDictionary()
        # of the user's moments: the dtype of a parameter can be another one between steps than during them
        self._dtypes: MutableMapping[torch.Tensor, torch.dtype] = WeakTensorKeyDictionary()

    @property
    def host_bytes(self) -> int:
        return sum(spill.stored_bytes for spill in self._spills.values())

    def pack(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        if self._target.holds(parameter, state):
            return state
        group = _group_of(optimizer, parameter)
        moments = self._source.decode(parameter, group, state)
        self._dtypes[parameter] = moments.first.dtype
        if self._choice is OptimizerChoice.ADAMW:  # torch's kernels want moments in the dtype of the parameter
            moments = moments.to(parameter.dtype)
        resident = self._target.encode(parameter, group, moments)
        if not self._target.keeps_first:
            self._parked[parameter] = {name: self._park(parameter, value) for name, value in state.items()}
        return resident

    def unpack(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        if not self._target.holds(parameter, state) or self._source.holds(parameter, state):
            return state
        parked = self._parked.get(parameter)
        if parked is not None and int(parked["step"]) == state["step"]:
            return {name: _unparked(parameter, value) for name, value in parked.items()}
        if not self._target.keeps_second:
            return {}
        group = _group_of(optimizer, parameter)
        moments = self._target.decode(parameter, group, state)
        return self._source.encode(parameter, group, moments.to(self._dtypes.get(parameter, parameter.dtype)))

    def update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Let the delegate update these parameters with the current settings of their groups."""
        for parameter in parameters:
            self._make_ready(optimizer, parameter)
        layouts = [(parameter, parameter.stride()) for parameter in parameters if not parameter.is_contiguous()]
        self._delegate.state = optimizer.state
        self._delegate.param_groups = self._groups(optimizer, parameters)
        try:
            with torch.no_grad():
                unhooked_step(self._delegate)(self._delegate)
        finally:
            self._delegate.param_groups, self._delegate.state = [], {}  # type: ignore[assignment]
        _restore_layouts(layouts)
        if self._choice is OptimizerChoice.SGD:
            for parameter in parameters:
                optimizer.state[parameter]["step"] += 1

    def drop_stale(self, optimizer: Optimizer) -> None:
        """Free what was parked for parameters that have been updated since."""
        for parameter, parked in list(self._parked.items()):
            if optimizer.state.get(parameter, {}).get("step") != int(parked["step"]):
                del self._parked[parameter]

    def _make_ready(self, optimizer: Optimizer, parameter: Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise _sparse_gradients(self._choice)
        state = optimizer.state.get(parameter)
        if not state:
            self._dtypes[parameter] = parameter.dtype
            fresh = self._target.fresh(parameter)
            if fresh is not None:
                optimizer.state[parameter] = fresh
        elif not self._target.holds(parameter, state):
            # loaded by an optimizer that runs no load_state_dict hooks, as those of bitsandbytes
            optimizer.state[parameter] = self.pack(optimizer, parameter, state)

    def _groups(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
        chosen = {id(parameter) for parameter in parameters}
        groups = []
        for group in optimizer.param_groups:
            settings = {name: _number(group[name]) for name in _SHARED[self._choice]}
            own = [parameter for parameter in group["params"] if id(parameter) in chosen]
            groups.append({**self._delegate.defaults, **settings, "params": own})
        return groups

    def _park(self, parameter: Parameter, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel() < SMALL_ELEMENTS:
            return value.clone()
        tier = resolve_tier(Tier.AUTO, parameter.device, "optimizer")
        return self._spills.setdefault(tier, Spill(tier)).store(value)


def _unparked(parameter: Parameter, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() < SMALL_ELEMENTS:
        return value.clone() if isinstance(value, torch.Tensor) else value
    like = parameter if value.shape == parameter.shape else value
    return torch.empty_like(like, dtype=value.dtype, device=parameter.device, requires_grad=False).copy_(value)


def _restore_layouts(layouts: Sequence[tuple[Parameter, tuple[int, ...]]]) -> None:
    """Undo bitsandbytes' quiet change of channels-last parameters to contiguous ones."""
    for parameter, stride in layouts:
        if parameter.stride() != stride:
            data = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=parameter.device)
            parameter.data = data.copy_(parameter.data)


def _number(value: Any) -> Any:
    """A setting as a plain number; learning rates and betas may be tensors."""
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)


def _group_of(optimizer: Optimizer, parameter: Parameter) -> Group:
    groups = optimizer.param_groups
    return next((group for group in groups if any(own is parameter for own in group["params"])), optimizer.defaults)


# --- what the user has, and what is asked for -----------------------------------------------------

_ADAM_SETTINGS = ("lr", "weight_decay", "betas", "eps")
_SHARED: dict[OptimizerChoice, tuple[str, ...]] = {
    OptimizerChoice.ADAMW: _ADAM_SETTINGS,
    OptimizerChoice.ADAM8BIT: _ADAM_SETTINGS,
    OptimizerChoice.PAGED_ADAM8BIT: _ADAM_SETTINGS,
    OptimizerChoice.ADAFACTOR: ("lr", "weight_decay"),
    OptimizerChoice.SGD: ("lr", "weight_decay"),
}
_TARGETS: dict[OptimizerChoice, Callable[[], StateFormat]] = {
    OptimizerChoice.ADAMW: TorchAdamFormat,
    OptimizerChoice.ADAM8BIT: BnbAdamFormat,
    OptimizerChoice.PAGED_ADAM8BIT: partial(BnbAdamFormat, paged=True),
    OptimizerChoice.ADAFACTOR: AdafactorFormat,
    OptimizerChoice.SGD: NoMomentsFormat,
}


def _delegate(choice: OptimizerChoice) -> Optimizer:
    placeholder = [torch.nn.Parameter(torch.empty(0))]
    delegate = _DELEGATES[choice](placeholder)
    delegate.param_groups = []
    return delegate


def _adafactor(parameters: list[Parameter]) -> Optimizer:
    kind = require("transformers").Adafactor
    settings = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    return kind(parameters, lr=0.0, **settings)  # type: ignore[no-any-return]


_DELEGATES: dict[OptimizerChoice, Callable[[list[Parameter]], Optimizer]] = {
    OptimizerChoice.ADAMW: torch.optim.AdamW,
    OptimizerChoice.ADAM8BIT: lambda parameters: require("bitsandbytes").optim.AdamW8bit(parameters),
    OptimizerChoice.PAGED_ADAM8BIT: lambda parameters: require("bitsandbytes").optim.PagedAdamW8bit(parameters),
    OptimizerChoice.ADAFACTOR: _adafactor,
    OptimizerChoice.SGD: torch.optim.SGD,
}


def _is_torch_adam(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam)


def _is_bnb_adam(optimizer: Optimizer) -> bool:
    own = any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__)
    return own and getattr(optimizer, "optimizer_name", "") == "adam"


def _couples_decay(optimizer: Optimizer) -> bool:
    """Return whether weight decay goes through the moments, as in torch's Adam and unlike in AdamW."""
    groups = optimizer.param_groups
    return _is_torch_adam(optimizer) and any(g["weight_decay"] and not g.get("decoupled_weight_decay") for g in groups)


def _is_already(optimizer: Optimizer, choice: OptimizerChoice) -> bool:
    if choice is OptimizerChoice.SGD:
        return isinstance(optimizer, torch.optim.SGD)
    if choice is OptimizerChoice.ADAFACTOR:
        return type(optimizer).__name__ == "Adafactor"
    if choice is OptimizerChoice.ADAMW:
        return _is_torch_adam(optimizer) and not _couples_decay(optimizer)
    if not _is_bnb_adam(optimizer) or _bnb_setting(optimizer, "optim_bits") != 8:
        return False
    return choice is OptimizerChoice.ADAM8BIT or bool(getattr(optimizer, "is_paged", False))


def _bnb_setting(optimizer: Optimizer, name: str) -> int:
    return int(getattr(optimizer.args, name))  # type: ignore[attr-defined]


def _format_of(optimizer: Optimizer) -> StateFormat:
    if _is_torch_adam(optimizer):
        return TorchAdamFormat()
    bits, smallest = _bnb_setting(optimizer, "optim_bits"), _bnb_setting(optimizer, "min_8bit_size")
    return BnbAdamFormat(bits, smallest, bool(getattr(optimizer, "is_paged", False)))


# --- refusals -------------------------------------------------------------------------------------

_FIELD = "optimizer"
_USE_ADAMW = "use torch.optim.AdamW in its place"


def _sparse_gradients(choice: OptimizerChoice, module: str = "an embedding") -> RefusalError:
    return RefusalError(
        _FIELD, f"{module} makes sparse gradients, which {choice} cannot use", "make it with sparse=False"
    )


def _refuse_other_optimizers(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusalError(
            _FIELD, "LBFGS keeps no Adam moments, and evaluates the loss several times in a step", _USE_ADAMW
        )
    if not _is_torch_adam(optimizer) and not _is_bnb_adam(optimizer):
        raise RefusalError(_FIELD, f"{name} keeps no Adam moments that {choice} could take over", _USE_ADAMW)


def _refuse_own_updates(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    if _is_torch_adam(optimizer) and inspect.unwrap(type(optimizer).step) is not inspect.unwrap(torch.optim.Adam.step):
        name = type(optimizer).__name__
        raise RefusalError(_FIELD, f"{name} changes the step of Adam, and {choice} would lose the change", _USE_ADAMW)


def _refuse_variants(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    for variant in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(variant) for group in optimizer.param_groups):
            given = f"{type(optimizer).__name__} was made with {variant}=True"
            raise RefusalError(_FIELD, f"{given}, which {choice} does not have", f"make it without {variant}")


def _refuse_coupled_decay(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    if choice is not OptimizerChoice.SGD and _couples_decay(optimizer):
        raise RefusalError(
            _FIELD,
            f"Adam adds its weight_decay to the gradient, {choice} takes it off the weights",
            "use torch.optim.AdamW, or Adam with weight_decay=0",
        )


def _refuse_gradients(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise _sparse_gradients(choice)


def _refuse_dtypes(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    allowed = (torch.float32, torch.float16, torch.bfloat16)
    odd = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.dtype not in allowed}
    if choice in _8BIT and odd:
        reason = f"a parameter is {odd.pop()}, and {choice} takes float32, float16 and bfloat16"
        raise RefusalError(_FIELD, reason, "use --optim adafactor")


def _refuse_paging_off_cuda(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
    if choice is OptimizerChoice.PAGED_ADAM8BIT and devices[0].type != "cuda":
        reason = f"{choice} needs a CUDA GPU with unified memory, and the model is on {devices[0]}"
        raise RefusalError(_FIELD, reason, "nearest: --adam8bit")


def _refuse_missing_packages(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    if choice in _8BIT or _is_bnb_adam(optimizer):
        require("bitsandbytes")
    if choice is OptimizerChoice.ADAFACTOR:
        require("transformers")


_REFUSALS: tuple[Callable[[Optimizer, OptimizerChoice], None], ...] = (
    _refuse_other_optimizers,
    _refuse_own_updates,
    _refuse_variants,
    _refuse_coupled_decay,
    _refuse_gradients,
    _refuse_dtypes,
    _refuse_paging_off_cuda,
    _refuse_missing_packages,
)
