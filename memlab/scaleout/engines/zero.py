"""DeepSpeed's ZeRO: optimizer state in shards (1), gradients as well (2), parameters as well (3).

Rules of handing over live state, which `deepspeed.initialize` would drop:

1. The optimizer goes in without state. DeepSpeed replaces the parameters in its groups by flat shards, and creates
   their state at the first step. A step with gradients of zero and a learning rate of zero is therefore done first.
2. Then every entry of state is written into the shards, and the count of steps, which that step advanced, put back.
3. On the way home entries are gathered parameter by parameter; the count of steps is that of the shard.

A shard has one count of steps, so parameters of one group that were stepped unequally often are refused.

Which backward pass is the last before a step only the step tells, so DeepSpeed does not count micro-steps here
(``managed_gradient_accumulation`` off): stage 1 gathers gradients on each rank and reduces their sum, stages 2 and 3 reduce every
backward pass into shards. `clip_grad_norm_` comes before the step and needs the sum, so what DeepSpeed's step would
begin with is done by whoever comes first.

Source: https://deepspeed.readthedocs.io/en/latest/zero3.html ("Modifying partitioned states")
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memlab.errors import ScaleError
from memlab.extras import require
from memlab.plan import Offloaded, Plan, Tier
from memlab.runtime.workload import Workload
from memlab.scaleout import async_io, tensors
from memlab.scaleout.engines.base import Engine, exchange_parameters, materialize
from memlab.scaleout.engines.micro import SetAside, ShardedLearnt, ShardedRun, Share
from memlab.scaleout.zero_sizes import ZeroSizes
from memlab.techniques.base import ModelCall

Optimizer = torch.optim.Optimizer
_STEP = "step"
# a shard for each parameter: gradients are read wrongly to where no page of the shard begins
SHARD_EACH = 1
# folder beside that of the tensors, for what is offloaded to the disk
DISK = "offloaded"


def zero_engine(stage: int, plan: Plan) -> Callable[[Workload, Path, torch.device], Engine]:
    """The engine of a stage, with what the plan offloads."""

    def make(workload: Workload, folder: Path, device: torch.device) -> Engine:
        return Zero(workload, folder, device, stage, plan)

    return make


class Zero(Engine):
    """A DeepSpeed engine over the inner model.

    Args:
        workload: as for `Engine`.
        folder: as for `Engine`.
        device: as for `Engine`.
        stage: 1, 2 or 3.
        plan: of which the offload counts here.

    Attributes:
        owns_steps: always.

    Known limitations: one optimizer; under stages 2 and 3 gradients cannot be dropped between backward pass and step.
    """

    owns_steps = True
    learnt: ShardedLearnt

    def __init__(self, workload: Workload, folder: Path, device: torch.device, stage: int, plan: Plan) -> None:
        super().__init__(workload, folder, device)
        self._stage = stage
        self._plan = plan
        self._names: dict[int, str] = {}
        self._gradients_finished = False
        self._splitting = 0
        self.learnt = ShardedLearnt()

    # -- there ---------------------------------------------------------------------------------

    def start(self) -> None:
        model, optimizers = self.workload.model, self.workload.optimizers
        if len(optimizers) != 1:
            raise ScaleError(
                f"ZeRO serves one optimizer, {self.workload.name} has {len(optimizers)}: use --scale fsdp2"
            )
        (self._optimizer,) = optimizers
        before = tensors.names_of(model)
        materialize(model, self.device)
        exchange_parameters(optimizers, before, model)
        tensors.fill({**tensors.parameter_keys(model), **tensors.buffer_keys(model)}, self.folder)
        self._names = tensors.names_of(model)
        states = {self._names[id(parameter)]: state for parameter, state in self._optimizer.state.items()}
        self._optimizer.state.clear()
        groups = [[self._names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]
        self._initialize()
        if states:
            self._hand_over(states, groups)

    def _initialize(self) -> None:
        deepspeed = _deepspeed(self.device)
        with async_io.loaded_from_there(self.device):
            self._engine, *_ = deepspeed.initialize(
                model=self.inner, optimizer=self._optimizer, config=self._config(), dist_init_required=False
            )
        self._zero = self._engine.optimizer
        # the engine drops gradients after each step; the loop's call would drop the buffers it gathers them in
        self._optimizer.zero_grad = self._drop_gradients  # type: ignore[method-assign]
        self._zero.register_grad_acc_post_hook(self._backward_ended)

    def _config(self) -> dict[str, Any]:
        sizes = ZeroSizes.of(sum(p.numel() for p in self.workload.model.parameters()))
        zero: dict[str, Any] = {"stage": self._stage, **sizes.configuration(self._stage)}
        for what, name in ((Offloaded.OPTIMIZER, "offload_optimizer"), (Offloaded.PARAMS, "offload_param")):
            tier = self._plan.tier_of(what)
            if tier is not None:
                zero[name] = self._offloaded_to(tier)
            if tier is Tier.DISK:
                zero["sub_group_size"] = SHARD_EACH
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "steps_per_print": 2**31,
            # the default clips; the loop says whether gradients are clipped
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            # the user's own optimizer, wherever its state is
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def _offloaded_to(self, tier: Tier) -> dict[str, Any]:
        pinned = self.device.type == "cuda"
        if tier is Tier.DISK:
            return {"device": "nvme", "nvme_path": str(self.folder.parent / DISK), "pin_memory": pinned}
        return {"device": "cpu", "pin_memory": pinned}

    def _hand_over(self, states: dict[str, dict[str, Any]], groups: list[list[str]]) -> None:
        steps = [_steps_of(states, names) for names in groups]
        self._create_state()
        kept = tensors.stored(self.folder)
        by_name = {self._names[id(parameter)]: parameter for parameter in self.workload.model.parameters()}
        for name, parameter in by_name.items():
            for entry, value in states.get(name, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    key = tensors.state_key(0, name, entry)
                    size, dtype = kept[key]
                    whole = torch.empty(size, dtype=dtype)
                    tensors.fill({key: whole}, self.folder)
                    self._write(parameter, whole, entry)
        for shard, count in self._shards(steps):
            _set_steps(self._optimizer.state[shard], count)

    def _create_state(self) -> None:
        """Rule 1: a step that changes nothing."""
        with self._no_learning():
            if self._stage < 3:
                for shard in self._zero.single_partition_of_fp32_groups:
                    shard.grad = torch.zeros_like(shard)
                self._optimizer.step()
                for shard in self._zero.single_partition_of_fp32_groups:
                    shard.grad.zero_() if self._offloads else setattr(shard, "grad", None)
                self._zero._lazy_init_hp_params_optimizer_state()
                return
            for number, shard in enumerate(self._zero.fp32_partitioned_groups_flat):
                swaps = self._zero._swappable_optimizer_subgroup(number)
                if swaps:
                    self._zero._optimizer_states_and_gradient_swap_in(number)
                gradient, shard.grad = shard.grad, torch.zeros_like(shard)
                self._zero._optimizer_step(number)
                shard.grad = gradient
                if swaps:
                    self._zero._optimizer_states_and_gradient_swap_out(number)

    @property
    def _offloads(self) -> bool:
        return self._plan.tier_of(Offloaded.OPTIMIZER) is not None

    @contextmanager
    def _no_learning(self) -> Iterator[None]:
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self.is_stepping = True
        try:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            yield
        finally:
            self.is_stepping = False
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _write(self, parameter: nn.Parameter, whole: torch.Tensor, entry: str) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, whole.to(self.device), entry)
            return
        length = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        start = min(dist.get_rank() * length, whole.numel())
        mine = torch.zeros(length, dtype=whole.dtype)  # the last shard is filled up
        part = whole.flatten()[start : start + length]
        mine[: part.numel()] = part
        safe_set_local_optimizer_state(parameter, mine.to(self.device), entry)

    def _shards(self, per_group: list[Any]) -> Iterator[tuple[torch.Tensor, Any]]:
        """Every flat shard with what belongs to its group."""
        if self._stage < 3:
            yield from zip(self._zero.single_partition_of_fp32_groups, per_group, strict=True)
            return
        for number, shard in enumerate(self._zero.fp32_partitioned_groups_flat):
            yield shard, per_group[self._zero.sub_group_to_group_id[number]]

    # -- training ------------------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def look(self, *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed records what the engine's calls use, to fetch it ahead in the next step: this one is part of no step
        return self.workload.model.forward(*args, **kwargs)

    def accumulate(self, share: Share, around: Callable[[ModelCall], ModelCall]) -> Any:
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
        self._zero.finalize_gradient_accumulation_boundary = _nothing
        try:
            yield
        finally:
            self._engine.enable_backward_allreduce = True
            del self._zero.finalize_gradient_accumulation_boundary

    def _backward_ended(self) -> None:
        # those within a split call are answered when the loop asks for them
        self.learnt.answered = self.learnt.answered or not self._splitting

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        """Stands in for `zero_grad`."""
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
        """Have the next step clip, in the way of `torch.nn.utils.clip_grad_norm_`.

        Raises:
            ScaleError: not all trained parameters, whose gradients DeepSpeed clips together.
        """
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

    # -- home ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        whole: dict[str, torch.Tensor] = dict(tensors.buffer_keys(self.workload.model))
        counts = self._counts()
        for parameter in self.workload.model.parameters():
            name = self._names[id(parameter)]
            whole[f"parameter.{name}"] = self._whole(parameter)
            for entry in self._entries(parameter):
                whole[tensors.state_key(0, name, entry)] = self._whole_state(parameter, entry)
            if name in counts and counts[name] is not None:
                whole[tensors.state_key(0, name, _STEP)] = counts[name]
        if dist.get_rank() == 0:
            tensors.store(whole, folder)
        dist.barrier()

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        value = safe_get_full_fp32_param(parameter)
        if value is None:  # frozen
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
                return parameter.detach().cpu().clone()
        whole: torch.Tensor = value.detach().cpu().clone()
        return whole

    def _entries(self, parameter: nn.Parameter) -> list[str]:
        if not parameter.requires_grad:
            return []
        shard = next(iter(self._optimizer.state), None)
        state = self._optimizer.state.get(shard, {}) if shard is not None else {}
        return [entry for entry, value in state.items() if isinstance(value, torch.Tensor) and value.dim()]

    def _whole_state(self, parameter: nn.Parameter, entry: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        value: torch.Tensor = safe_get_full_optimizer_state(parameter, entry)
        return value.detach().cpu().clone()

    def _counts(self) -> dict[str, Any]:
        """Count of steps of each parameter's shard."""
        ids = self._zero.bit16_groups if self._stage < 3 else self._zero.fp16_groups
        shards = (
            self._zero.single_partition_of_fp32_groups if self._stage < 3 else self._zero.fp32_partitioned_groups_flat
        )
        return {
            self._names[id(parameter)]: self._optimizer.state.get(shard, {}).get(_STEP)
            for parameters, shard in zip(ids, shards, strict=True)
            for parameter in parameters
        }

    def stop(self) -> None:
        self._engine.destroy()


def _nothing() -> None:
    """What is done already."""


def _steps_of(states: dict[str, dict[str, Any]], names: list[str]) -> Any:
    """The count of steps the parameters of a group share."""
    counts = {name: float(states[name][_STEP]) for name in names if _STEP in states.get(name, {})}
    if len(set(counts.values())) > 1:
        fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise ScaleError(
            f"ZeRO keeps one count of steps per group, and {fewest} was stepped {counts[fewest]:.0f} times, {most} "
            f"{counts[most]:.0f} times: put them into groups of their own, or use --scale fsdp2"
        )
    return next(iter(counts.values()), None)


def _set_steps(state: dict[str, Any], count: float | None) -> None:
    if _STEP not in state:
        return
    before = state[_STEP]
    state[_STEP] = (
        torch.full_like(before, count or 0.0) if isinstance(before, torch.Tensor) else type(before)(count or 0)
    )


def _deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = require("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # gloo reduces as well; this operator would be compiled first, for a minute, and a run that is ended meanwhile
    # leaves a lock behind for which every later one waits
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
