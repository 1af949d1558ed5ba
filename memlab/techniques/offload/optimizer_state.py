"""Optimizer state that lives off the device, and is brought to where it is updated one bucket at a time.

Three ways, of which the first that applies is taken:

- *In the file*, on the CPU device: the state of a bucket is copied within the file, its pages are updated in place, and
  the copy becomes the state when the bucket is done. No state is ever in memory a ledger counts, and a bucket that
  failed is what it was. Bit for bit.
- *On the host*, for torch's Adam and AdamW in fp32 on a GPU, where that is faster by the measured link: gradients go
  down and what is to be added to parameters comes up (`memlab.techniques.offload.host_update`). Within a rounding or two of
  the device's own arithmetic.
- *Streamed*, for everything else on a GPU: while one bucket is updated the next one's state is on its way in and the
  previous one's on its way out. Bit for bit, for any optimizer that keeps its state per parameter. Up to three buckets
  of state are on the device during a step, and none between steps.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.errors import RefusalError
from memlab.plan import Offloaded, Plan, Tier
from memlab.runtime.accelerator import has_streams, is_accelerator
from memlab.runtime.homes import home_of, stood_for
from memlab.runtime.mechanisms import OwnMemory, StateForm, Stepper, Updating, Visiting, brought
from memlab.runtime.optimizer_step import foreign_stepper
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.ownership import parameters_in
from memlab.runtime.state_entries import PackedState, State, kept_of
from memlab.runtime.state_layers import SMALL_ELEMENTS, shown
from memlab.runtime.touch import own_class
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, Reduces, Technique, Traits
from memlab.techniques.offload import link as _link
from memlab.techniques.offload.host_update import HostUpdate, is_served, laid_out_like
from memlab.techniques.offload.spill import PLAIN, Offload, Spill, consists_of_others, is_spilled, made_anew
from memlab.techniques.offload.transfers import Leaving, Ticket, copy_streams_for, copy_streams_of, settle

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class _Kept:
    """A tensor of state off the device, and the copy that last wrote it."""

    tensor: torch.Tensor
    sent: Any = None  # what says that it is done


class OffloadOptimizer(Offload, StateForm, Updating, OwnMemory):
    """Keeps optimizer state in host memory beside a GPU, or in files beside the CPU.

    Known limitations:
        From a GPU to disk copies are not overlapped. A prediction for a GPU is of the streamed way, whatever the link.
    """

    what = Offloaded.OPTIMIZER
    descriptions = (
        Description(
            flags="--offload optimizer",
            saves="moments: 8 → ~0 bytes per parameter between updates",
            costs="moments are copied both ways once a step, or the host updates",
            exactness="bit for bit; within 1e-7 of an update where the host updates",
            gives_nothing="the peak is in an update that holds one large parameter; the optimizer keeps no state",
        ),
    )
    traits = Traits(Reduces.MODEL_STATES, is_of_optimizer=True)
    state_per_step = True

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._spills: dict[Tier, Spill] = {}
        # the same memory is written at every step, so it is pinned once
        self._kept: MutableMapping[torch.Tensor, dict[str, _Kept]] = WeakTensorKeyDictionary()
        self._is_for_gpu = False
        self._on_host: dict[Optimizer, HostUpdate] = {}
        # within a step
        self._is_stepping = False
        self._arriving: dict[tuple[torch.Tensor, str], Ticket] = {}
        self._leaving: list[Leaving] = []

    def check(self, workload: Workload) -> None:
        self._tier(stood_for(next(workload.model.parameters())))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise RefusalError(
                "offload",
                "LBFGS keeps one history for all parameters and evaluates the loss several times in a step",
                "use torch.optim.AdamW with --offload optimizer, or LBFGS without it",
            )
        for parameter in parameters_in(optimizer):
            self._tier(stood_for(parameter))

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        # a prediction says so of parameters without values on the CPU
        homes = (workload.device, home_of(next(workload.model.parameters())))
        self._is_for_gpu = any(map(is_accelerator, homes))

    def attach_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        undo.callback(self._forget, optimizer)
        if is_served(optimizer):
            self._choose_place(optimizer)

    # -- state in and out ----------------------------------------------------------------------

    def pack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        free = self._free(optimizer, parameter)
        moved = {name: self._kept_of(free.get(name), parameter, value) for name, value in state.items()}
        # only what is in use: another technique below may have changed the names
        self._kept[parameter] = {name: kept for name, kept in moved.items() if kept is not None}
        if not self._is_stepping:
            settle()
        resident = {name: value if (kept := moved[name]) is None else kept.tensor for name, value in state.items()}
        return resident if isinstance(state, PackedState) else self._shown(optimizer, parameter, resident)

    def _shown(self, optimizer: Optimizer, parameter: Parameter, resident: State) -> State:
        """Resident state, as the loop may find it: where its parameter is used."""
        names = frozenset(self._kept[parameter])
        if not names or home_of(parameter).type == "cpu":
            return resident
        return shown(resident, names, optimizer, parameter, self._layers_at_rest, "under --offload optimizer")

    def _layers_at_rest(self) -> Sequence[Technique] | None:
        return None if self._is_stepping else self.host.techniques()

    def unpack_state(self, optimizer: Optimizer, parameter: Parameter, state: State) -> State:
        kept = self._kept.get(parameter, {})
        return {
            name: self._brought(optimizer, parameter, name, kept[name])
            if name in kept and value is kept[name].tensor
            else value
            for name, value in state.items()
        }

    @property
    def host_bytes(self) -> int:
        return sum(spill.stored_bytes for spill in self._spills.values())

    def _kept_of(self, free: _Kept | None, parameter: Parameter, value: Any) -> _Kept | None:
        """Return what is kept of one entry, on its way there; None for what stays."""
        if not _moves(value):
            return None
        if consists_of_others(value):
            return _Kept(self._spill(stood_for(parameter)).store(value))
        if own_class(value) not in PLAIN:
            self.notes.once(
                f"what an optimizer keeps in a {type(value).__name__} stays where it is: what such a tensor does is not known"
            )
            return None
        if self._is_stepping and _is_kept_already(parameter, value):  # updated where it lies
            return _Kept(value)
        tensor = None if free is None else free.tensor
        if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
            tensor = self._spill(stood_for(parameter)).empty_like(value)
        tensor = laid_out_like(tensor, _like(parameter, value))
        ticket = copy_streams_of(value).send(tensor, value)
        if self._leaving:
            self._leaving[-1].add(ticket)
        elif self._is_stepping:  # written by the loop, and to be updated on the host
            ticket.arrived()
        return _Kept(tensor, ticket.left)

    def _brought(self, optimizer: Optimizer, parameter: Parameter, name: str, kept: _Kept) -> torch.Tensor:
        """One entry, where it can be updated."""
        if self._is_stepping and self._host_update(optimizer) is not None:
            return kept.tensor
        if self._is_stepping and self._is_in_file(parameter):
            return self._spill(stood_for(parameter)).store(kept.tensor)
        return (self._arriving.pop((parameter, name), None) or _fetched(parameter, kept)).wait()

    def _is_in_file(self, parameter: Parameter) -> bool:
        return not is_accelerator(home_of(parameter)) and not self._is_for_gpu

    def _free(self, optimizer: Optimizer, parameter: Parameter) -> dict[str, _Kept]:
        """Return what may be written: within a step state is unpacked, but a plan change must not touch live state."""
        in_use = {id(value) for value in optimizer.state.get(parameter, {}).values()}
        return {name: kept for name, kept in self._kept.get(parameter, {}).items() if id(kept.tensor) not in in_use}

    # -- within a step -------------------------------------------------------------------------

    def bucket_coming(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        self._is_stepping = True
        host_update = self._host_update(optimizer)
        if host_update is not None:
            host_update.begin(parameters)
            return
        # the bucket before last must have left before another one takes memory
        self._leaving.append(Leaving())
        for leaving in self._leaving[:-2]:
            leaving.retire(0)
        del self._leaving[:-2]
        for parameter in parameters:
            if not self._is_in_file(parameter):
                self._fetch(kept_of(optimizer.state.get(parameter, {})), parameter)

    def _fetch(self, state: State, parameter: Parameter) -> None:
        for name, kept in self._kept.get(parameter, {}).items():
            if state.get(name) is kept.tensor:
                self._arriving[parameter, name] = _fetched(parameter, kept)

    def buckets_over(self, optimizer: Optimizer) -> None:
        # nothing may stay on the device between steps, and what an update that was broken off had asked for goes, too
        for leaving in self._leaving:
            leaving.retire(0)
        for ticket in self._arriving.values():
            ticket.wait()
        self._leaving.clear()
        self._arriving.clear()
        if optimizer in self._on_host:
            self._on_host[optimizer].forget()
        self._is_stepping = False

    # -- where to update -----------------------------------------------------------------------

    def stepper(self, optimizer: Optimizer) -> Stepper | None:
        return self._host_update(optimizer)

    def _host_update(self, optimizer: Optimizer) -> HostUpdate | None:
        """Return what updates on the host; None where another technique updates, or has changed what there is to update."""
        update = self._on_host.get(optimizer)
        if update is None or not is_served(optimizer):
            return None
        others = [technique for technique in self.host.techniques() if technique is not self]
        # parameters that come for their update are updated where they come to
        is_elsewhere = brought(others, Visiting) or foreign_stepper(optimizer, others) is not None
        return None if is_elsewhere else update

    def _choose_place(self, optimizer: Optimizer) -> None:
        """Update on the host where that is faster, and say why."""
        parameter = optimizer.param_groups[0]["params"][0]
        device = home_of(parameter)
        if not has_streams(device) or isinstance(parameter, FakeTensor) or self._tier(device) is not Tier.HOST:
            return
        try:
            link = _link.measured(device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.notes.append("optimizer state is streamed to the GPU: there was no room to measure the link")
            return
        self.notes.append(link.verdict)
        if link.favours_host:
            self.update_on_host(optimizer)

    def update_on_host(self, optimizer: Optimizer) -> None:
        """Update the fp32 parameters of this Adam or AdamW of torch's on the host from now on, whatever the link."""
        device = home_of(optimizer.param_groups[0]["params"][0])
        self._on_host[optimizer] = HostUpdate(optimizer, self._spill(device))

    # -- memory --------------------------------------------------------------------------------

    def _spill(self, device: torch.device) -> Spill:
        tier = self._tier(device)
        return self._spills.setdefault(tier, Spill(tier, say=self.notes.once))

    def _forget(self, optimizer: Optimizer) -> None:
        settle()
        self._on_host.pop(optimizer, None)
        for parameter in parameters_in(optimizer):
            self._kept.pop(parameter, None)


def _moves(value: Any) -> bool:
    # paged tensors of bitsandbytes move by themselves
    return isinstance(value, torch.Tensor) and value.numel() >= SMALL_ELEMENTS and not hasattr(value, "is_paged")


def _is_kept_already(parameter: Parameter, value: torch.Tensor) -> bool:
    return is_accelerator(home_of(parameter)) != is_accelerator(value.device) or (
        not is_accelerator(value.device) and is_spilled(value.untyped_storage())
    )


def _like(parameter: Parameter, kept: torch.Tensor) -> torch.Tensor:
    # state shaped like its parameter gets its memory layout too: fused kernels walk both side by side
    return parameter if kept.shape == parameter.shape else kept


def _fetched(parameter: Parameter, kept: _Kept) -> Ticket:
    tensor = kept.tensor
    if consists_of_others(tensor):
        home = home_of(parameter)
        return Ticket(made_anew(tensor, lambda part: part.to(home, copy=True)), tensor, copy_streams_of(tensor))
    target = torch.empty_like(
        _like(parameter, tensor), dtype=tensor.dtype, device=home_of(parameter), requires_grad=False
    )
    return copy_streams_for(parameter, home_of(parameter)).fetch(target, tensor, after=kept.sent)
