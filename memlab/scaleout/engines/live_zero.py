"""DeepSpeed's ZeRO in this process.

Rules, beside those of `in_process` and `deepspeed_engine`:

1. DeepSpeed gets the replica, and a second of the user's optimizer. With one rank a flat tensor is a whole group of
   parameters, so the user's optimizer shows the state of each from there.
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
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError, ScaleError
from memlab.plan import Offloaded, Plan, Tier
from memlab.plan.settings.scale import zero_stage
from memlab.runtime.ownership import parameters_in
from memlab.runtime.plain_step import second_of
from memlab.runtime.workload import Workload
from memlab.scaleout import async_io, one_rank
from memlab.scaleout.engines.deepspeed_engine import (
    DeepSpeedEngine,
    check_optimizer,
    check_optimizers,
    is_flat,
    load_deepspeed,
)
from memlab.scaleout.engines.gathered import Gathered
from memlab.scaleout.engines.shown_gradients import Pair, ShownGradients
from memlab.scaleout.in_process import InProcessEngine
from memlab.scaleout.storage_resizes import Resized

Optimizer = torch.optim.Optimizer
_SETTINGS = ("mpu", "mesh_device")


class LiveZero(InProcessEngine):
    """A DeepSpeed engine over a replica."""

    owns_steps = True

    def __init__(self, plan: Plan, workload: Workload) -> None:
        super().__init__(plan, workload)
        self._stage = zero_stage(plan.scale)
        self.passes_each_call = self._stage > 1
        self._engine: DeepSpeedEngine | None = None

        self._optimizer: Optimizer | None = None
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._pairs: list[Pair] = []
        self._gathered: Gathered | None = None
        self._gradients: ShownGradients | None = None
        self._versions: dict[str, int] = {}
        self._has_loaded = False  # whether the state that counts is the user's, from a state dict

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
        check_optimizers(self.workload)
        self._check_parameters(self.workload.optimizers[0])
        with one_rank.surroundings_kept():
            load_deepspeed(self.device)
        if self._tier is Tier.DISK:
            self._check_files()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        check_optimizer(optimizer, self.workload.model)
        self._check_parameters(optimizer)

    def _check_parameters(self, optimizer: Optimizer) -> None:
        stepped = {id(p): p for p in parameters_in(optimizer) if p.requires_grad}
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
        with ExitStack() as undo:
            self._engine = engine = self._made(optimizer, undo)
            undo.callback(self._destroy)
            self._optimizer = optimizer
            known = {id(mine): (name, users) for name, users, mine in self._replica.parameters()}
            self._pairs = [Pair(*known[id(place.parameter)], place) for place in engine.places]
            engine.give_state({id(p.place.parameter): optimizer.state.get(p.users, {}) for p in self._pairs})
            self._show_all()
            self._wire(undo)
            self._undo.push(undo.pop_all())

    def _made(self, optimizer: Optimizer, undo: ExitStack) -> DeepSpeedEngine:
        own = {id(users): mine for _, users, mine in self._replica.parameters()}
        second = second_of(optimizer)
        for group in optimizer.param_groups:
            trained = [own[id(p)] for p in group["params"] if p.requires_grad]
            if trained:
                self._groups.append((group, {**group, "params": trained}))
        second.param_groups = [mine for _, mine in self._groups]
        folder = tempfile.TemporaryDirectory(prefix="memlab-", ignore_cleanup_errors=True)
        undo.callback(folder.cleanup)
        with one_rank.surroundings_kept():
            load_deepspeed(self.device)
            one_rank.at_end(_forgetting())
            # linear layers: see `gathered`
            return DeepSpeedEngine(
                self._replica.model, second, self._stage, self.plan, self.device, Path(folder.name),
                overlap_comm=False, memory_efficient_linear=False,
            )  # fmt: skip

    @property
    def _deepspeed(self) -> DeepSpeedEngine:
        assert self._engine is not None
        return self._engine

    def _flat_of(self, pair: Pair) -> torch.Tensor:
        return pair.in_flat(self._deepspeed.flats[pair.place.flat].detach())

    def _show_all(self) -> None:
        for name, users, own in self._replica.parameters():
            data = self._shown(name, own)
            if data is not None:
                self._show(users, data.view(users.shape))
        self._show_state()
        self._note_versions()

    def _shown(self, name: str, own: nn.Parameter) -> torch.Tensor | None:
        pair = next((each for each in self._pairs if each.name == name), None)
        if pair is not None and self._shows_masters:
            return self._flat_of(pair)
        if self._stage == 3:
            kept: torch.Tensor = own.ds_tensor  # type: ignore[attr-defined] # DeepSpeed's
            return kept.detach().narrow(0, 0, kept.ds_numel if own.numel() == 0 else own.numel())  # type: ignore[attr-defined]
        return own.detach() if pair is not None else None

    def _show_state(self) -> None:
        """The user's optimizer shows the state where it is; what is in files it does not show."""
        assert self._optimizer is not None
        for pair in self._pairs:
            kept = self._deepspeed.kept_state(pair.place.flat)
            if kept and not self._deepspeed.is_in_file(pair.place.flat):
                self._optimizer.state[pair.users] = {
                    name: pair.in_flat(value) if is_flat(value) else value for name, value in kept.items()
                }
            else:
                self._optimizer.state.pop(pair.users, None)

    # -- training ------------------------------------------------------------------------------

    def _wire(self, undo: ExitStack) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        self._gradients = ShownGradients(self._deepspeed, self._pairs, self._stage, undo)
        if self._stage == 3:
            self._gathered = Gathered(self._replica.model, undo)
        undo.callback(optimizer.register_load_state_dict_post_hook(self._loaded).remove)
        if any(self._deepspeed.is_in_file(number) for number in range(len(self._deepspeed.flats))):
            undo.callback(optimizer.register_state_dict_pre_hook(_refuse_saving).remove)

    def _loaded(self, _optimizer: Optimizer) -> None:
        """The loop has loaded a state dict: the next call begins with an engine that has that state."""
        self._has_loaded = self._is_under_way = True

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._take_written()
        with nullcontext() if self._gathered is None else self._gathered.keeping():
            return self._deepspeed.engine(*args, **kwargs)

    def step(self, optimizer: Optimizer) -> bool:
        """Have DeepSpeed update the parameters; False when gradients were not finite, which leaves everything as it is."""
        assert self._gradients is not None
        if all(pair.users.grad is None for pair in self._pairs):
            return True  # as torch does: no gradient, no update
        self.check_step()
        self._gradients.take()
        self._take_written()
        for users, own in self._groups:
            own.update({name: value for name, value in users.items() if name != "params"})
        with self._under_way():
            self._deepspeed.engine.step()
        self._gradients.forget()
        self._show_state()
        self._note_versions()
        return not self._deepspeed.zero.overflow

    def check_step(self) -> None:
        assert self._gradients is not None
        if all(pair.users.grad is None for pair in self._pairs):
            return
        if self._has_loaded:
            raise RefusalError(
                "scale", "load_state_dict() between backward() and optimizer.step()", "load before the call"
            )
        missing = self._gradients.missing
        if missing and all(pair.users.grad is not None for pair in self._pairs):
            raise RefusalError(
                "scale",
                f"the gradient of {missing[0]} comes from no backward pass that adds gradients of all "
                "parameters (torch.autograd.grad, backward(inputs=...), weights of functional_call), and ZeRO steps its own",
                "use --scale fsdp2",
            )
        if missing:
            raise RefusalError(
                "scale",
                f"{missing[0]} has no gradient ({len(missing)} of {len(self._pairs)} have none), and ZeRO would step it all "
                "the same",
                "freeze what the loss does not depend on, or use --scale fsdp2",
            )

    def _note_versions(self) -> None:
        self._versions = {pair.name: pair.users._version for pair in self._pairs}

    def _take_written(self) -> None:
        """Weights that the loop has written since the last step (a checkpoint, an average)."""
        written = [pair for pair in self._pairs if pair.users._version != self._versions[pair.name]]
        if not written:
            return
        zero = self._deepspeed.zero
        if not self._shows_masters:
            self._update_masters(written)
        elif self._stage < 3:
            zero.update_lp_params()
        else:
            for number in range(len(self._deepspeed.flats)):
                zero._reassign_or_swap_out_partitioned_parameters(number)
        if self._stage == 3:
            zero._partition_all_parameters()
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        self._note_versions()

    @torch.no_grad()
    def _update_masters(self, written: list[Pair]) -> None:
        for pair in written:
            if self._deepspeed.is_in_file(pair.place.flat):
                self._deepspeed.zero.set_local_hp_param(pair.users.detach().flatten(), pair.place.parameter)
            else:
                self._flat_of(pair).copy_(pair.users)

    # -- off -----------------------------------------------------------------------------------

    def give_back_optimizer(self, optimizer: Optimizer) -> None:
        if self._engine is None or self._has_loaded:
            return
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for number in range(len(self._engine.flats)):
            with self._engine.in_memory(number):
                state = self._engine.kept_state(number)
                for pair in self._pairs:
                    if pair.place.flat == number and state:
                        states[pair.users] = self._engine.whole_state(pair.place, state)
        optimizer.state.update(states)

    def _destroy(self) -> None:
        assert self._engine is not None
        with suppress(AttributeError):  # of an engine that was not complete
            self._engine.engine.destroy()
        if self._stage == 3:
            _forget_modules(self._replica.model)
        self._engine = self._optimizer = self._gathered = self._gradients = None
        self._groups, self._pairs, self._has_loaded = [], [], False

    @property
    def held_tensors(self) -> tuple[torch.Tensor, ...]:
        """Master weights beside what the device computes with, or the other way round."""
        if self._engine is None:
            return ()
        zero = self._engine.zero
        flats = zero.fp16_partitioned_groups_flat if self._stage == 3 else zero.bit16_groups_flat
        return tuple(
            flat.detach() for flat in (*flats, *self._engine.flats) if flat is not None and flat.device == self.device
        )


def _say(line: str) -> None:
    print(f"memlab: {line}", flush=True)  # noqa: T201 - the cell waits for it


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


def _forget_modules(model: nn.Module) -> None:
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
