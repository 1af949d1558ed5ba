"""`ShownGradients`: DeepSpeed's gradients, shown as those of the user's parameters."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from memlab.scaleout.engines.deepspeed_engine import DeepSpeedEngine, FlatPlace
from memlab.scaleout.in_process import on_gradient


@dataclass(frozen=True, eq=False)
class Pair:
    """A parameter of the user's, and where the engine has it."""

    name: str  # of the parameter
    users: nn.Parameter  # the user's parameter
    place: FlatPlace  # that of the replica's

    def in_flat(self, flat: torch.Tensor) -> torch.Tensor:
        return self.place.in_flat(flat).view(self.users.shape)


class ShownGradients:
    """DeepSpeed's gradients, shown as those of the user's parameters."""

    def __init__(self, engine: DeepSpeedEngine, pairs: list[Pair], stage: int, undo: ExitStack) -> None:
        self._zero = engine.zero
        self._pairs = pairs
        self._stage = stage
        self._touched: set[str] = set()
        self._shown: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}  # gradients that the next ones are added to
        prologue = self._zero.backward_prologue

        def begin() -> None:
            self._begin()
            prologue()

        self._zero.backward_prologue = begin
        # DeepSpeed's own comes first
        self._zero.register_grad_acc_post_hook(self._show)
        for pair in pairs:
            undo.callback(on_gradient(pair.place.parameter, partial(self._touch, pair.name)))

    def _touch(self, name: str, _parameter: torch.Tensor) -> None:
        self._touched.add(name)

    def _begin(self) -> None:
        shown = [pair for pair in self._pairs if pair.users.grad is not None]
        if self._shown and not shown:
            self._drop()
        elif self._shown:
            self.take()
        else:
            # Of the last step, or of a part of the loss that uses parameters outside of the model's call: backward() adds
            # to them. They may lie where DeepSpeed is about to write.
            for pair in shown:
                if pair.users.grad is not None and bool(pair.users.grad.any()):
                    self._before[pair.name] = pair.users.grad.clone()
                pair.users.grad = None

    def _drop(self) -> None:
        """The loop has dropped its gradients without a step."""
        zero = self._zero
        self.forget()
        zero.zero_grad(set_to_none=True)
        if self._stage == 3:
            zero.micro_step_id = 0
            zero._offload_boundary_param_ids = set()
            return
        zero.micro_step_id = -1
        zero.all_grad_tensors.clear()
        zero._offload_accumulated_param_ids = set()

    @torch.no_grad()
    def _show(self) -> None:
        for pair in self._pairs:
            name, there = pair.name, pair.users.grad
            if name in self._touched:
                gradient = self._gradient_of(pair.place).view(pair.users.shape).detach()
                # what the loss's own use of a parameter gave, before the model's part or after it
                for other in (self._before.pop(name, None), None if there is self._shown.get(name) else there):
                    if other is not None:
                        gradient.add_(other.to(gradient))
                self._shown[name] = pair.users.grad = gradient
            elif name in self._before:
                pair.users.grad = self._before.pop(name) + (0 if there is None else there)

    def _gradient_of(self, place: FlatPlace) -> torch.Tensor:
        zero, own = self._zero, place.parameter
        if self._stage == 1:
            assert own.grad is not None
            return own.grad
        if self._stage == 3:
            kept: torch.Tensor = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[own.ds_id]  # type: ignore[attr-defined]
            return kept.narrow(0, 0, place.length)
        if zero.cpu_offload:
            accumulated: torch.Tensor = zero.accumulated_grads_in_cpu[zero.get_param_id(own)]
            return accumulated
        of_group = [pair.place for pair in self._pairs if pair.place.flat == place.flat]
        tensor: torch.Tensor = zero.all_grad_tensors[place.flat][of_group.index(place)]
        return tensor

    @property
    def missing(self) -> list[str]:
        """Names of the parameters that no backward pass through the model has given a gradient."""
        return [pair.name for pair in self._pairs if pair.users.grad is None or pair.name not in self._shown]

    @torch.no_grad()
    def take(self) -> None:
        """Give DeepSpeed the gradients that the loop has put in place of those it was shown."""
        for pair in self._pairs:
            shown, now = self._shown.get(pair.name), pair.users.grad
            if shown is not None and now is not None and now.data_ptr() != shown.data_ptr():
                shown.copy_(now)
                pair.users.grad = shown

    def forget(self) -> None:
        self._shown.clear()
        self._before.clear()
        self._touched.clear()
