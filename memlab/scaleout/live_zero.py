"""DeepSpeed's ZeRO in this process.

Rules, beside those of `in_kernel`:

1. DeepSpeed gets the replica, and a second of the user's optimizer. With one rank a shard is a whole group of
   parameters, one after the other, so each entry of state is written to its place in a flat tensor of that size, and
   the user's optimizer shows it from there. `deepspeed.initialize` would drop it.
2. Every backward pass adds to DeepSpeed's gradients, and every step ends that ("managed_gradient_accumulation" off), as
   in the loop. The user's parameters show these gradients, so what the loop does to them (clipping, unscaling) is done.
3. Where a gradient is on the host, so is the data its parameter shows.
4. Settings of the user's groups (rates, which a scheduler changes) are carried over before each step, and so are weights
   that the loop has written.
5. What DeepSpeed would do otherwise than the loop (step a parameter without gradient, forget gradients that were not
   cleared) raises an error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError, ScaleError
from memlab.plan import Offloaded, Plan, Tier
from memlab.runtime.optimizer_step import second_of
from memlab.runtime.workload import Workload
from memlab.scaleout import async_io, one_rank
from memlab.scaleout.engines.zero import SHARD_EACH, _deepspeed
from memlab.scaleout.gathered import Gathered
from memlab.scaleout.in_kernel import InKernel, on_gradient
from memlab.scaleout.resizes import Resized
from memlab.scaleout.zero_sizes import ZeroSizes

Optimizer = torch.optim.Optimizer
State = dict[str, Any]
_STEP = "step"
_SETTINGS = ("mpu", "mesh_device")
# whose updates treat elements one by one, and whose state is of the parameter's shape but for the count of steps
_SERVED = (
    torch.optim.Adadelta, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD,
)  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """Place of a parameter in the engine.

    Args:
        name: of the parameter.
        users: the user's parameter.
        own: that of the replica.
        shard: number of the flat tensor it is in.
        offset: its first element there.
    """

    name: str
    users: nn.Parameter
    own: nn.Parameter
    shard: int
    offset: int

    def in_flat(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.narrow(0, self.offset, self.users.numel()).view(self.users.shape)


class LiveZero(InKernel):
    """A DeepSpeed engine over a replica.

    Args:
        plan: as for `InKernel`.
        workload: as for `InKernel`.
    """

    owns_steps = True

    def __init__(self, plan: Plan, workload: Workload) -> None:
        super().__init__(plan, workload)
        self._stage = int(plan.scale.removeprefix("zero"))
        self._engine: Any = None
        self._zero: Any = None
        self._optimizer: Optimizer | None = None
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._places: list[_Place] = []
        self._gathered: Gathered | None = None
        self._touched: set[str] = set()
        self._gradients: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}

    @property
    def _tier(self) -> Tier | None:
        return self.plan.tier_of(Offloaded.OPTIMIZER)

    @property
    def _shows_masters(self) -> bool:
        """Return whether gradients are on the host, but what the device computes with is not."""
        offloads_params = self.plan.tier_of(Offloaded.PARAMS) is not None
        return self._tier is not None and self.device.type != "cpu" and not offloads_params

    # -- on ------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        optimizers, name = self.workload.optimizers, self.workload.name
        if len(optimizers) != 1:
            raise RefusalError("scale", f"ZeRO serves one optimizer, {name} has {len(optimizers)}", "use --scale fsdp2")
        self.check_optimizer(optimizers[0])
        with one_rank.nothing_set():
            _deepspeed(self.device)
        if self._tier is Tier.DISK:
            self._check_files()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if type(optimizer) not in _SERVED:
            served = ", ".join(kind.__name__ for kind in _SERVED)
            raise RefusalError(
                "scale",
                f"ZeRO updates many parameters as one, which {type(optimizer).__name__} is not known to allow",
                f"use --scale fsdp2, or one of {served}",
            )
        stepped = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        own = {id(p): name for name, p in self.workload.model.named_parameters() if p.requires_grad}
        if stepped.keys() != own.keys():
            raise RefusalError(
                "scale",
                f"{type(optimizer).__name__} steps {len(stepped)} of the {len(own)} trained parameters of "
                f"{self.workload.name}, or others: ZeRO has those of one model",
                "freeze what is not stepped, or use --scale fsdp2",
            )
        strange = next((name for i, name in own.items() if stepped[i].dtype is not torch.float32), None)
        if strange is not None:
            raise RefusalError("scale", f"{strange} is not in fp32", "use --scale fsdp2, or fp32 weights with --bf16")
        for group in optimizer.param_groups:
            self._check_group(optimizer, [p for p in group["params"] if p.requires_grad], own)

    def _check_group(self, optimizer: Optimizer, parameters: list[nn.Parameter], names: dict[int, str]) -> None:
        """A shard has one state, so the parameters of a group must have been stepped equally often."""
        counts = {names[id(p)]: float(optimizer.state.get(p, {}).get(_STEP, 0)) for p in parameters}
        entries = {names[id(p)]: frozenset(_flat_entries(optimizer.state.get(p, {}))) for p in parameters}
        if len(set(counts.values())) > 1 or len(set(entries.values())) > 1:
            fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise RefusalError(
                "scale",
                f"ZeRO keeps one count of steps per group, and {fewest} was stepped {counts[fewest]:.0f} times, {most} "
                f"{counts[most]:.0f} times",
                "put them into groups of their own, or use --scale fsdp2",
            )

    def _check_files(self) -> None:
        if self._shows_masters:
            raise RefusalError(
                "scale",
                "gradients go to the host with the files, where the loop could not reach them beside parameters on the GPU",
                "use --offload optimizer:disk,params",
            )
        if reason := async_io.missing(self.device):
            raise RefusalError("scale", f"DeepSpeed writes files through libaio, and {reason}", async_io.INSTALL)

    def start(self, storage_resized: Resized) -> None:
        if self._tier is Tier.DISK:
            async_io.ensure_built(self.device, _say)
        super().start(storage_resized)

    def _begin(self, undo: ExitStack) -> None:
        """The engine begins with the optimizer."""

    def _take_over(self, optimizer: Optimizer) -> None:
        assert self._replica is not None
        with ExitStack() as undo:
            self._initialize(optimizer, undo)
            undo.callback(self._destroy)
            self._places = [*self._placed()]
            self._hand_over(optimizer)
            self._show_all()
            self._wire(undo)
            self._undo.push(undo.pop_all())

    def _initialize(self, optimizer: Optimizer, undo: ExitStack) -> None:
        assert self._replica is not None
        own = {id(users): mine for _, users, mine in self._replica.parameters()}
        self._optimizer, second = optimizer, second_of(optimizer)
        for group in optimizer.param_groups:
            trained = [own[id(p)] for p in group["params"] if p.requires_grad]
            if trained:
                self._groups.append((group, {**group, "params": trained}))
        second.param_groups = [mine for _, mine in self._groups]
        folder = tempfile.TemporaryDirectory(prefix="memlab-", ignore_cleanup_errors=True)
        undo.callback(folder.cleanup)
        with one_rank.nothing_set():
            deepspeed = _deepspeed(self.device)
            one_rank.at_end(_forgetting())
            with async_io.loaded_from_there(self.device):
                self._engine, *_ = deepspeed.initialize(
                    model=self._replica.model,
                    optimizer=second,
                    config=self._config(Path(folder.name)),
                    dist_init_required=False,
                )
        self._zero = self._engine.optimizer

    def _config(self, folder: Path) -> dict[str, Any]:
        sizes = ZeroSizes.of(sum(p.numel() for p in self.workload.model.parameters()))
        pinned = self.device.type == "cuda"
        zero: dict[str, Any] = {
            "stage": self._stage,
            **sizes.configuration(self._stage),
            "overlap_comm": False,
            # see `gathered`
            "memory_efficient_linear": False,
        }
        if self._tier is Tier.DISK:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder), "pin_memory": pinned}
            zero["sub_group_size"] = SHARD_EACH
        elif self._tier is not None:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
        if self.plan.tier_of(Offloaded.PARAMS) is not None:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "steps_per_print": 2**31,
            # the loop clips
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            # the user's own optimizer, wherever its state is
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }

    def _placed(self) -> Iterator[_Place]:
        assert self._replica is not None
        known = {id(mine): (name, users) for name, users, mine in self._replica.parameters()}
        zero = self._zero
        for number, group in enumerate(zero.fp16_groups if self._stage == 3 else zero.bit16_groups):
            offset = 0
            for place, own in enumerate(group):
                name, users = known[id(own)]
                yield _Place(
                    name,
                    users,
                    own,
                    number,
                    offset if self._stage == 3 else zero.round_robin_bit16_offsets[number][place],
                )
                offset += own.partition_numel() if self._stage == 3 else 0

    @property
    def _shards(self) -> list[torch.Tensor]:
        zero = self._zero
        shards: list[torch.Tensor] = (
            zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        )
        return shards

    def _is_in_file(self, shard: int) -> bool:
        return self._stage == 3 and bool(self._zero._swappable_optimizer_subgroup(shard))

    def _hand_over(self, optimizer: Optimizer) -> None:
        for number in range(len(self._shards)):
            places = [place for place in self._places if place.shard == number]
            if not any(optimizer.state.get(place.users) for place in places):
                continue
            if self._is_in_file(number):
                self._zero._optimizer_states_and_gradient_swap_in(number)
            shard = self._shards[number]
            self._zero.optimizer.state[shard] = _joined(shard, places, optimizer)
            if self._is_in_file(number):
                self._zero._optimizer_states_and_gradient_swap_out(number)

    def _show_all(self) -> None:
        assert self._replica is not None
        for name, users, own in self._replica.parameters():
            data = self._shown(name, own)
            if data is not None:
                self._show(users, data.view(users.shape))
        self._show_state()
        self._note_versions()

    def _shown(self, name: str, own: nn.Parameter) -> torch.Tensor | None:
        place = next((each for each in self._places if each.name == name), None)
        if place is not None and self._shows_masters:
            return place.in_flat(self._shards[place.shard].detach())
        if self._stage == 3:
            kept: torch.Tensor = own.ds_tensor  # type: ignore[attr-defined] # DeepSpeed's
            return kept.detach().narrow(0, 0, kept.ds_numel if own.numel() == 0 else own.numel())  # type: ignore[attr-defined]
        return own.detach() if place is not None else None

    def _show_state(self) -> None:
        """The user's optimizer shows the state where it is; what is in files it does not show."""
        assert self._optimizer is not None
        for place in self._places:
            kept = self._zero.optimizer.state.get(self._shards[place.shard])
            if kept and not self._is_in_file(place.shard):
                self._optimizer.state[place.users] = {
                    name: place.in_flat(value) if isinstance(value, torch.Tensor) and value.dim() else value
                    for name, value in kept.items()
                }
            else:
                self._optimizer.state.pop(place.users, None)

    # -- training ------------------------------------------------------------------------------

    def _wire(self, undo: ExitStack) -> None:
        zero, optimizer = self._zero, self._optimizer
        assert optimizer is not None
        prologue = zero.backward_prologue
        zero.backward_prologue = partial(_one_after_the_other, self._begin_gradients, prologue)
        if self._stage == 3:
            assert self._replica is not None
            self._gathered = Gathered(self._replica.model, undo)
        # DeepSpeed's own comes first
        zero.register_grad_acc_post_hook(self._show_gradients)
        for place in self._places:
            undo.callback(on_gradient(place.own, partial(self._touch, place.name)))
        undo.callback(optimizer.register_load_state_dict_pre_hook(_refuse_loading).remove)
        if any(self._is_in_file(number) for number in range(len(self._shards))):
            undo.callback(optimizer.register_state_dict_pre_hook(_refuse_saving).remove)

    def _touch(self, name: str, _parameter: torch.Tensor) -> None:
        self._touched.add(name)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._take_written()
        with nullcontext() if self._gathered is None else self._gathered.keeping():
            return self._engine(*args, **kwargs)

    def _begin_gradients(self) -> None:
        shown = [place for place in self._places if place.users.grad is not None]
        if self._gradients and not shown:
            self._drop_gradients()
        elif not self._gradients:
            if any(bool(place.users.grad.any()) for place in shown if place.users.grad is not None):
                raise ScaleError(
                    f"gradients of the last step of {self.workload.name} are still there: call optimizer.zero_grad() before "
                    "backward(), or use --scale fsdp2, which adds to them"
                )
            for place in shown:
                place.users.grad = None

    def _drop_gradients(self) -> None:
        """The loop has dropped its gradients without a step."""
        zero = self._zero
        self._gradients.clear()
        self._touched.clear()
        zero.zero_grad(set_to_none=True)
        if self._stage == 3:
            zero.micro_step_id = 0
            zero._offload_boundary_param_ids = set()
            return
        zero.micro_step_id = -1
        zero.all_grad_tensors.clear()
        zero._offload_accumulated_param_ids = set()

    @torch.no_grad()
    def _show_gradients(self) -> None:
        for place in self._places:
            if place.name in self._touched:
                gradient = self._gradient_of(place).detach().view(place.users.shape)
                self._gradients[place.name] = place.users.grad = gradient

    def _gradient_of(self, place: _Place) -> torch.Tensor:
        zero, numel = self._zero, place.users.numel()
        if self._stage == 1:
            assert place.own.grad is not None
            return place.own.grad
        if self._stage == 3:
            kept: torch.Tensor = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[place.own.ds_id]  # type: ignore[attr-defined]
            return kept.narrow(0, 0, numel)
        if self._tier is not None:
            accumulated: torch.Tensor = zero.accumulated_grads_in_cpu[zero.get_param_id(place.own)]
            return accumulated
        of_group = [each for each in self._places if each.shard == place.shard]
        tensor: torch.Tensor = zero.all_grad_tensors[place.shard][of_group.index(place)]
        return tensor

    def step(self, optimizer: Optimizer) -> bool:
        """Have DeepSpeed update the parameters.

        Returns:
            False when gradients were not finite: DeepSpeed then leaves everything as it is.

        Raises:
            ScaleError: a trained parameter has no gradient.
        """
        missing = [place.name for place in self._places if place.users.grad is None]
        if len(missing) == len(self._places):
            return True  # as torch does: no gradient, no update
        if missing:
            raise ScaleError(
                f"{missing[0]} has no gradient ({len(missing)} of {len(self._places)} have none), and ZeRO would step it all "
                "the same: freeze what the loss does not depend on, or use --scale fsdp2"
            )
        self._take_gradients()
        self._take_written()
        for users, own in self._groups:
            own.update({name: value for name, value in users.items() if name != "params"})
        with self._under_way():
            self._engine.step()
        self._gradients.clear()
        self._touched.clear()
        self._show_state()
        self._note_versions()
        return not self._zero.overflow

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Gradients that the loop has put in place of those it was shown."""
        for place in self._places:
            shown, now = self._gradients[place.name], place.users.grad
            assert now is not None
            if now.data_ptr() != shown.data_ptr():
                shown.copy_(now)

    def _note_versions(self) -> None:
        self._versions = {place.name: place.users._version for place in self._places}

    def _take_written(self) -> None:
        """Weights that the loop has written since the last step (a checkpoint, an average)."""
        written = [place for place in self._places if place.users._version != self._versions[place.name]]
        if not written:
            return
        zero = self._zero
        if not self._shows_masters:
            self._update_masters(written)
        elif self._stage < 3:
            zero.update_lp_params()
        else:
            for number in range(len(self._shards)):
                zero._reassign_or_swap_out_partitioned_parameters(number)
        if self._stage == 3:
            zero._partition_all_parameters()
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        self._note_versions()

    @torch.no_grad()
    def _update_masters(self, written: list[_Place]) -> None:
        for place in written:
            if self._is_in_file(place.shard):
                self._zero.set_local_hp_param(place.users.detach().flatten(), place.own)
            else:
                place.in_flat(self._shards[place.shard].detach()).copy_(place.users)

    # -- off -----------------------------------------------------------------------------------

    def give_back_optimizer(self, optimizer: Optimizer) -> None:
        if self._zero is None:
            return
        states = {place.users: self._state_of(place) for place in self._places}
        for parameter, state in states.items():
            if state:
                optimizer.state[parameter] = state

    def _state_of(self, place: _Place) -> State:
        kept = self._zero.optimizer.state.get(self._shards[place.shard]) or {}
        return {name: self._entry_of(place, name, value) for name, value in kept.items()}

    def _entry_of(self, place: _Place, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name == _STEP:
            return value.clone()
        if self._is_in_file(place.shard):
            value = self._zero.get_local_fp32_param(place.own, name)
            return value.detach()[: place.users.numel()].view(place.users.shape).to(self.device, copy=True)
        return place.in_flat(value.detach()).to(self.device, copy=True)

    def _destroy(self) -> None:
        with suppress(AttributeError):  # of an engine that was not complete
            self._engine.destroy()
        if self._stage == 3:
            assert self._replica is not None
            _let_go_of(self._replica.model)
        self._engine = self._zero = self._optimizer = self._gathered = None
        self._groups, self._places = [], []
        self._gradients, self._touched = {}, set()

    @property
    def held_tensors(self) -> tuple[torch.Tensor, ...]:
        """Master weights beside what the device computes with, or the other way round."""
        if self._zero is None:
            return ()
        zero = self._zero
        flats = zero.fp16_partitioned_groups_flat if self._stage == 3 else zero.bit16_groups_flat
        return tuple(
            flat.detach() for flat in (*flats, *self._shards) if flat is not None and flat.device == self.device
        )


def _one_after_the_other(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _joined(shard: torch.Tensor, places: list[_Place], optimizer: Optimizer) -> State:
    """State of all parameters of a shard as one, where the shard is."""
    first = optimizer.state[places[0].users]
    joined: State = {}
    for name, value in first.items():
        if name == _STEP:
            joined[name] = value.clone() if isinstance(value, torch.Tensor) else value
        elif isinstance(value, torch.Tensor) and value.dim():
            flat = joined[name] = torch.zeros(shard.numel(), dtype=value.dtype, device=shard.device)
            for place in places:
                place.in_flat(flat).copy_(optimizer.state[place.users][name])
        else:
            joined[name] = value
    return joined


def _flat_entries(state: State) -> Iterator[str]:
    return (name for name, value in state.items() if isinstance(value, torch.Tensor) and name != _STEP)


def _say(line: str) -> None:
    print(f"memlab: {line}", flush=True)  # noqa: T201 - the cell waits for it


def _refuse_loading(_optimizer: Optimizer, _state: Any) -> None:
    raise ScaleError("load_state_dict under ZeRO: its state is DeepSpeed's now; undo the session, load, and fit again")


def _refuse_saving(_optimizer: Optimizer) -> None:
    raise ScaleError("state_dict while ZeRO has the optimizer's state in files: undo the session first")


def _forgetting() -> Callable[[], None]:
    """Return what makes DeepSpeed forget the process group."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    kept = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(groups).items()
        if name.isupper() or name in _SETTINGS
    }
    backend = comm.cdb

    def forget() -> None:
        vars(groups).update(kept)
        comm.cdb = backend

    return forget


def _let_go_of(model: nn.Module) -> None:
    """ZeRO 3 leaves modules on a stack, and itself in a cache."""
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    own = {id(module) for module in model.modules()}
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in own]
    for method in vars(partitioned_param_coordinator.PartitionedParameterCoordinator).values():
        # wrapped once more, in a closure
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
