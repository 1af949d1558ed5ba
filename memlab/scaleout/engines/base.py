"""The engine of one rank: takes over a model whose tensors have no data yet, trains it, and writes it down."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.runtime.workload import Workload
from memlab.scaleout import tensors
from memlab.scaleout.engines.micro import EngineRun, SetAside, Share
from memlab.techniques.accumulation.micro import Learnt, MicroRun
from memlab.techniques.base import ModelCall

Optimizer = torch.optim.Optimizer


class Engine(ABC):
    """One engine on one rank.

    Args:
        workload: the objects as they arrived; parameters, buffers and optimizer state are placeholders.
        folder: where their values are stored (see `tensors`).
        device: of this rank.

    Attributes:
        inner: the model without what is hooked to the outermost module, which stays the user's.
        owns_steps: whether the engine does the optimizer's steps.
        settings: names of the settings of the optimizers' groups.
        is_stepping: whether it is doing one, or one of its own.
        shares_rows: whether each rank takes rows of its own; otherwise every rank sees all of them.
        learnt: what split calls have taught.
    """

    owns_steps = False
    is_stepping = False
    shares_rows = True

    def __init__(self, workload: Workload, folder: Path, device: torch.device) -> None:
        self.workload = workload
        self.folder = folder
        self.device = device
        self.inner = inner_of(workload.model)
        self.learnt = Learnt()
        # engines add settings of their own to the groups
        self.settings = {
            name for optimizer in workload.optimizers for group in optimizer.param_groups for name in group
        }
        self.settings.discard("params")

    @abstractmethod
    def start(self) -> None:
        """Give the placeholders their values, sharded as the engine has it, and wire the engine to the model."""

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on some rows."""

    def look(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on some rows to see its outputs: no backward pass follows."""
        return self.call(*args, **kwargs)

    def accumulate(self, share: Share, around: Callable[[ModelCall], ModelCall]) -> Any:
        """Run the model on some rows, a few at a time.

        Args:
            share: the rows.
            around: puts what surrounds a call of the model around it.
        """
        aside = SetAside(self.workload.model.parameters(), self.device)
        return self._run_of(EngineRun, share, around(self.call), gatherer=aside).outputs()

    def _run_of(self, kind: type[MicroRun], share: Share, call: ModelCall, **options: Any) -> MicroRun:
        return kind(
            self.inner, call, share.micro_batches, share.layout, share.weights, share.joins, self.learnt, **options
        )

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


def inner_of(model: nn.Module) -> nn.Module:
    """A second outermost module over the same parameters and submodules, with hooks of its own.

    An engine hooks itself to it, and a call of the user's model does not run the engine's hooks twice.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> inner = inner_of(model)
        >>> _ = inner.register_forward_hook(lambda *_: None)
        >>> len(model._forward_hooks), inner[0] is model[0]
        (0, True)
    """
    inner = copy.copy(model)
    for name, value in vars(model).items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
            vars(inner)[name] = OrderedDict()
    vars(inner).pop("forward", None)
    return inner


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every placeholder of a model memory on a device, in place of the object that is there."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _real(tensor, device)
                    held[name] = made[id(tensor)]  # type: ignore[assignment] # a parameter for a parameter


def _real(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        moved = tensor.detach().to(device)
        return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def exchange_parameters(optimizers: list[Optimizer], names: dict[int, str], model: nn.Module) -> None:
    """Have optimizers step the parameters a model has now, with the state they had.

    Args:
        optimizers: whose groups name the parameters of before.
        names: name of each parameter of before, by its id.
        model: with the parameters of now.
    """
    now = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [now[names[id(parameter)]] for parameter in group["params"]]
        states = [(now[names[id(parameter)]], state) for parameter, state in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(states)


def fill_state(
    optimizers: list[Optimizer],
    model: nn.Module,
    folder: Path,
    like: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Give placeholders in optimizer state their values.

    Args:
        optimizers: whose state has placeholders.
        model: whose parameters they step.
        folder: where the values are stored.
        like: makes an empty tensor for the placeholder of an entry of a parameter's state.
    """
    names = tensors.names_of(model)
    made: dict[str, torch.Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for entry, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    key = tensors.state_key(number, names[id(parameter)], entry)
                    state[entry] = made[key] = like(parameter, value)
    tensors.fill(made, folder)
