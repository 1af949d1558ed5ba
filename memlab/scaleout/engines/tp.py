"""Tensor parallelism: every rank has a part of each large layer and sees all rows.

Which layers are cut how is written in the model's own plan (Transformers' `tp_plan`: ``"layers.*.mlp.up_proj": "colwise"``), and
done by torch's `parallelize_module`, on placeholders, so that a rank reads no more than its parts.

1. Layers without an entry, and those that share a parameter with one that has none or is cut another way, stay whole on every
   rank. Their gradients are equal there, since inputs of cut layers and outputs of rejoined ones are.
2. A norm over single heads sees the heads of its rank alone. Its entry says so, and its gradient is summed over ranks.
3. Whole and cut parameters cannot be stacked, so the norm for clipping is put together here, and each kind is updated
   by itself: on a GPU, kernels go over lists of parameters.

Source: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from memlab.errors import RefusalError
from memlab.runtime.buckets import is_separable
from memlab.runtime.ownership import parameters_in
from memlab.runtime.plain_step import plain_stepper
from memlab.scaleout.engines.fsdp2 import Fsdp2

# how torch cuts a layer, by what plans call it
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
# layers whose outputs are whole again, so that parts may differ in size
_REJOINED = frozenset({"colwise_gather_output", "colwise_rep", "embedding_rowwise"})
_SUMMED = "replicated_with_grad_allreduce"
_WHOLE = "replicate"
_INSTEAD = "use --scale fsdp2, which needs no plan"


def plan_of(model: nn.Module) -> dict[str, str]:
    """The model's own plan: how each layer is cut, by pattern of its name; empty when it has none."""
    plan = getattr(model, "tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def check(model: nn.Module, name: str, ranks: int) -> None:
    """Refuse a model that cannot be cut into so many parts."""
    plan = plan_of(model)
    if not plan:
        raise RefusalError("scale", f"{name} has no plan for tensor parallelism (tp_plan)", _INSTEAD)
    strange = sorted({how for how in plan.values() if how not in _STYLES and how not in (_SUMMED, _WHOLE)})
    if strange:
        raise RefusalError("scale", f"the tp_plan of {name} has entries {', '.join(strange)}", _INSTEAD)
    for size, what in _sizes(model):
        if size % ranks:
            raise RefusalError(
                "scale",
                f"{name} has {size} {what}, for {ranks} processes",
                f"use a number of processes that divides {size}, or --scale fsdp2",
            )


def _sizes(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield what is cut into equal parts: sizes, in words."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int):
            yield heads, "attention heads" if what == "num_attention_heads" else "key and value heads"
    for name, how in entries(model).items():
        if how in _STYLES and how not in _REJOINED:
            side = "out_features" if how == "colwise" else "in_features"
            yield getattr(model.get_submodule(name), side), f"{side} in {name}"


def entries(model: nn.Module) -> dict[str, str]:
    """Return how each layer is cut, by its name; without those that have to stay whole (rule 1)."""
    plan = plan_of(model)
    # plans write * for the number of a block
    found = {name: plan.get(name) or plan.get(re.sub(r"\d+", "*", name), "") for name, _ in model.named_modules()}
    ties = _ties(model)
    return {
        name: how
        for name, how in found.items()
        if how and all(_cut_dim(found[owner]) == _cut_dim(how) for tie in ties if name in tie for owner in tie)
    }


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of layers that share a parameter of one name (`weight`)."""
    owners: dict[tuple[int, str], list[str]] = {}
    for name, module in model.named_modules():
        for local_name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault((id(parameter), local_name), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _cut_dim(how: str) -> int | None:
    """Along which dimension a weight is cut; None where it is not."""
    if how not in _STYLES:
        return None
    return 0 if how.startswith(("col", "embedding")) else 1


class Tp(Fsdp2):
    """`parallelize_module` by the model's own plan.

    Known limitations: dropout inside attention draws the same numbers for the heads of every rank.
    """

    shares_rows = False
    owns_steps = True

    def _place(self) -> None:
        model = self.workload.model
        self._entries = entries(model)
        self._tied = [tie for tie in _ties(model) if any(name in self._entries for name in tie)]
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for name, how in self._entries.items():
            if how in _STYLES:
                # nothing is to be sent around: these are placeholders
                parallelize_module(model.get_submodule(name), mesh, _STYLES[how](), src_data_rank=None)
        self._allocate()
        for first, *others in self._tied:
            for other in others:
                model.get_submodule(other)._parameters["weight"] = model.get_submodule(first)._parameters["weight"]
        for name, how in self._entries.items():
            if how == _SUMMED:
                for parameter in model.get_submodule(name).parameters():
                    if parameter.requires_grad:
                        parameter.register_hook(_summed)  # type: ignore[no-untyped-call]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [*parameters_in(optimizer)]
        kinds = [parameters]
        if is_separable(optimizer):
            kinds = [[each for each in parameters if isinstance(each, DTensor) is is_cut] for is_cut in (True, False)]
        for same in filter(None, kinds):
            plain_stepper(optimizer)(same)

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor | None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)  # of parts, of whole gradients
        for gradient in gradients:
            is_cut = isinstance(gradient, DTensor) and any(isinstance(each, Shard) for each in gradient.placements)
            squares[0 if is_cut else 1] += _local(gradient).double().square().sum()
        dist.all_reduce(squares[:1])
        norm = squares.sum().sqrt().float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            _local(gradient).mul_(factor.to(gradient.dtype))
        return norm


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    """Return what comes in, not what has gathered: that has been summed already."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total
