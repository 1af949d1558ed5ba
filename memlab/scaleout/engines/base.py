"""The engine of one rank: takes over a model whose tensors have no data yet, trains it, and writes it down; `Ddp`, the simplest."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from memlab.plan.scale import Scale
from memlab.runtime.workload import Workload
from memlab.scaleout import tensors
from memlab.scaleout.engines.micro import EngineRun, SetAside
from memlab.scaleout.replica import is_hooks
from memlab.techniques.accumulation.micro import Learnt, MicroRun
from memlab.techniques.accumulation.split import Division
from memlab.techniques.base import ModelCall

Optimizer = torch.optim.Optimizer
# folder beside that of the tensors, for what is offloaded to the disk
DISK = "offloaded"


class Engine(ABC):
    """One engine on one rank."""

    owns_steps = False  # whether the engine does the optimizer's steps
    is_stepping = False  # whether it is doing one, or one of its own
    shares_rows = True  # whether each rank takes rows of its own; otherwise every rank sees all of them

    def __init__(self, workload: Workload, folder: Path, device: torch.device, scale: Scale) -> None:
        # the objects as they arrived; parameters, buffers and optimizer state are placeholders
        self.workload = workload
        self.folder = folder  # where their values are stored (see `tensors`)
        self.device = device  # of this rank
        self.scale = scale  # the engine and the plan, of which the offload counts here
        # the model without what is hooked to the outermost module, which stays the user's
        self.inner = inner_of(workload.model)
        self.learnt = Learnt()  # what split calls have taught
        # names of the settings of the optimizers' groups, to which engines add settings of their own
        groups = (group for optimizer in workload.optimizers for group in optimizer.param_groups)
        self.settings = {name for group in groups for name in group} - {"params"}

    def start(self) -> None:
        """Give the placeholders their values, sharded as the engine has it, and wire the engine to the model."""
        model = self.workload.model
        names = tensors.names_of(model)
        self._place()
        self._exchange_parameters(names)
        tensors.fill({**tensors.parameter_keys(model), **tensors.buffer_keys(model)}, self.folder)
        self._hand_over()

    def _place(self) -> None:
        """Give every placeholder of the model memory, in place of the object that is there."""
        made: dict[int, torch.Tensor] = {}
        for module in self.workload.model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = _real(tensor, self.device)
                        held[name] = made[id(tensor)]  # type: ignore[assignment] # a parameter for a parameter

    def _exchange_parameters(self, names: dict[int, str]) -> None:
        """Have optimizers step the parameters the model has now, with the state they had; `names` are those of before."""
        now = dict(self.workload.model.named_parameters())
        for optimizer in self.workload.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [now[names[id(parameter)]] for parameter in group["params"]]
            states = [(now[names[id(parameter)]], state) for parameter, state in optimizer.state.items()]
            optimizer.state.clear()
            optimizer.state.update(states)

    def _hand_over(self) -> None:
        """Give placeholders in optimizer state their values."""
        names = tensors.names_of(self.workload.model)
        made: dict[str, torch.Tensor] = {}
        for number, optimizer in enumerate(self.workload.optimizers):
            for parameter, state in optimizer.state.items():
                for entry, value in state.items():
                    if isinstance(value, torch.Tensor) and value.is_meta:
                        key = tensors.state_key(number, names[id(parameter)], entry)
                        state[entry] = made[key] = self._state_like(parameter, value)
        tensors.fill(made, self.folder)

    def _state_like(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """An empty tensor for an entry of a parameter's state; counters of steps stay on the host, as torch keeps them."""
        if value.shape == parameter.shape and isinstance(parameter, DTensor):
            return torch.empty_like(parameter.detach(), dtype=value.dtype)
        return torch.empty(value.shape, dtype=value.dtype, device=self.device if value.dim() else "cpu")

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on some rows."""

    def look(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on some rows to see its outputs: no backward pass follows."""
        return self.call(*args, **kwargs)

    def accumulate(self, share: Division, around: Callable[[ModelCall], ModelCall]) -> Any:
        """Run the model on some rows, a few at a time."""
        aside = SetAside(self.workload.model.parameters(), self.device)
        return self._run_of(EngineRun, share, around(self.call), gatherer=aside).outputs()

    def _run_of(self, kind: type[MicroRun], share: Division, call: ModelCall, **options: Any) -> MicroRun:
        return kind(self.inner, call, share, self.learnt, **options)

    def step(self, optimizer: Optimizer) -> None:  # noqa: B027 - most leave steps to the optimizer
        """Do an optimizer's step, where the engine `owns_steps`."""

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor | None:
        """Clip gradients that only the engine sees, and say what their norm was; None where the loop can do it."""
        return None

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write all tensors, under the keys they came with; all ranks call it."""

    def stop(self) -> None:  # noqa: B027 - most have nothing to stop
        """Give back what the engine took outside of the model."""


class Ddp(Engine):
    """Data parallelism: every rank has all parameters, gradients are averaged while the backward pass runs.

    Micro-batches run inside the wrapped module, on aliases of the parameters: to the wrapper a split call is one call, with
    one backward pass, after which gradients are averaged once.

    Source: `torch.nn.parallel.DistributedDataParallel`, https://docs.pytorch.org/docs/stable/notes/ddp.html
    """

    def start(self) -> None:
        super().start()
        self._forward: ModelCall = self.inner.forward
        self._split: Callable[[], Any] | None = None
        vars(self.inner)["forward"] = self._within
        # a loop may train parts of a model in turn; with `device_ids` the wrapper moves inputs, and a split call has none
        self._wrapped = DistributedDataParallel(self.inner, find_unused_parameters=True)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)

    def accumulate(self, share: Division, around: Callable[[ModelCall], ModelCall]) -> Any:
        self._split = self._run_of(MicroRun, share, around(self._forward)).outputs
        return self._wrapped()

    def _within(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, as the wrapper calls it."""
        if self._split is None:
            return self._forward(*args, **kwargs)
        split, self._split = self._split, None
        return split()

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            tensors.store(tensors.all_of(self.workload), folder)
        dist.barrier()


def inner_of(model: nn.Module) -> nn.Module:
    """A second outermost module over the same parameters and submodules, with hooks of its own.

    An engine hooks itself to it, and a call of the user's model does not run the engine's hooks twice.
    """
    inner = copy.copy(model)
    for name, value in vars(model).items():
        if is_hooks(name) and isinstance(value, dict):
            vars(inner)[name] = OrderedDict()
    vars(inner).pop("forward", None)
    return inner


def _real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    return nn.Parameter(made.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made.detach()
