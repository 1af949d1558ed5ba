"""Converting a live optimizer, with its moments, while it stays the same object.

Rules:

1. A delegate performs the update. It borrows `optimizer.state` and groups made from
   `optimizer.param_groups` for the length of one update and holds neither in between, so that learning
   rates are always the current ones and no parameter is kept alive.
2. Only `optimizer.state` changes: its entries are in the delegate's format while the technique is on.
3. What the delegate's format cannot hold, or rounds, is parked off the device. As long as no step has been taken
   it is given back bit for bit; a step makes it stale, and it is dropped.
4. A loop that asks for the state of a parameter by a name of its own optimizer (``state["exp_avg"]``) finds it in the form
   it knows (`PackedState`), and what it writes there counts: the next update packs it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from memlab.errors import RefusalError
from memlab.extras import require
from memlab.plan import OptimizerChoice, Plan
from memlab.runtime.accelerator import has_kernel, name_of
from memlab.runtime.buckets import group_of
from memlab.runtime.homes import stood_for
from memlab.runtime.mechanisms import OwnMemory, StateForm, Stepper, Updating
from memlab.runtime.ownership import parameters_in
from memlab.runtime.plain_step import unhooked_step
from memlab.runtime.state_entries import PackedState, State, kept_of, set_state
from memlab.runtime.state_layers import shown
from memlab.runtime.workload import Workload
from memlab.techniques.base import Reduces, Technique, Traits
from memlab.techniques.offload.spill import ParkedStates
from memlab.techniques.optimizer.replacements import (
    REPLACEMENTS,
    Replacement,
    bnb_format_of,
    couples_decay,
    is_bnb_adam,
    is_torch_adam,
)
from memlab.techniques.optimizer.state_formats import TorchAdamFormat

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter


class OptimizerConversion(Technique, StateForm, Updating, OwnMemory):
    """One of `REPLACEMENTS` in place of the user's Adam, moments converted.

    Known limitations:
        Parameters are updated by the delegate's arithmetic: 8-bit and factored moments are
        approximations. Groups keep their own lr, weight decay, betas and eps; Adafactor, SGD, Lion and Muon
        read the first two only.
    """

    field = "optimizer"
    descriptions = tuple(row.description for row in REPLACEMENTS.values() if row.description is not None)
    traits = Traits(Reduces.MODEL_STATES, is_of_optimizer=True)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.choice = plan.optimizer
        self._row = REPLACEMENTS[self.choice]
        self._conversions: MutableMapping[Optimizer, _Conversion] = WeakIdKeyDictionary()
        # of the model's parameters, whether the replacement updates them
        self._updates: MutableMapping[torch.Tensor, bool] = WeakTensorKeyDictionary()

    def check(self, workload: Workload) -> None:
        for name, module in workload.model.named_modules():
            if getattr(module, "sparse", False) is True:
                raise _sparse_gradients(self.choice, name)
        for optimizer in workload.optimizers:
            self.check_optimizer(optimizer)
        if self._row.parameters is not None:
            self._check_parameters(workload, self._row.parameters(workload.model))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if not self._row.is_already(optimizer):
            for refuse in _REFUSALS:
                refuse(optimizer, self.choice)

    def _check_parameters(self, workload: Workload, parameters: Collection[Parameter]) -> None:
        converted = [optimizer for optimizer in workload.optimizers if not self._row.is_already(optimizer)]
        own = {id(parameter) for parameter in workload.model.parameters()}
        if converted and not parameters:
            reason = f"{workload.name} repeats no blocks, whose matrices {self.choice} updates"
            raise RefusalError(_FIELD, reason, "use --adam8bit or --optim adafactor")
        if any(id(each) not in own for one in converted for each in parameters_in(one)):
            reason = f"{self.choice} goes by the blocks of one model, and the optimizer of {workload.name} has other parameters too"
            raise RefusalError(_FIELD, reason, "use --adam8bit or --optim adafactor")

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        if self._row.parameters is not None:
            chosen = {id(parameter) for parameter in self._row.parameters(workload.model)}
            self._updates.update({parameter: id(parameter) in chosen for parameter in workload.model.parameters()})

    def attach_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        if self._row.is_already(optimizer):
            self.notes.once(f"already {type(optimizer).__name__}: --optim {self.choice} changes nothing")
            return
        undo.callback(self._conversions.pop, optimizer, None)
        self._conversions[optimizer] = _Conversion(
            optimizer, self.choice, self._updates, lambda: self.host.techniques()
        )
        for note in self._row.notes:
            self.notes.once(note)

    def pack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        conversion = self._conversions.get(optimizer)
        return state if conversion is None else conversion.pack(optimizer, parameter, state)

    def unpack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        conversion = self._conversions.get(optimizer)
        return state if conversion is None else conversion.unpack(optimizer, parameter, state)

    def stepper(self, optimizer: Optimizer) -> Stepper | None:
        conversion = self._conversions.get(optimizer)
        if conversion is None:
            return None
        stepper = partial(conversion.update, optimizer)
        setattr(stepper, "is_one_kernel", bool(self._row.kernel))  # noqa: B010 # an attribute that its type does not know
        return stepper

    def step_ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        conversion = self._conversions.get(optimizer)
        if conversion is not None and not skipped:
            conversion.drop_stale(optimizer)

    @property
    def host_bytes(self) -> int:
        return sum(conversion.host_bytes for conversion in self._conversions.values())


class _Delegate:
    """An optimizer that updates parameters with another one's state and settings, and holds neither in between."""

    def __init__(self, row: Replacement) -> None:
        self.form = row.form()
        self._settings, self._rate = row.settings, row.rate
        self._optimizer = row.make([torch.nn.Parameter(torch.empty(0, 0, device="cpu"))])
        self._optimizer.param_groups = []

    def update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        delegate = self._optimizer
        strided = [(parameter, parameter.data) for parameter in parameters if not parameter.is_contiguous()]
        delegate.state = optimizer.state
        delegate.param_groups = self._groups(optimizer, parameters)
        try:
            with torch.no_grad():
                unhooked_step(delegate)(delegate)
        finally:
            delegate.param_groups, delegate.state = [], {}  # type: ignore[assignment]
        _restore_layouts(strided)
        if not self.form.counts_updates:
            for parameter in parameters:
                optimizer.state[parameter]["step"] += 1

    def _groups(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
        chosen = {id(parameter) for parameter in parameters}
        groups = []
        for group in optimizer.param_groups:
            settings = {name: _number(group[name]) for name in self._settings}
            settings["lr"] *= self._rate
            settings["weight_decay"] /= self._rate
            own = [parameter for parameter in group["params"] if id(parameter) in chosen]
            groups.append({**self._optimizer.defaults, **settings, "params": own})
        return groups


class _Conversion:
    """One optimizer's delegates and the formats its state goes between."""

    def __init__(
        self,
        optimizer: Optimizer,
        choice: OptimizerChoice,
        updates: Mapping[torch.Tensor, bool],
        techniques: Callable[[], Sequence[Technique]],
    ) -> None:
        row = REPLACEMENTS[choice]
        self._techniques = techniques
        self._is_updating = False
        self._choice = choice
        self._source = TorchAdamFormat() if is_torch_adam(optimizer) else bnb_format_of(optimizer)
        self._main = _Delegate(row)
        self._rest = self._main if row.parameters is None else _Delegate(REPLACEMENTS[OptimizerChoice.ADAMW])
        self._updates = updates
        self._parked = ParkedStates()
        # of the user's moments: the dtype of a parameter can be another one between steps than during them
        self._dtypes: MutableMapping[torch.Tensor, torch.dtype] = WeakTensorKeyDictionary()

    @property
    def host_bytes(self) -> int:
        return self._parked.stored_bytes

    def pack(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        form, before = self._delegate_of(parameter).form, kept_of(state)
        if form.holds(parameter, before):
            return state
        group = group_of(optimizer, parameter)
        moments = self._source.decode(parameter, group, before)
        self._dtypes[parameter] = moments.first.dtype
        if form.follows_dtype:
            moments = moments.to(parameter.dtype)
        resident = form.encode(parameter, group, moments)
        if not form.keeps_all(parameter):
            self._parked.park(parameter, before)
        return self._shown(optimizer, parameter, resident)

    def unpack(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        form, state = self._delegate_of(parameter).form, kept_of(state)
        if not form.holds(parameter, state) or self._source.holds(parameter, state):
            return state
        if self._parked.is_of_step(parameter, state["step"]):
            return self._parked.of(parameter) or {}
        if not form.keeps_second:
            return {}
        group = group_of(optimizer, parameter)
        moments = form.decode(parameter, group, state)
        return self._source.encode(parameter, group, moments.to(self._dtypes.get(parameter, parameter.dtype)))

    def update(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Let the delegates update these parameters with the current settings of their groups."""
        self._is_updating = True
        try:
            for parameter in parameters:
                self._make_ready(optimizer, parameter)
            for delegate in dict.fromkeys((self._main, self._rest)):
                own = [parameter for parameter in parameters if self._delegate_of(parameter) is delegate]
                if own:
                    delegate.update(optimizer, own)
        finally:
            self._is_updating = False
        for parameter in parameters:
            state = optimizer.state.get(parameter)
            if state and not isinstance(state, PackedState):
                set_state(optimizer, parameter, self._shown(optimizer, parameter, state))

    def _shown(self, optimizer: Optimizer, parameter: Parameter, resident: State) -> State:
        """Resident state, as the loop may find it."""
        form = self._delegate_of(parameter).form
        if self._source.holds(parameter, resident):
            return resident
        names = self._source.names if form.keeps_second else frozenset[str]()
        return shown(resident, names, optimizer, parameter, self._layers_at_rest, f"under --optim {self._choice}")

    def _layers_at_rest(self) -> Sequence[Technique] | None:
        return None if self._is_updating else self._techniques()

    def _delegate_of(self, parameter: Parameter) -> _Delegate:
        return self._main if self._main is self._rest or self._updates.get(parameter) else self._rest

    def drop_stale(self, optimizer: Optimizer) -> None:
        """Free what was parked for parameters that have been updated since."""
        self._parked.drop_updated(lambda parameter: kept_of(optimizer.state.get(parameter, {})).get("step"))

    def _make_ready(self, optimizer: Optimizer, parameter: Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise _sparse_gradients(self._choice)
        state, form = optimizer.state.get(parameter), self._delegate_of(parameter).form
        if not state:
            self._dtypes[parameter] = parameter.dtype
            fresh = form.fresh(parameter)
            if fresh is not None:
                optimizer.state[parameter] = fresh
        elif not form.holds(parameter, kept_of(state)):
            # loaded by an optimizer that runs no load_state_dict hooks, as those of bitsandbytes
            optimizer.state[parameter] = self.pack(optimizer, parameter, state)


def _restore_layouts(strided: Sequence[tuple[Parameter, torch.Tensor]]) -> None:
    """Undo bitsandbytes' quiet change of channels-last parameters to contiguous ones, in the data they had: others may have those."""
    for parameter, data in strided:
        if parameter.data_ptr() != data.data_ptr():
            parameter.data = data.copy_(parameter.data)


def _number(value: Any) -> Any:
    """A setting as a plain number; learning rates and betas may be tensors."""
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)


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
    if not is_torch_adam(optimizer) and not is_bnb_adam(optimizer):
        raise RefusalError(_FIELD, f"{name} keeps no Adam moments that {choice} could take over", _USE_ADAMW)


def _refuse_own_updates(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    if is_torch_adam(optimizer) and inspect.unwrap(type(optimizer).step) is not inspect.unwrap(torch.optim.Adam.step):
        name = type(optimizer).__name__
        raise RefusalError(_FIELD, f"{name} changes the step of Adam, and {choice} would lose the change", _USE_ADAMW)


def _refuse_variants(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    for variant in ("amsgrad", "maximize", "differentiable"):
        if any(group.get(variant) for group in optimizer.param_groups):
            given = f"{type(optimizer).__name__} was made with {variant}=True"
            raise RefusalError(_FIELD, f"{given}, which {choice} does not have", f"make it without {variant}")


def _refuse_coupled_decay(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    if not REPLACEMENTS[choice].adds_decay and couples_decay(optimizer):
        raise RefusalError(
            _FIELD,
            f"Adam adds its weight_decay to the gradient, {choice} takes it off the weights",
            "use torch.optim.AdamW, or Adam with weight_decay=0",
        )


def _refuse_gradients(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters_in(optimizer)):
        raise _sparse_gradients(choice)


def _refuse_dtypes(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    allowed = REPLACEMENTS[choice].dtypes
    odd = {p.dtype for p in parameters_in(optimizer) if p.dtype not in allowed}
    if allowed and odd:
        found, takes = odd.pop(), ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        nearest = "leave the optimizer as it is" if found.is_complex else "use --optim adafactor"
        raise RefusalError(_FIELD, f"a parameter is {found}, and {choice} takes {takes}", nearest)


def _refuse_missing_packages(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    if is_bnb_adam(optimizer):
        require("bitsandbytes")
    if package := REPLACEMENTS[choice].package:
        require(package)


def _refuse_missing_kernels(optimizer: Optimizer, choice: OptimizerChoice) -> None:
    row, parameter = REPLACEMENTS[choice], next(iter(parameters_in(optimizer)))
    device = stood_for(parameter)
    # which kernels a package would bring for a device that is not here, nobody can ask
    has = device.type in row.backends if isinstance(parameter, FakeTensor) else has_kernel(row.kernel, device)
    if row.kernel and not has:
        reason = f"{row.package} has no 8-bit kernels for {name_of(device)}"
        raise RefusalError(_FIELD, reason, "use --offload optimizer, or --optim adafactor")


_REFUSALS: tuple[Callable[[Optimizer, OptimizerChoice], None], ...] = (
    _refuse_other_optimizers,
    _refuse_own_updates,
    _refuse_variants,
    _refuse_coupled_decay,
    _refuse_gradients,
    _refuse_dtypes,
    lambda optimizer, choice: REPLACEMENTS[choice].refuse(optimizer),
    _refuse_missing_packages,
    _refuse_missing_kernels,
)
