"""Engines, which train a model in their own way, and what does not go together with each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from memlab.errors import PlanError
from memlab.plan.fields import PlanField, choice
from memlab.plan.settings.offload import Offloaded, Tier
from memlab.plan.settings.optimizer import EIGHT_BIT, OPTIMIZER
from memlab.plan.settings.precision import Precision

if TYPE_CHECKING:
    from memlab.plan.plan import Plan


class ScaleOut(StrEnum):
    """The engine that trains the model, where it is not the loop's own way."""

    NONE = "none"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


# every engine, and what it can keep off the device
ENGINES: Mapping[str, frozenset[Offloaded]] = {
    "ddp": frozenset(),
    "fsdp2": frozenset({Offloaded.OPTIMIZER, Offloaded.PARAMS}),
    "tp": frozenset(),
    "zero1": frozenset(),
    "zero2": frozenset({Offloaded.OPTIMIZER}),
    "zero3": frozenset({Offloaded.OPTIMIZER, Offloaded.PARAMS}),
}


def zero_stage(engine: str) -> int:
    """Return the stage of DeepSpeed's ZeRO that an engine is; 0 for the others."""
    return int(engine.removeprefix("zero")) if engine.startswith("zero") else 0


def engine_conflicts(engine: str, plan: Plan, *, in_ranks: bool) -> Iterator[tuple[str, str]]:
    """Yield what does not go together with an engine, and what to do instead.

    Args:
        engine: one of `ENGINES`.
        plan: what applies beside it.
        in_ranks: whether it trains in processes of its own, where batches are split among them as well.
    """
    for conflicts in (_settings_beside, _offloads_beside):
        for flag, reason, instead in conflicts(engine, plan, in_ranks):
            yield f"--scale {engine} and {flag} exclude each other: {reason}", instead


def _settings_beside(engine: str, plan: Plan, in_ranks: bool) -> Iterator[tuple[str, str, str]]:
    converts = plan.optimizer in EIGHT_BIT and in_ranks
    if converts and engine != "ddp":
        yield (
            OPTIMIZER.show(plan.optimizer),
            f"8-bit moments have a scale for each block of a whole parameter, and {engine} keeps parts of parameters",
            "use --scale ddp, or leave it out: each rank has only its part of the moments",
        )
    allowed = {"accumulation" if in_ranks else "", "optimizer" if converts else ""}
    for spec in plan.changed_fields():
        if spec.name not in allowed and not spec.is_beside_engines:
            yield spec.show(getattr(plan, spec.name)), "the engine has the model", "drop one of the two"
    if plan.precision in (Precision.FP16, Precision.PURE_BF16):
        yield f"--precision {plan.precision}", "it needs scaled losses or converted moments", "use --bf16"
    if in_ranks and engine == "zero3" and plan.checkpointing == "selective":
        reason = "it replays operators one by one, and zero3 gathers parameters among them"
        yield "--checkpoint selective", reason, "use --checkpoint, or --scale fsdp2"


def _offloads_beside(engine: str, plan: Plan, in_ranks: bool) -> Iterator[tuple[str, str, str]]:
    needs_state = engine == ("fsdp2" if in_ranks else "zero3") and plan.tier_of(Offloaded.OPTIMIZER) is None
    for what, tier in plan.offload:
        flag = f"--offload {what}{'' if tier is Tier.AUTO else f':{tier}'}"
        able = [name for name, offloads in ENGINES.items() if what in offloads]
        if what is Offloaded.ACTIVATIONS:
            yield flag, "the engine runs the model", "use --checkpoint"
        elif what is Offloaded.FROZEN:
            yield flag, "the engine has the model, and places its parameters", "drop one of the two"
        elif engine not in able:
            kept = "optimizer state" if what is Offloaded.OPTIMIZER else "parameters"
            yield flag, f"{engine} keeps {kept} on the device", f"use --scale {', '.join(able[:-1])} or {able[-1]}"
        elif tier is Tier.DISK and engine != "zero3":
            yield flag, f"{engine} does not offload to files", "drop ':disk', or use --scale zero3"
        elif tier is Tier.DISK and what is Offloaded.PARAMS:
            reason = "parameters that DeepSpeed 0.19 swaps to files come back with other values"
            yield flag, reason, "use --offload optimizer:disk,params"
        elif what is Offloaded.PARAMS and needs_state:
            reason = f"{engine} has the optimizer's state where parameters are"
            yield flag, reason, "use --offload optimizer,params"


def _conflicts(plan: Plan) -> Iterator[str]:
    if plan.scale is not ScaleOut.NONE:
        for what, instead in engine_conflicts(plan.scale, replace(plan, scale=ScaleOut.NONE), in_ranks=False):
            yield f"{what}; {instead}"


def _parse(text: str) -> ScaleOut:
    if text in ENGINES.keys() - {*ScaleOut}:
        raise PlanError(
            f"--scale {text} is of several processes: give it to a cell, as in '%%memfit --nproc 2 --scale {text}'"
        )
    return choice("--scale", ScaleOut)(text)


SCALE = PlanField(
    "scale", "--scale", "|".join(ScaleOut),
    "train under PyTorch's FSDP2 or DeepSpeed's ZeRO, in this process; with --nproc in several",
    _parse,
    choices=tuple(ScaleOut), offer="fsdp2", title="Engine",
    names={"fsdp2": "FSDP2", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}, is_predicted=False,
    conflicts=_conflicts,
)  # fmt: skip
