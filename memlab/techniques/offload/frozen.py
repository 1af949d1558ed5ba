"""Frozen models and parts off the device between uses: a teacher, a reference model, a VAE, a text encoder, a vision tower.

Rules:

1. Frozen is a module none of whose parameters requires gradients or was updated by an optimizer, and that is part of no other such
   module, wherever it is kept: in a variable, in a trainer, in the trained model. What the loop makes or freezes later is looked
   for at the ends of the steps 1, 2, 4, 8 and so on.
2. Its large parameters rest off the device, and come to it for the calls of its modules (`block_streaming`): of blocks that repeat
   one block at a time, of anything else what the module that is called consists of. So methods like ``vae.encode`` are
   served, which call its parts. What a backward pass needs of them again comes then.
3. Weights are not written back, unless a forward or the loop has written to them. Beside a GPU the loop's own code finds them on
   the device (`lending`).
4. What is to be left alone stays on the device: parameters that other modules have as well, or the loop; compiled modules; what is
   trained after all; averages of weights, which the loop writes to step after step.
5. A module beside the trained model is kept no longer than others keep it. On a CPU its weights are in no measured peak,
   on the device or off it, and so are the copies of them (`_Uncounted`).

Exact: bytes are copied, and computed with on the device as always.

Known limitations: on a GPU a function that `torch.compile` has made and that calls such a module finds weights where they rest, and so
does code in C++ that reads weights past the calls of their modules. Two threads must not call one module at once.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.plan import Offloaded, Plan, Precision
from memlab.runtime.homes import is_at_rest
from memlab.runtime.hooks import is_compiled
from memlab.runtime.lifetimes import held_by_others, is_saved, storage_of
from memlab.runtime.mechanisms import Interruptible, ModulesBeside, OwnMemory
from memlab.runtime.model_state import weights_that_wait
from memlab.runtime.modules import repeated_blocks
from memlab.runtime.ownership import frozen_modules, keeps_parameters, live_modules, live_optimizers, parameters_in
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.runtime.undo import Undo
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, Reduces, Traits
from memlab.techniques.offload.block_streaming import BlockStreaming, ParameterCopies, can_rest, slots_of
from memlab.techniques.offload.lending import Lending
from memlab.techniques.offload.spill import Offload, Spill, births_are_spilled, is_spilled, spilled_storages
from memlab.techniques.offload.transfers import Ticket
from memlab.units import format_bytes

Optimizer = torch.optim.Optimizer
Parameter = nn.Parameter

# steps in a row in which the loop writes to weights until they are taken for an average of others
_MOST_STEPS_WRITTEN = 2


class OffloadFrozen(Offload, Interruptible, ModulesBeside, OwnMemory):
    """Keep frozen modules off the device between their uses; see the module for the rules and the known limitations."""

    what = Offloaded.FROZEN
    traits = Traits(Reduces.MODEL_STATES)  # parts of a compiled model stay
    descriptions = (
        Description(
            flags="--offload frozen",
            saves="frozen models and parts (teacher, VAE) not in use",
            costs="they are copied to the device for each call, and once more where gradients pass through them",
            exactness="bit for bit",
            gives_nothing="the peak comes while they are used and they repeat no blocks; refused where nothing is frozen",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._spill: Spill | None = None
        self._parts: list[weakref.ref[_Part]] = []  # kept by the hooks of their modules
        self._left_alone: list[weakref.ref[nn.Module]] = []
        self._workload: Workload | None = None  # once it is attached
        self._steps = 0
        self._staying_bytes = 0  # of frozen weights that do not leave

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        # pure bf16 has other data of the trained model's parameters, and must find them on their device
        return super().setting(plan), plan.precision is Precision.PURE_BF16

    @property
    def beside(self) -> Sequence[tuple[nn.Module, object]]:
        return [(root, part) for part in self._alive() if (root := part.root()) is not None]

    @property
    def host_bytes(self) -> int:
        return self._spill.peak_bytes if self._spill else 0

    # -- whether it applies --------------------------------------------------------------------

    def check(self, workload: Workload) -> None:
        self._tier(workload.device)
        self._check_parameters_move(workload)
        if not workload.has_values or self.host.predecessor(self) is not None:
            return  # what is beside the model has no twin
        gc.collect()  # models of before that only cycles keep are not to be moved
        found = _Search(workload, self.plan, self._left_alone)
        if not any(found.movable(root, 0) or found.rest(root) for root in found.roots):
            raise RefusalError(
                self.field,
                f"frozen: beside {workload.name} there is no frozen model on {workload.device} with a weight of {SMALL_ELEMENTS} "
                "elements or more, and no such part within it",
                "freeze one first (requires_grad_(False)), or use --offload optimizer,activations",
            )

    # -- in and out ----------------------------------------------------------------------------

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._spill = Spill(self._tier(workload.device), say=self.notes.once)
        self._workload = workload
        undo.callback(self._end)
        self._look()

    def close(self) -> None:
        with suppress(torch.OutOfMemoryError):  # what there is no room for goes on as it is
            self._end()

    def _end(self) -> None:
        for part in self._alive():
            part.end(self.host.aliases())
        self._parts = []

    def _alive(self) -> list[_Part]:
        return [part for reference in self._parts if (part := reference()) is not None]

    def _look(self) -> None:
        """Take what is frozen and not taken yet."""
        assert self._spill is not None
        assert self._workload is not None
        self._parts = [*map(weakref.ref, self._alive())]
        found = _Search(self._workload, self.plan, self._left_alone)
        for root in found.roots:
            if movable := found.movable(root, self.host.aliases()):
                is_beside = id(root) not in found.inside
                part = _Part(root, movable, self._spill, found.device, is_beside=is_beside)
                self._parts.append(weakref.ref(part))
                part.leave_device()
        self._staying_bytes = found.staying_bytes
        self._describe()

    def _describe(self) -> None:
        sizes: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for part in self._alive():
            sizes[part.name] += part.size_bytes
            numbers[part.name] += 1
        listed = ", ".join(
            f"{f'{numbers[name]} × ' if numbers[name] > 1 else ''}{name} ({format_bytes(size)})"
            for name, size in sizes.most_common(_MOST_NAMES)
        )
        more = f" and {len(sizes) - _MOST_NAMES} more" if len(sizes) > _MOST_NAMES else ""
        stays = f"; {format_bytes(self._staying_bytes)} stay: {_STAYING}" if self._staying_bytes else ""
        self.notes[:] = [note for note in self.notes if not note.startswith(_AWAY)]
        if listed or stays:
            self.notes.insert(0, f"{_AWAY} {listed or 'nothing'}{more}{stays}")

    # -- the loop ------------------------------------------------------------------------------

    def broken_off(self) -> None:
        for part in self._alive():
            part.leave_broken_calls()

    def step_ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        self._steps += 1
        for part in self._alive():
            if why := part.why_not_idle():
                with suppress(torch.OutOfMemoryError):  # it works as it is, until there is room
                    self._leave_alone(part, why)
            else:
                part.rest_again()
        if self._steps & (self._steps - 1) == 0:
            try:
                self._look()
            except (OSError, RuntimeError) as error:  # there is no room on the host: the loop goes on
                self.notes.once(f"frozen weights stay on the device: {error}".splitlines()[0])

    def _leave_alone(self, part: _Part, why: str) -> None:
        part.end(self.host.aliases())
        self._left_alone.append(part.root)
        self._parts = [each for each in self._parts if each() is not part]
        self._describe()
        self.notes.once(f"{part.name} stays on the device: {why}")


_AWAY = "off the device between uses:"
_STAYING = "in several models, held by the loop, compiled or of a class of their own"
_MOST_NAMES = 4


# --- what is frozen --------------------------------------------------------------------------------


class _Search:
    """What is frozen now, and what of it may leave.

    Args:
        workload: whose loop uses it.
        plan: that asks.
        left_alone: modules that are not looked at.
    """

    def __init__(self, workload: Workload, plan: Plan, left_alone: Collection[weakref.ref[nn.Module]]) -> None:
        own = [module for module in workload.model.modules() if keeps_parameters(module)]
        # a twin says that it is on the device it stands for
        self.device = workload.device if workload.has_values else next(workload.model.parameters()).device
        self.inside = {*map(id, own)}  # of the trained model
        self.staying_bytes = 0  # of large frozen weights that `movable` has left out
        self._of_model = {id(p) for p in workload.model.parameters()}
        # a twin has no modules but its model's; and what stands for others is of no loop
        everything = live_modules() if workload.has_values else own
        optimizers = live_optimizers() if workload.has_values else workload.optimizers
        trained = {*map(id, weights_that_wait)}.union(*map(_trained_by, optimizers))
        stays = plan.precision is Precision.PURE_BF16 or is_compiled(workload.model)
        self._is_fake = not workload.has_values
        self.roots = [
            root
            for root in frozen_modules(everything, trained)
            if not any(root is each() for each in left_alone) and not (stays and id(root) in self.inside)
        ]
        self._owners = Counter(id(p) for module in everything for p in vars(module)["_parameters"].values())
        # by the model's first one loops find out its device
        self._first = next(iter(workload.model.parameters()))

    def rest(self, root: nn.Module) -> list[Parameter]:
        """Return the parameters of a module that rest."""
        return [p for p in root.parameters() if p.layout is torch.strided and is_at_rest(p)]

    def movable(self, root: nn.Module, aliases: int) -> list[Parameter]:
        """Return the parameters of a module that may leave; of the trained model's so many aliases are known."""
        large = [p for p in root.parameters() if self._is_large(p)]
        places = Counter(id(module._parameters[name]) for module, name in slots_of(root))
        able = [
            p
            for p in large
            if can_rest(p, self.device)
            and p.grad is None
            and p is not self._first
            and self._owners[id(p)] == places[id(p)]
            and (id(p) not in self._of_model or id(root) in self.inside)
            and not is_compiled(root)
        ]
        held = held_by_others([p for p in able if id(p) in self._of_model], aliases)
        held |= held_by_others([p for p in able if id(p) not in self._of_model])
        found = [p for p in able if id(p) not in held]
        self.staying_bytes += sum(p.nbytes for p in large) - sum(p.nbytes for p in found)
        return found

    def _is_large(self, parameter: Parameter) -> bool:
        return (
            parameter.numel() >= SMALL_ELEMENTS
            and parameter.device == self.device
            and isinstance(parameter, FakeTensor) is self._is_fake
            and not (parameter.layout is torch.strided and is_spilled(parameter.untyped_storage()))
        )


