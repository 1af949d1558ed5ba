"""`DeepSpeedEngine`: what memlab needs of a DeepSpeed engine, on one rank or many; what is known of its attributes stands here.

`deepspeed.initialize` replaces the parameters of an optimizer's groups by flat tensors, of which each rank has a part, and drops
the optimizer's state. Rules of handing live state over:

1. A `FlatPlace` says which elements of a parameter are where in this rank's part of a flat tensor.
2. Each entry of state is joined to a tensor of the same layout, and put where the optimizer will look for it. On the way back it
   is cut again; where there are several ranks, parts are put together.
3. A flat tensor has one state, so parameters of one group that were stepped unequally often are refused.

Source: https://github.com/deepspeedai/DeepSpeed/tree/master/deepspeed/runtime/zero (0.19)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memlab.errors import RefusalError
from memlab.extras import require
from memlab.plan import Offloaded, Plan, Tier
from memlab.runtime.workload import Workload
from memlab.scaleout import async_io
from memlab.scaleout.sharding.zero import ZeroSizes
from memlab.scaleout.tensors import names_of

Optimizer = torch.optim.Optimizer
State = dict[str, Any]
_STEP = "step"
# a flat tensor for each parameter: gradients are read wrongly to where no page of the flat tensor begins
_ELEMENTS_IN_A_FILE = 1
# whose updates treat elements one by one, and whose state is of the parameter's shape but for single numbers
_SERVED = (
    torch.optim.Adadelta, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.SGD,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class FlatPlace:
    """Part of a parameter that is in a flat tensor of this rank."""

    parameter: nn.Parameter  # the engine's
    shape: torch.Size  # of the whole parameter
    flat: int  # number of the flat tensor
    offset: int  # where the part begins there
    start: int  # first of the parameter's elements that are in it
    length: int  # number of elements; 0 where other ranks have all

    def in_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """The part, of a tensor laid out as the flat one."""
        return flat.narrow(0, self.offset, self.length)

    def in_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """The part, of a tensor of the parameter's shape."""
        return whole.reshape(-1).narrow(0, self.start, self.length)


class DeepSpeedEngine:
    """A DeepSpeed engine over a model."""

    def __init__(
        self,
        model: nn.Module,  # parameters with data
        optimizer: Optimizer,  # whose groups hold the model's parameters; its state is not looked at
        stage: int,  # of ZeRO, 1 to 3
        plan: Plan,  # of which the offload counts here
        device: torch.device,  # of this rank
        folder: Path,  # for what is offloaded to files
        **settings: Any,  # entries of DeepSpeed's ``zero_optimization`` beside those
    ) -> None:
        self._stage = stage
        self._device = device
        elements = sum(parameter.numel() for parameter in model.parameters())
        zero = {"stage": stage, **ZeroSizes.of(elements).configuration(stage), **_offloads(plan, device, folder)}
        deepspeed = load_deepspeed(device)
        with async_io.loading_prebuilt(device):
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=_configuration({**zero, **settings}), dist_init_required=False
            )
        self.zero: Any = self.engine.optimizer
        # of all parameters in the optimizer's groups, in the same order on every rank
        self.places = [*(self._places_of_stage_3() if stage == 3 else self._places_of_stages_1_and_2())]

    @property
    def flats(self) -> list[torch.Tensor]:
        """Return this rank's parts of the flat tensors, which the optimizer steps."""
        zero = self.zero
        flats: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        )
        return flats

    def _places_of_stages_1_and_2(self) -> Iterator[FlatPlace]:
        zero = self.zero
        groups = zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, zero.partition_size, strict=True)
        for number, (parameters, offsets, size) in enumerate(groups):
            begin = dist.get_rank() * size
            for parameter, offset in zip(parameters, offsets, strict=True):
                low, high = max(offset, begin), min(offset + parameter.numel(), begin + size)
                if high > low:
                    yield FlatPlace(parameter, parameter.shape, number, low - begin, low - offset, high - low)
                else:
                    yield FlatPlace(parameter, parameter.shape, number, 0, 0, 0)

    def _places_of_stage_3(self) -> Iterator[FlatPlace]:
        for number, parameters in enumerate(self.zero.fp16_groups):
            offset = 0
            for parameter in parameters:
                part, shape = parameter.partition_numel(), parameter.ds_shape
                start = min(dist.get_rank() * part, shape.numel())
                yield FlatPlace(parameter, shape, number, offset, start, min(part, shape.numel() - start))
                offset += part  # the last rank's is filled up

    def places_in(self, flat: int) -> list[FlatPlace]:
        return [place for place in self.places if place.flat == flat]

    def is_in_file(self, flat: int) -> bool:
        return self._stage == 3 and bool(self.zero._swappable_optimizer_subgroup(flat))

    @contextmanager
    def in_memory(self, flat: int) -> Iterator[torch.Tensor]:
        """Have a flat tensor and its state in memory."""
        if self.is_in_file(flat):
            self.zero._optimizer_states_and_gradient_swap_in(flat)
        yield self.flats[flat]
        if self.is_in_file(flat):
            self.zero._optimizer_states_and_gradient_swap_out(flat)

    def kept_state(self, flat: int) -> State:
        """State of a flat tensor; that of files is empty where they are not `in_memory`."""
        return self.zero.optimizer.state.get(self.flats[flat]) or {}

    def give_state(
        self, states: Mapping[int, State], value_of: Callable[[nn.Parameter, str], torch.Tensor] | None = None
    ) -> None:
        read = value_of or (lambda parameter, name: states[id(parameter)][name])
        for number in range(len(self.flats)):
            places = self.places_in(number)
            first = next((state for place in places if (state := states.get(id(place.parameter)))), None)
            if first is None:
                continue
            with self.in_memory(number) as flat:
                self.zero.optimizer.state[flat] = {
                    name: _joined(value, flat, places, name, read) for name, value in first.items()
                }

    def whole(self, place: FlatPlace, flat: torch.Tensor) -> torch.Tensor:
        """A parameter's elements in a tensor laid out as a flat one, from all ranks; every rank calls it."""
        whole = torch.zeros(place.shape, dtype=flat.dtype, device=self._device)
        place.in_whole(whole).copy_(place.in_flat(flat.detach()))
        if dist.get_world_size() > 1:
            # bytes, since the sum of -0.0 and 0.0 is another number
            dist.all_reduce(whole.reshape(-1).view(torch.uint8))
        return whole

    def whole_state(self, place: FlatPlace, state: State) -> State:
        """State of a parameter, from all ranks; every rank calls it."""
        return {name: self.whole(place, value) if is_flat(value) else _copied(value) for name, value in state.items()}


