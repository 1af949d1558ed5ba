"""DeepSpeed's ZeRO on a rank: optimizer state in shards (1), gradients as well (2), parameters as well (3).

Which backward pass is the last before a step only the step tells, so DeepSpeed does not count micro-steps here: stage 1 gathers
gradients on each rank and reduces their sum, stages 2 and 3 reduce every backward pass into shards. `clip_grad_norm_` comes
before the step and needs the sum, so what DeepSpeed's step would begin with is done by whoever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memlab.errors import ScaleError
from memlab.plan.scale import Scale
from memlab.plan.settings.scale import zero_stage
from memlab.runtime.workload import Workload
from memlab.scaleout import tensors
from memlab.scaleout.engines.base import DISK, Engine
from memlab.scaleout.engines.deepspeed_engine import DeepSpeedEngine
from memlab.scaleout.engines.micro import SetAside, ShardedLearnt, ShardedRun
from memlab.techniques.accumulation.split import Division
from memlab.techniques.base import ModelCall

Optimizer = torch.optim.Optimizer


class Zero(Engine):
    """A DeepSpeed engine over the inner model.

    Known limitations: one optimizer; under stages 2 and 3 gradients cannot be dropped between backward pass and step.
    """

    owns_steps = True
    learnt: ShardedLearnt

    def __init__(self, workload: Workload, folder: Path, device: torch.device, scale: Scale) -> None:
        super().__init__(workload, folder, device, scale)
        self._stage = zero_stage(scale.engine)
        self._names: dict[int, str] = {}
        self._gradients_finished = False
        self._splitting = 0
        self.learnt = ShardedLearnt()

    # -- there ---------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        model, (self._optimizer,) = self.workload.model, self.workload.optimizers
        self._names = tensors.names_of(model)
        states = {id(parameter): state for parameter, state in self._optimizer.state.items()}
        self._optimizer.state.clear()
        self._deepspeed = DeepSpeedEngine(
            self.inner, self._optimizer, self._stage, self.scale.plan, self.device, self.folder.parent / DISK
        )
        self._engine, self._zero = self._deepspeed.engine, self._deepspeed.zero
        # the engine drops gradients after each step; the loop's call would drop the buffers it gathers them in
        self._optimizer.zero_grad = self._drop_gradients  # type: ignore[method-assign]
        self._zero.register_grad_acc_post_hook(self._backward_ended)
        kept = tensors.stored(self.folder)

        def read(parameter: nn.Parameter, entry: str) -> torch.Tensor:
            key = tensors.state_key(0, self._names[id(parameter)], entry)
            size, dtype = kept[key]
            whole = torch.empty(size, dtype=dtype, device="cpu")
            tensors.fill({key: whole}, self.folder)
            return whole

        self._deepspeed.give_state(states, read)

    # -- training ------------------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def look(self, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed records what the engine's calls use, to fetch it ahead in the next step: this one is part of no step
        return self.workload.model.forward(*args, **kwargs)

    def accumulate(self, share: Division, around: Callable[[ModelCall], ModelCall]) -> Any:
        if self._stage == 1:
            return super().accumulate(share, around)
        nowhere = SetAside([], self.device)
        self._splitting += 1
        try:
            return self._run_of(ShardedRun, share, around(self.call), gatherer=nowhere).outputs()
        finally:
            self._splitting -= 1

    def step(self, optimizer: Optimizer) -> None:
        self._finish_gradients()
        self.is_stepping = True
        try:
            with self._gradients_stay():
                self._engine.step()
        finally:
            self.is_stepping = False
            self._gradients_finished = self.learnt.answered = False
            self._zero.clip_grad = 0.0

    def _finish_gradients(self) -> None:
        """Make of all backward passes since the last step the gradients of the next."""
        if self._gradients_finished:
            return
        self.learnt.settle()
        self._gradients_finished = True
        if self._stage == 1:
            self._engine._running_engine_step = True  # this is a boundary
            try:
                self._engine.allreduce_gradients()
            finally:
                self._engine._running_engine_step = False
        else:
            self._zero.finalize_gradient_accumulation_boundary()

    @contextmanager
    def _gradients_stay(self) -> Iterator[None]:
        """DeepSpeed's step does not finish them a second time."""
        self._engine.enable_backward_allreduce = False
        self._zero.finalize_gradient_accumulation_boundary = lambda: None
        try:
            yield
        finally:
            self._engine.enable_backward_allreduce = True
            del self._zero.finalize_gradient_accumulation_boundary

    def _backward_ended(self) -> None:
        # those within a split call are answered when the loop asks for them
        self.learnt.answered = self.learnt.answered or not self._splitting

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        if not self.learnt.answered:
            return
        if self._stage > 1:
            raise ScaleError(
                f"optimizer.zero_grad() between backward() and step(): ZeRO-{self._stage} has added these gradients to shards "
                "and cannot take them out; call zero_grad() after step(), or use --scale fsdp2"
            )
        self.learnt.answered = False
        for parameter in self.workload.model.parameters():
            parameter.grad = None

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor | None:
        """Have the next step clip, in the way of `torch.nn.utils.clip_grad_norm_`; DeepSpeed clips all gradients together."""
        given = {id(parameter) for parameter in parameters}
        trained = {id(parameter) for parameter in self.workload.model.parameters() if parameter.requires_grad}
        if not trained & given:
            return None
        if trained - given:
            raise ScaleError(
                f"clip_grad_norm_ of {len(trained & given)} of {len(trained)} parameters: ZeRO clips all of them together; "
                "give it model.parameters(), or use --scale fsdp2"
            )
        self._finish_gradients()
        self._zero.clip_grad = float(max_norm)
        if self._stage < 3:
            norm = self._zero.scaled_global_norm()
        else:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm = combine_grad_norm_groups(self._zero._get_norm_groups())
        return torch.as_tensor(norm)

    # -- back ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        model, there = self.workload.model, self._deepspeed
        whole: dict[str, torch.Tensor] = dict(tensors.buffer_keys(model))
        for number in range(len(there.flats)):
            with there.in_memory(number) as flat:
                state = there.kept_state(number)
                for place in there.places_in(number):
                    name = self._names[id(place.parameter)]
                    whole[f"parameter.{name}"] = there.whole(place, flat).cpu()
                    for entry, value in there.whole_state(place, state).items():
                        if isinstance(value, torch.Tensor):
                            whole[tensors.state_key(0, name, entry)] = value.cpu()
        for parameter in model.parameters():
            key = f"parameter.{self._names[id(parameter)]}"
            if key not in whole:  # the optimizer does not step it
                whole[key] = self._gathered(parameter)
        if dist.get_rank() == 0:
            tensors.store(whole, folder)
        dist.barrier()

    def _gathered(self, parameter: nn.Parameter) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
            return parameter.detach().cpu().clone()

    def stop(self) -> None:
        self._engine.destroy()