def _trained_by(optimizer: Optimizer) -> set[int]:
    """Return ids of the parameters that an optimizer trains: many have frozen ones among the others, and leave them out of updates."""
    parameters = [*parameters_in(optimizer)]
    # frozen for a part of each step, as the judge of a GAN is
    is_for_them = not any(p.requires_grad for p in parameters)
    return {id(p) for p in parameters if is_for_them or p.requires_grad or optimizer.state.get(p)}


@dataclass(frozen=True)
class FrozenBeside:
    """Weights of frozen models beside the trained one that leave the device, or have left it."""

    all_bytes: int
    resting_bytes: int  # of these, off the device now
    most_bytes: int  # of them on the device at once


def frozen_beside(workload: Workload) -> FrozenBeside:
    """How much of frozen models beside the trained one `--offload frozen` takes off its device.

    Example:
        >>> student, teacher = nn.Linear(2, 2), nn.Linear(64, 64).requires_grad_(False)
        >>> frozen_beside(Workload(student)).all_bytes >= 4 * 64 * 64
        True
    """
    found = _Search(workload, Plan(), ())
    all_bytes, resting_bytes, most_bytes = 0, 0, 0
    for root in found.roots:
        if id(root) in found.inside:
            continue
        resting = {id(p): p.nbytes for p in found.rest(root)}
        sizes = resting | {id(p): p.nbytes for p in found.movable(root, 0)}
        of_blocks = [sum(sizes.get(id(p), 0) for p in block.parameters()) for block in repeated_blocks(root)]
        whole = sum(sizes.values())
        all_bytes, resting_bytes = all_bytes + whole, resting_bytes + sum(resting.values())
        # the next block comes while one is in use
        most_bytes = max(most_bytes, whole - sum(of_blocks) + 2 * max(of_blocks, default=0))
    return FrozenBeside(all_bytes, resting_bytes, most_bytes)


