"""A twin of live objects that has their shapes, but no values and no memory.

Rules of the twin:

1. Floating-point tensors become fake ones on the CPU, whatever device they are on; integer and boolean
   tensors stay real, as copies, so that decisions a model takes from masks, labels and positions are the real
   ones. So do small ones of the batch and the loop that hold zeros and ones alone: masks of floats.
2. The twin is what the user wrote: forwards that memlab patched are those of the class again, parameters have
   the dtype they had before a plan changed it, layers that adapters are in the places of are there again, and the optimizer has
   the settings, but no state.
3. Hooks on modules are left behind unless they are a library's (weight norm, pruning, hidden states as outputs), which keeps
   what it sees in the module or in its call: a user's hook may keep it elsewhere, and would then keep fakes.
4. Nothing of the live objects is written to. What cannot be copied is shared.

Source: `torch._subclasses.fake_tensor`, https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from memlab.errors import TraceError
from memlab.runtime.batch import Batch
from memlab.runtime.homes import stand_for
from memlab.runtime.reach import MODULE_HOOKS, SMALL_BYTES, keeps_state_in_modules
from memlab.runtime.stand_ins import HOOK_OPTIONS
from memlab.runtime.touch import own_class
from memlab.runtime.tree import own_attributes
from memlab.runtime.workload import Workload
from memlab.session import session_of
from memlab.techniques.accumulation.split import Call, Layout

_CPU = torch.device("cpu")
# objects a module may refer to that are no part of it, and that lead to the whole program
_FOREIGN_ATTRIBUTES = ("_trainer", "_fabric")


class TwinWorkload(Workload):
    """A workload of fakes that says it is on the device it stands for."""

    has_values = False

    def __init__(self, device: torch.device, capability: tuple[int, int] | None, **given: Any) -> None:
        self._stands_for, self._capability = device, capability
        super().__init__(**given)

    @property
    def device(self) -> torch.device:
        return self._stands_for

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        return self._capability


class Twin:
    """The fake counterpart of a workload. Raises `TraceError`: the model cannot be copied.

    Args:
        workload: the live objects.
        device: the device the twin says it is on; by default the workload's.
        capability: its compute capability, where it is a GPU of NVIDIA's.
        beside: the twin of a model that trains in the same loop; what both have in common they share.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device | None = None,
        capability: tuple[int, int] | None = None,
        beside: Twin | None = None,
    ) -> None:
        # the mode all fake tensors belong to
        self.fake_mode: FakeTensorMode = (
            FakeTensorMode(allow_non_fake_inputs=True) if beside is None else beside.fake_mode
        )
        stand_for(self.fake_mode, device or workload.device)
        self.notes: list[str] = []  # what was left behind, in words
        self._live = workload
        session = session_of(workload.model)
        self._as_written = None if session is None else session.in_force.as_written()
        self._memo: dict[int, Any] = {} if beside is None else beside._memo
        model = self._copied_model(workload.model)
        self._leave_hooks_behind(model)
        loss_fn = workload.loss_fn
        # fake model, optimizers without state, batch and loss function
        self.workload = TwinWorkload(
            device or workload.device,
            capability,
            model=model,
            optimizer=[self._copied_optimizer(optimizer) for optimizer in workload.optimizers],
            batch=self._copied_batch(workload.batch),
            loss_fn=self._copied(loss_fn, "loss_fn") if isinstance(loss_fn, nn.Module) else loss_fn,
            name=workload.name,
        )

    def with_batch(self, batch: Any) -> Workload:
        """The same fake objects with another batch."""
        twin = self.workload
        return TwinWorkload(
            twin.device,
            twin.compute_capability,
            model=twin.model,
            optimizer=twin.optimizers,
            batch=batch,
            loss_fn=twin.loss_fn,
            name=twin.name,
        )

    def with_rows(self, layout: Layout, rows: int) -> Workload:
        """The same with so many rows in the batch, made by repeating those it has."""
        whole, loss_fn, batch = layout.rows, self.workload.loss_fn, self.workload.batch
        known: dict[int, torch.Tensor] = {}

        def taken(leaf: Any, dim: int) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return [leaf[row % whole] for row in range(rows)]
            if id(leaf) not in known:  # labels may be the very tensor the inputs are
                known[id(leaf)] = leaf.index_select(dim, torch.arange(rows, device="cpu") % whole)
            return known[id(leaf)]

        def target_of(leaf: Any) -> Any:
            dim = layout.dims[0][1]
            is_split = isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.size(dim) == whole
            return taken(leaf, dim) if is_split else leaf

        inputs = Batch.of(batch if loss_fn is None else batch[0])
        call, dims = layout.view(Call.of(inputs.args, inputs.kwargs)), dict(layout.dims)
        leaves = [taken(leaf, dims[place]) if place in dims else leaf for place, leaf in enumerate(call.leaves)]
        resized = Batch(*call.spec.put(leaves))
        return self.with_batch(resized if loss_fn is None else (resized, tree_map(target_of, batch[1])))

    def forget(self) -> None:
        """Drop gradients and optimizer state, to start anew."""
        for parameter in self.workload.model.parameters():
            parameter.grad = None
        for optimizer in self.workload.optimizers:
            optimizer.state.clear()

    # -- copies --------------------------------------------------------------------------------

    def _copied_model(self, model: nn.Module) -> nn.Module:
        session = session_of(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if own_class(tensor) in (torch.Tensor, nn.Parameter):
                dtype = tensor.dtype if session is None else session.in_force.canonical_dtype(tensor)
                self._memo[id(tensor)] = self._counterpart(tensor, dtype)
                if self._as_written is not None and id(tensor) in self._as_written.trained:
                    self._memo[id(tensor)].requires_grad_(True)
        for put_in, module in () if self._as_written is None else self._as_written.modules.items():
            self._memo[put_in] = self._copied(module, "model")
        for module in model.modules():
            for name in _FOREIGN_ATTRIBUTES:
                if (foreign := module.__dict__.get(name)) is not None:
                    self._memo[id(foreign)] = foreign
        copied: nn.Module = self._copied(model, "model")
        for name in () if self._as_written is None else self._as_written.attributes:
            vars(copied).pop(name, None)
        return copied

    def _copied(self, value: Any, what: str) -> Any:
        before = dict(self._memo)
        with _FakeCopies(self._counterpart):
            try:
                return copy.deepcopy(value, self._memo)
            except Exception:  # noqa: BLE001 - anything may come out of a class's own __deepcopy__
                # what was half made must not be taken for a copy
                self._memo.clear()
                self._memo.update(before)
                _share_what_cannot_be_copied(value, self._memo)
            try:
                return copy.deepcopy(value, self._memo)
            except Exception as error:
                raise TraceError(
                    f"{what} {type(value).__name__} cannot be copied for a prediction: {error}; "
                    f"give it a __deepcopy__, or measure the plan instead: measure(workload, plan)"
                ) from error

    def _counterpart(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return what stands for a live tensor: a fake for floats, a copy on the CPU for integers."""
        dtype = dtype or tensor.dtype
        if tensor.layout is not torch.strided:
            raise TraceError(f"a {str(tensor.layout).removeprefix('torch.')} tensor of the model cannot be predicted")
        # on the meta device integers have no values to copy either
        if not (dtype.is_floating_point or dtype.is_complex or tensor.is_meta):
            made = tensor.detach().to(_CPU, copy=True)
        else:
            with self.fake_mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_CPU)
        if isinstance(tensor, nn.Parameter):
            parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
            vars(parameter).update(own_attributes(tensor))  # a forward may read them
            return parameter
        return made.requires_grad_(tensor.requires_grad) if made.is_floating_point() else made

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor of the live objects, or of their loop."""
        if id(tensor) not in self._memo:
            is_mask = _is_mask(tensor)
            self._memo[id(tensor)] = tensor.detach().to(_CPU, copy=True) if is_mask else self._counterpart(tensor)
        made: torch.Tensor = self._memo[id(tensor)]
        return made

    def _copied_optimizer(self, live: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if id(live) in self._memo:  # it steps another model's as well
            shared: torch.optim.Optimizer = self._memo[id(live)]
            shared.param_groups = [self._copied_group(group) for group in live.param_groups]
            return shared
        twin: torch.optim.Optimizer = object.__new__(type(live))
        self._memo[id(live)] = twin
        kept = {name: value for name, value in live.__dict__.items() if name != "step"}  # schedulers patch step
        twin.__dict__.update(kept)
        twin.__dict__.update({name: OrderedDict() for name in kept if name.endswith("_hooks")})
        twin.param_groups = [self._copied_group(group) for group in live.param_groups]
        twin.state = defaultdict(dict)
        return twin

    def _copied_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        groups = {} if self._as_written is None else self._as_written.groups
        known = [self._memo[id(p)] for p in groups.get(id(group), group["params"]) if id(p) in self._memo]
        # parameters of other models: they have no part in this one's step
        settings = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        return {**settings, "params": known}

    def _copied_batch(self, batch: Any) -> Any:
        def copied(leaf: Any) -> Any:
            if isinstance(leaf, Batch):
                return Batch(*tree_map(copied, (leaf.args, dict(leaf.kwargs))))
            if not isinstance(leaf, torch.Tensor):
                return self._copied_if_possible(leaf)  # mappings and records of other classes hold tensors too
            return self.stand_in(leaf)  # labels may be the very tensor the inputs are

        return tree_map(copied, batch)

    def _copied_if_possible(self, value: Any) -> Any:
        try:
            return self._copied(value, "batch")
        except TraceError:
            return value

    def _leave_hooks_behind(self, model: nn.Module) -> None:
        left = 0
        for module in model.modules():
            for name in MODULE_HOOKS:
                hooks = getattr(module, name)
                for key in [key for key, hook in hooks.items() if not _is_part_of_the_model(hook)]:
                    del hooks[key]
                    for options in HOOK_OPTIONS:
                        getattr(module, options).pop(key, None)
                    left += 1
        if left:
            self.notes.append(f"{left} hook{'s' if left > 1 else ''} on modules left out of the prediction")


def _is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a small tensor of floats holds zeros and ones alone."""
    is_plain = own_class(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or not tensor.is_floating_point() or tensor.requires_grad or tensor.nbytes > SMALL_BYTES:
        return False
    return bool(((tensor == 0) | (tensor == 1)).all())


def _is_part_of_the_model(hook: Any) -> bool:
    home = str(hook.__module__ if isinstance(hook, FunctionType) else type(hook).__module__)
    return home.startswith("torch.nn.utils.") or keeps_state_in_modules(home)


class _FakeCopies(TorchFunctionMode):
    """Lets deepcopy make counterparts of tensors."""

    def __init__(self, counterpart: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._counterpart = counterpart

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and type(args[0]) in (torch.Tensor, nn.Parameter):
            tensor, memo = args[0], args[1]
            if id(tensor) not in memo:
                memo[id(tensor)] = self._counterpart(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _share_what_cannot_be_copied(value: Any, memo: dict[int, Any]) -> None:
    """Let copies share attributes of modules that refuse to be copied (locks, files, loggers)."""
    if not isinstance(value, nn.Module):
        return
    for module in value.modules():
        for name, attribute in module.__dict__.items():
            if name in ("_modules", "_parameters", "_buffers") or id(attribute) in memo:
                continue
            try:
                copy.deepcopy(attribute, dict(memo))
            except Exception:  # noqa: BLE001 - anything may come out of a class's own __deepcopy__
                memo[id(attribute)] = attribute
