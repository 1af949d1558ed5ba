"""What is off the device between its uses, and where."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from memlab.errors import PlanError
from memlab.plan.fields import PlanField, Saving, choice


class Offloaded(StrEnum):
    """Kinds of tensors that can leave the device between uses."""

    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    PARAMS = "params"
    FROZEN = "frozen"


class Tier(StrEnum):
    """Places for offloaded bytes. AUTO is host memory on a GPU and a file on the CPU device."""

    AUTO = "auto"
    HOST = "host"
    DISK = "disk"


Offload = tuple[tuple[Offloaded, Tier], ...]
# what others call a tier
_TIER_NAMES = {"nvme": "disk", "cpu": "host"}


def _parse(text: str) -> Offload:
    if text in ("", "none"):
        return ()
    tiers: dict[Offloaded, Tier] = {}
    for item in [each.strip() for each in text.split(",") if each.strip()] or [text]:
        what, _, where = item.partition(":")
        target = choice("--offload", Offloaded)(what)
        if target in tiers:
            raise PlanError(
                f"--offload {text}: {target} is named twice; name each once, as in 'optimizer:disk,activations'"
            )
        tiers[target] = choice(f"--offload {what}:", Tier)(_TIER_NAMES.get(where, where)) if where else Tier.AUTO
    return tuple(sorted(tiers.items()))


def _text(offload: Offload) -> str:
    return ",".join(what if where is Tier.AUTO else f"{what}:{where}" for what, where in offload)


OFFLOAD = PlanField(
    "offload", "--offload", "WHAT[:host|:disk][,WHAT…]",
    "move optimizer state, activations, the parameters of blocks or frozen models and parts off the device between uses "
    "(WHAT: optimizer, activations, params, frozen)",
    _parse, write=_text,
    choices=(
        "none", "optimizer", "activations", "optimizer,activations", "params", "params,optimizer",
        "params,optimizer,activations", "frozen",
    ),
    offer="optimizer", title="Offload", is_exact=True, is_list=True, is_beside_engines=True, doubt=3.0,
    covers=lambda larger, smaller: set(smaller) <= set(larger),
    searched=("none", "optimizer", "activations", "optimizer,activations"),
    untrained="no optimizer runs, and no activations are kept",
    names={
        "optimizer": "optimizer state", "optimizer,activations": "optimizer state, activations",
        "params": "parameters", "params,optimizer": "parameters, optimizer state",
        "params,optimizer,activations": "all three", "frozen": "frozen models",
    },
)  # fmt: skip


def _off_device(what: Offloaded, words: str, cost: float, **facts: bool) -> Saving:
    costs, stronger = lambda tier: cost if tier else 1.0, lambda tier, _rows, _half: tier or Tier.AUTO
    return Saving(OFFLOAD, lambda *_: words, costs, stronger, (what,), what, is_in_evaluation=True, **facts)


ACTIVATIONS_SAVING = _off_device(Offloaded.ACTIVATIONS, "activations off the device until the backward pass", 1.4)
OPTIMIZER_SAVING = _off_device(
    Offloaded.OPTIMIZER, "optimizer state off the device between updates", 1.3, is_in_update=True, is_of_optimizer=True
)
PARAMS_SAVING = _off_device(
    Offloaded.PARAMS, "parameters of blocks off the device between uses", 1.6, is_in_update=True
)
# never tried: what is frozen is mostly beside the model, and only the loop knows when it is used
FROZEN_SAVING = replace(
    _off_device(Offloaded.FROZEN, "frozen models and parts off the device between uses", 1.2),
    stronger=None,
    measured=(),
)