# --- one of them -----------------------------------------------------------------------------------


class _Part:
    """A frozen module whose parameters rest; it is kept by its hooks."""

    def __init__(
        self, root: nn.Module, parameters: Sequence[Parameter], spill: Spill, device: torch.device, *, is_beside: bool
    ) -> None:
        self.root = weakref.ref(root)
        self.name = type(root).__name__
        self.size_bytes = sum(p.nbytes for p in parameters)
        self._parameters = parameters
        self._is_trained = self._is_over = False
        # of each parameter its version and its storage, when it was last put to rest
        self._found: list[tuple[int, int]] = []
        self._steps_written = 0  # in a row
        self._undo = Undo()
        kind = _Uncounted if is_beside and device.type == "cpu" else ParameterCopies
        blocks = repeated_blocks(root)
        others = _others(root, blocks, parameters)
        self._streaming = BlockStreaming(blocks, kind(device), spill, self._is_used, others)
        self._streaming.arrived, self._streaming.left = self._arrived, self._left
        for module in (*blocks, *(module for module, _ in others)):
            self._streaming.stream(module, self._undo)
        self._lending: Lending | None = None
        if self._streaming.link.overlaps:
            self._lending = Lending(
                parameters, parameters, self._streaming, self._streaming.send_away, lambda _parameter: None
            )

    # -- at rest -------------------------------------------------------------------------------

    def leave_device(self) -> None:
        """Put everything to rest for the first time."""
        for parameter in self._parameters:
            # on a GPU a backward pass is to find there what the loop has built on it before
            if not (self._streaming.link.overlaps and is_saved(parameter)):
                self._streaming.send_away(parameter)
        if self._lending is not None:
            self._lending.handed_back()
        self._found = self._now()

    def rest_again(self) -> None:
        """Put to rest what has come to the device and is not in use."""
        if self._is_over or self._streaming.is_open:
            return
        if self._lending is not None:
            self._lending.rest_again()
        else:
            device = self._streaming.link.device
            there = [p for p in self._parameters if self._streaming.resting(p) is None and can_rest(p, device)]
            held = held_by_others(there)
            for parameter in there:
                if id(parameter) not in held and parameter.grad is None:
                    self._streaming.send_away(parameter)
        self._found = self._now()

    def leave_broken_calls(self) -> None:
        """Put to rest what a call that was interrupted has left on the device: a Ctrl-C passes hooks by."""
        self._streaming.pass_ended()

    def end(self, aliases: int) -> None:
        """Have everything on the device again; harmless when done. Of each parameter so many aliases are known."""
        if self._is_over:
            return
        if self._lending is not None:
            self._lending.leave()
        self._streaming.link.settle()
        resting = [p for p in self._parameters if self._streaming.resting(p) is not None]
        held = held_by_others(resting, aliases + 1)
        for parameter in resting:
            self._streaming.bring_back(parameter, is_held=id(parameter) in held)
        self._is_over = True
        self._undo.run()

    # -- in use --------------------------------------------------------------------------------

    def _is_used(self, _parameter: Parameter) -> None:
        """A parameter that trains is about to be used with gradients: the module is frozen no more."""
        self._is_trained = True

    def _arrived(self, parameters: Sequence[Parameter]) -> None:
        if self._lending is not None:
            self._lending.leave(parameters)

    def _left(self, parameters: Sequence[Parameter]) -> None:
        if self._lending is not None and not self._is_over:
            self._lending.watch(parameters)

    def why_not_idle(self) -> str:
        """Return why the module is to stay on the device, once a step is over; empty where it rests well."""
        if self._is_trained or any(p.requires_grad for p in self._parameters):
            return "it is trained by now"
        self._steps_written = self._steps_written + 1 if self._found != self._now() else 0
        return "the loop writes to its weights step after step" if self._steps_written >= _MOST_STEPS_WRITTEN else ""

    def _now(self) -> list[tuple[int, int]]:
        return [(-1 if p.is_inference() else p._version, storage_of(p)) for p in self._parameters]


class _Uncounted(ParameterCopies):
    """Copies of weights which no peak that is measured on a CPU counts: they lie beside the trained model, as others of the notebook do."""

    def fetch(self, stored: torch.Tensor) -> Ticket:
        with births_are_spilled():
            ticket = super().fetch(stored)
        spilled_storages.keep(ticket.target.untyped_storage(), True)
        return ticket


def _others(
    root: nn.Module, blocks: Sequence[nn.Module], parameters: Sequence[Parameter]
) -> list[tuple[nn.Module, list[tuple[nn.Module, str]]]]:
    """The modules that may be called by themselves, beside blocks, with where they use some parameters: what is in blocks comes with these."""
    wanted, within = {*map(id, parameters)}, {id(part) for block in blocks for part in block.modules()}
    of_blocks = {*map(id, blocks)}
    found = []
    for module in root.modules():
        slots = [
            (part, name)
            for part, name in slots_of(module)
            if id(part._parameters[name]) in wanted and (id(module) in within or id(part) not in within)
        ]
        if slots and id(module) not in of_blocks:
            found.append((module, slots))
    return found
