"""Micro-batches under an engine: the rows of a rank, split again, with gradients that the engine reduces meanwhile.

The mechanism is that of `memlab.techniques.accumulation.accumulation`; what differs is where gradients gather.

1. Aliases of parameters, as in one process, would go past an engine that gathers them (FSDP2) or shards them (tensor
   parallelism). There micro-batches run on the parameters themselves, and what they add to `grad` is set aside until the loop's
   own backward pass asks for it (`SetAside`). FSDP2 reduces the gradient of every micro-batch: it then keeps shards
   between them. Waiting for the last one would keep gradients of the whole model on every rank.
2. ZeRO 2 and 3 put gradients into shards that nobody can take them out of. The first call is therefore run twice: its
   backward pass tells by which factor the loop scales its loss. Later ones take that factor for granted; where the loop
   has another one, or drops its loss, the difference is added by running the micro-batches again (`ShardedRun`).
3. A micro-batch without any target takes part in the backward pass with a gradient of zero: other ranks wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.techniques.accumulation.micro import Learnt, MicroRun
from memlab.techniques.accumulation.split import Call, Outputs


@dataclass
class _Holder:
    grad: torch.Tensor | None = None


class SetAside:
    """Gradients of some parameters, kept apart from those the loop has gathered already."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.aliases = [_Holder() for _ in self._parameters]
        # what makes the outputs ask for a backward pass at all
        self.originals = [torch.zeros((), device=device, requires_grad=True)]
        self.device = device

    def another(self) -> SetAside:
        """An empty one for the same parameters."""
        return SetAside(self._parameters, self.device)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Set aside what is added to `grad` within."""
        earlier = [parameter.grad for parameter in self._parameters]
        self._exchange([holder.grad for holder in self.aliases])
        try:
            yield
        finally:
            for holder, parameter in zip(self.aliases, self._parameters, strict=True):
                holder.grad = parameter.grad
            self._exchange(earlier)

    def _exchange(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def originals_in_place(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Refuse: an engine reduces gradients as it makes them, and gives them no graph."""
        raise RefusalError(
            "accumulation",
            "create_graph=True through a split batch under an engine, whose gradients have no graph",
            "leave --accumulate out for this loop",
        )

    def originals_untouched(self, model_name: str) -> AbstractContextManager[None]:
        """Parameters are the originals here, so there is nothing to watch."""
        return nullcontext()

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Add what was set aside to the parameters' own."""
        for holder, parameter in zip(self.aliases, self._parameters, strict=True):
            if holder.grad is not None:
                gradient, holder.grad = holder.grad, None
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return [None]


class EngineRun(MicroRun):
    """A split call whose micro-batches run on the engine's own parameters."""

    _aliases: SetAside

    def _again(self) -> MicroRun:
        return type(self)(
            self._model, self._call, self._division, self._learnt,
            random_states=self._random_states, gatherer=self._aliases.another(),
        )  # fmt: skip

    def _backward_of_loss(self, micro_batch: Call, loss: torch.Tensor, weight: float) -> None:
        if not weight:
            # a mean over no target is nan, and its gradient by the outputs is zero all the same
            self._backward([loss], [torch.zeros_like(loss)])
        super()._backward_of_loss(micro_batch, loss, weight)


@dataclass
class ShardedLearnt(Learnt):
    """Facts learnt from calls where gradients go into shards."""

    # by which the loop scaled the gradient of its loss last; None before its first backward pass
    factor: torch.Tensor | None = None
    # runs whose gradients are in the shards, while the loop has not asked for them
    unclaimed: list[ShardedRun] = field(default_factory=list)
    answered: bool = False  # whether the loop has asked for gradients since the last update

    def settle(self) -> None:
        """Take back the gradients the loop never asked for, before an update uses them."""
        for run in [*self.unclaimed]:
            run.retract()


class ShardedRun(EngineRun):
    """A split call whose gradients cannot be set aside."""

    _learnt: ShardedLearnt

    def retract(self) -> None:
        """Add the negative of what this run has added."""
        self._scale_gathered(None)

    def first_pass(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        result = super().first_pass()
        if self._fused:
            self._learnt.unclaimed.append(self)
        return result

    def gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        self._learnt.answered = True
        loss, eager = self._gathered.loss, self._gathered.eager
        if not self._fused and loss in eager:
            gradient = outer[eager.index(loss)]
            self._learnt.factor = gradient.detach() if gradient is not None else self._learnt.factor
        return super().gradients(outer)

    def _choose_form(self, outputs: Outputs) -> None:
        super()._choose_form(outputs)
        self._fused = self._fused and self._learnt.factor is not None
        if self._fused:
            assert self._learnt.factor is not None
            self._inner_scale = self._learnt.factor

    def _scale_gathered(self, loss_gradient: torch.Tensor | None) -> None:
        self._learnt.unclaimed = [run for run in self._learnt.unclaimed if run is not self]
        assert isinstance(self._inner_scale, torch.Tensor)
        asked = torch.zeros_like(self._inner_scale) if loss_gradient is None else loss_gradient.detach()
        if loss_gradient is not None:
            self._learnt.factor = asked
        missing = asked - self._inner_scale
        if float(missing):
            self._replay({self._gathered.loss: missing})