def load_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = require("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # gloo reduces as well; this operator would be compiled first, for a minute, and a run that is ended meanwhile
    # leaves a lock behind for which every later one waits
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def check_optimizers(workload: Workload) -> None:
    """Refuse more than one optimizer, and one whose state or update a flat tensor cannot have."""
    if (count := len(workload.optimizers)) != 1:
        raise RefusalError("scale", f"ZeRO serves one optimizer, {workload.name} has {count}", "use --scale fsdp2")
    check_optimizer(workload.optimizers[0], workload.model)


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer whose state or update a flat tensor cannot have."""
    if type(optimizer) not in _SERVED:
        served = ", ".join(kind.__name__ for kind in _SERVED)
        raise RefusalError(
            "scale",
            f"ZeRO updates many parameters as one, which {type(optimizer).__name__} is not known to allow",
            f"use --scale fsdp2, or one of {served}",
        )
    names = names_of(model)
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        states = {names.get(id(p), "a parameter"): optimizer.state.get(p, {}) for p in trained}
        counts = {name: float(state.get(_STEP, 0)) for name, state in states.items()}
        tensors = ({k for k, v in state.items() if isinstance(v, torch.Tensor)} for state in states.values())
        if len({*counts.values()}) > 1 or len({frozenset(names - {_STEP}) for names in tensors}) > 1:
            fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise RefusalError(
                "scale",
                f"ZeRO keeps one count of steps per group, and {fewest} was stepped {counts[fewest]:.0f} times, {most} "
                f"{counts[most]:.0f} times",
                "put them into groups of their own, or use --scale fsdp2",
            )


def _configuration(zero: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # only the step tells which backward pass was the last before it
        "managed_gradient_accumulation": False,
        "steps_per_print": 2**31,
        # the default clips; the loop says whether gradients are clipped
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        # the user's own optimizer, wherever its state is
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _offloads(plan: Plan, device: torch.device, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, name in ((Offloaded.OPTIMIZER, "offload_optimizer"), (Offloaded.PARAMS, "offload_param")):
        tier = plan.tier_of(what)
        if tier is not None:
            place = {"device": "nvme", "nvme_path": str(folder)} if tier is Tier.DISK else {"device": "cpu"}
            found[name] = {**place, "pin_memory": device.type == "cuda"}
        if tier is Tier.DISK:
            found["sub_group_size"] = _ELEMENTS_IN_A_FILE
    return found


def _joined(
    first: Any,
    flat: torch.Tensor,
    places: list[FlatPlace],
    name: str,
    read: Callable[[nn.Parameter, str], torch.Tensor],
) -> Any:
    """An entry of the state of all parameters in a flat tensor, as one."""
    if not is_flat(first):
        return _copied(first)
    joined = torch.zeros(flat.numel(), dtype=first.dtype, device=flat.device)
    for place in places:
        place.in_flat(joined).copy_(place.in_whole(read(place.parameter, name)))
    return joined


def is_flat(value: Any) -> bool:
    """Return whether an entry has an element for each of the parameter's, and is no single number."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
