"""Training low-rank adapters in place of the weights, on the live model.

Rules:

1. The set of parameters that train changes, and so do the optimizer's groups. This technique is therefore put in before all others,
   and taken out after them: those that are there when it comes or goes are put in anew (`Traits.comes_first`), and look at
   modules, parameters and groups as they are then. What changes while the adapters stay leaves them alone.
2. The optimizer stays the same object, and so do its groups: a group has, in the places of the weights that wait, the adapters
   that are beside them. Learning rates, decays and schedulers are those of the group.
3. Frozen is what the optimizers update. What they do not update, and what the user has frozen, stays as it is and gets no adapter.
4. Gradients and moments of what is frozen wait off the device (`Waiting`). When the adapters go, everything is what it was to the bit:
   no weight was written to.
5. What was learnt waits beside the model when the adapters go, with its moments, and comes back with the next ``--lora`` of the same
   setting. Merging and dropping are asked for (``off:merge``, ``off:drop``), and done once.
6. Making adapters draws random numbers as peft does, from the state the generators are in, which is then put back.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MissingExtraError, RefusalError
from memlab.extras import available, require
from memlab.plan import BaseBits, Plan
from memlab.runtime.mechanisms import AsWritten, ChangedParameters, OwnMemory, Turns
from memlab.runtime.model_state import weights_that_wait
from memlab.runtime.ownership import stepped_by
from memlab.runtime.workload import Workload
from memlab.techniques.adapters import injected
from memlab.techniques.adapters.groups import ExchangedGroups
from memlab.techniques.adapters.injected import OF_TRANSFORMERS, InjectedAdapters, adapters_of, note_adapters
from memlab.techniques.adapters.targets import FIELD, targets_of
from memlab.techniques.base import Description, Reduces, Technique, Traits, process_count
from memlab.units import format_bytes

Optimizer = torch.optim.Optimizer
Parameter = nn.Parameter


class LowRankAdapters(Technique, Turns, ChangedParameters, OwnMemory):
    """LoRA and DoRA by peft, in place of training the weights themselves.

    Known limitations:
        What a loop has listed of the model's parameters before (for `clip_grad_norm_`) knows no adapters.
    """

    field = FIELD
    descriptions = (
        Description(
            "--lora",
            "gradients and moments of all weights but the adapters', 1 % of a large model or less",
            "two small products per layer; what waits of the optimizer is on the host",
            "the same outputs when it comes; then adapters learn. Undone to the bit",
            "where activations are most of the peak; refused for models without linear layers, or with adapters of their own",
        ),
        Description(
            "--lora dora",
            "as `--lora`",
            "more time and activations than `--lora`: each layer's weights are summed up and their norm taken in every call",
            "as `--lora`",
            "as `--lora`",
        ),
    )
    traits = Traits(Reduces.MODEL_STATES, comes_first=True, needs_uncompiled=True)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._asked = plan.adapters
        self._adapters: InjectedAdapters | None = None  # while they are in the model
        self._frozen: dict[int, Parameter] = {}  # by id
        self._groups: MutableMapping[Optimizer, ExchangedGroups] = WeakIdKeyDictionary()
        self._steps_seen = False
        # the adapters that the model had before, until it is called; and the table of all, which goes back with this technique
        self._before: tuple[weakref.ref[nn.Module], InjectedAdapters | None] | None = None
        self._of_models = injected.of_models

    # -- refusals ------------------------------------------------------------------------------

    def check(self, workload: Workload) -> None:
        known = adapters_of(workload.model)
        if not self._asked.is_on:
            if workload.has_values and (known is None or not known.steps):
                what = "merge into the weights" if self._asked.what_was_learnt == "merge" else "drop"
                raise RefusalError(
                    FIELD, f"no adapters of {workload.name} have learnt anything to {what}", "train some with --lora"
                )
            if (
                known is not None
                and self._asked.what_was_learnt == "merge"
                and known.learnt_beside is not BaseBits.KEEP
            ):
                raise RefusalError(
                    FIELD,
                    f"what adapters of {workload.name} learnt beside weights in {known.learnt_beside} does not fit the weights as they were, "
                    "and cannot be merged into them",
                    "use --lora off (it waits beside the model), --lora off:drop, or memlab.save_adapters(model, folder)",
                )
            return
        require("peft")
        if available("bitsandbytes"):
            with suppress(MissingExtraError):  # peft imports it, and what it warns of would stand in the user's cell
                require("bitsandbytes")
        if process_count() > 1:
            reason = "adapters would not be known to what sums the gradients of several processes"
            raise RefusalError(FIELD, reason, "use peft's get_peft_model before the model is wrapped")
        _refuse_foreign_adapters(workload, known)
        _refuse_older_peft(workload)
        if known is not None and known.steps and known.setting != self._asked:
            raise RefusalError(
                FIELD,
                f"{workload.name} has adapters ({known.setting}) that learnt in {known.learnt_in}, and {self._asked} would make others",
                "say first what happens to them: --lora off:merge or --lora off:drop",
            )
        targets_of(workload.model, self._asked, _trained(workload), {} if known is None else known.instead)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        held = stepped_by(optimizer)
        for name, value in vars(optimizer).items():
            if isinstance(value, (list, tuple)) and any(id(each) in held for each in value):
                raise RefusalError(
                    FIELD,
                    f"{type(optimizer).__name__} has a list of parameters beside its groups ({name}), which adapters cannot join",
                    "use torch.optim.AdamW in its place",
                )

    # -- in and out ----------------------------------------------------------------------------

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        model, known = workload.model, adapters_of(workload.model)
        self._before = weakref.ref(model), known
        if not self._asked.is_on:
            if known is not None:
                self._end(workload, known)
            return
        trained = _trained(workload)
        if known is not None and known.setting == self._asked:
            undo.callback(self._take_out, workload, known)
            known.put_in(model)
        else:
            known = InjectedAdapters(model, self._asked, targets_of(model, self._asked, trained, {}))
            undo.callback(self._take_out, workload, known)
        note_adapters(model, known)
        self._adapters = known
        self._frozen = known.frozen = {id(p): p for p in model.parameters() if id(p) in trained}
        for parameter in self._frozen.values():
            parameter.requires_grad_(False)
            weights_that_wait[parameter] = None
        known.of_frozen.take_gradients([*self._frozen.values()])
        known.waiting.give_gradients_back(known.parameters())
        self.notes.append(
            f"{known.describe(model)}; --lora off keeps what they learn beside the model, off:merge adds it to the weights, off:drop drops it"
        )
        if not hasattr(type(model), OF_TRANSFORMERS):
            self.notes.append(
                f"memlab.save_adapters(model, folder) saves adapters of {workload.name}: its own state dict has peft's names while they are in it"
            )

    def _end(self, workload: Workload, adapters: InjectedAdapters) -> None:
        """Do once what is asked for with what was learnt."""
        if self._asked.what_was_learnt == "merge":
            adapters.merge()
            self.host.say(
                f"what adapters learnt in {adapters.learnt_in} is part of the weights of {workload.name}: undo does not take it out"
            )
        else:
            self.host.say(f"what adapters of {workload.name} learnt in {adapters.learnt_in} is dropped")
        note_adapters(workload.model, None)

    def _take_out(self, workload: Workload, adapters: InjectedAdapters) -> None:
        model = workload.model
        adapters.waiting.take_gradients(adapters.parameters())
        adapters.take_out(model)
        adapters.send_away()
        for parameter in self._frozen.values():
            parameter.requires_grad_(True)
            weights_that_wait.pop(parameter, None)
        adapters.of_frozen.give_gradients_back([*self._frozen.values()])
        adapters.of_frozen.forget()
        self._adapters, adapters.frozen = None, {}
        if not (adapters.steps and workload.has_values):
            note_adapters(model, None)
        elif not self.host.coming().adapters.is_on and self.host.coming().adapters.what_was_learnt == "keep":
            size = format_bytes(sum(p.numel() * p.element_size() for p in adapters.parameters()))
            self.host.say(
                f"what adapters learnt in {adapters.learnt_in} waits beside {workload.name} ({size}): in the next plan --lora {adapters.setting} "
                f"brings it back, {adapters.merging}--lora off:drop drops it"
            )
        held = set().union(*map(stepped_by, workload.optimizers))
        missing = sum(id(p) not in held for p in self._frozen.values())
        if held and missing:
            names = " and ".join(type(each).__name__ for each in workload.optimizers)
            self.host.say(
                f"{names} was made under --lora and has none of {missing} parameters that were frozen then: make it anew to train them"
            )

    def attach_optimizer(self, optimizer: Optimizer, undo: ExitStack) -> None:
        adapters = self._adapters
        if adapters is None:
            return
        undo.callback(self._leave, optimizer, adapters)
        placed = {p for each in self._groups for p in stepped_by(each)}
        self._groups[optimizer] = ExchangedGroups(
            optimizer, self._frozen, adapters.of_weights, placed, adapters.of_frozen
        )
        adapters.waiting.give_state_back(optimizer, adapters.parameters())

    def _leave(self, optimizer: Optimizer, adapters: InjectedAdapters) -> None:
        adapters.waiting.take_state(optimizer, adapters.parameters())
        groups = self._groups.pop(optimizer, None)
        if groups is not None:
            groups.give_back(optimizer)

    def taken_over(self) -> None:
        self._before = None  # the change has succeeded

    def close(self) -> None:
        model = None if self._before is None else self._before[0]()
        if self._before is not None and model is not None:
            note_adapters(model, self._before[1])
            if self._before[1] is not None and not self._before[1].are_away:
                self._before[1].send_away()

    # -- while they are there ------------------------------------------------------------------

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if self._adapters is None or self._steps_seen or has_closure:
            return
        self._steps_seen = True
        parameters = self._adapters.parameters()
        unreached = sum(p.grad is None for p in parameters)
        if 0 < unreached < len(parameters):
            self.notes.once(
                f"{unreached} of {len(parameters)} tensors of adapters got no gradient in the first step: the model did not call their layers"
            )

    def step_ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        if self._adapters is None or skipped:
            return
        own = {id(p) for p in self._adapters.parameters()}
        # several optimizers may have some, and make one step together
        if next((each for each in self._groups if not own.isdisjoint(stepped_by(each))), optimizer) is optimizer:
            self._adapters.stepped()
            if self.plan.base is not BaseBits.KEEP:
                self._adapters.learnt_beside = self.plan.base

    @property
    def host_bytes(self) -> int:
        return 0 if self._adapters is None else self._adapters.of_frozen.stored_bytes

    def as_written(self) -> AsWritten | None:
        if self._adapters is None:
            return None
        groups = {
            id(group): exchanged.as_written(group)
            for optimizer, exchanged in self._groups.items()
            for group in optimizer.param_groups
        }
        return AsWritten(self._adapters.instead, frozenset(self._frozen), groups, self._adapters.attributes)


def _trained(workload: Workload) -> set[int]:
    """Return the ids of the parameters that train without adapters: those that optimizers have, where there are any."""
    known = adapters_of(workload.model)
    held = set().union(*map(stepped_by, workload.optimizers))
    trained = {id(p) for p in workload.model.parameters() if p.requires_grad and (id(p) in held or not held)}
    return trained if known is None else trained | known.frozen.keys()


def _refuse_older_peft(workload: Workload) -> None:
    """Refuse a peft that Transformers' `save_pretrained` would end the run over, at the first checkpoint."""
    integration = sys.modules.get("transformers.integrations.peft")
    lowest, check = (getattr(integration, name, None) for name in ("MIN_PEFT_VERSION", "check_peft_version"))
    if not hasattr(type(workload.model), OF_TRANSFORMERS) or lowest is None or check is None:
        return
    try:
        check(min_version=lowest)
    except ValueError:
        reason = f"this Transformers saves adapters with peft {lowest} or newer, and {require('peft').__version__} is installed"
        raise RefusalError(FIELD, reason, "install such a peft, or an older Transformers") from None


def _refuse_foreign_adapters(workload: Workload, own: InjectedAdapters | None) -> None:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return  # no layer can be one of its
    ours = {} if own is None else own.instead
    foreign = [
        each
        for each in workload.model.modules()
        if isinstance(each, (tuners.BaseTunerLayer, tuners.BaseTuner)) and id(each) not in ours
    ]
    if foreign:
        raise RefusalError(
            FIELD, f"{workload.name} has adapters of peft's already, which train as they are", "leave out --lora"
        )
