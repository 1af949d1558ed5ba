"""`FIELDS`: the table of what is known of each setting of a plan; their values are in `settings`.

Everything people type or click comes from `FIELDS`: the flags of the magics, their help, the controls of a panel and
the text a plan prints as. So does what predictions, searches, engines and inference ask about a setting; in which order
settings are tried is in `savings`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

from memlab.errors import PlanError
from memlab.plan.settings import (
    EIGHT_BIT,
    ENGINES,
    Adapters,
    BaseBits,
    BatchNorm,
    Checkpointing,
    Gradients,
    Loss,
    Offload,
    Offloaded,
    OptimizerChoice,
    Padding,
    Precision,
    ScaleOut,
    Tier,
    did_you_mean,
)

# what others call a tier
_TIER_NAMES = {"nvme": "disk", "cpu": "host"}
_E = TypeVar("_E", bound=StrEnum)


@dataclass(frozen=True)
class PlanField:
    """One field of a plan as people see it."""

    name: str  # attribute of `Plan`
    flag: str  # the magic flag that sets it
    metavar: str  # how its values read in help
    help: str  # one sentence for help, panel and docs
    parse: Callable[[str], Any]  # text of the flag's value to the field's value
    write: Callable[[Any], str] = str  # the field's value to such a text
    bare: str | None = None  # value when the flag is given without one, or None when a value is needed
    shorthands: Mapping[str, str] = field(default_factory=dict)  # flags without a value, and the value each stands for
    choices: tuple[str, ...] = ()  # values offered where one picks instead of typing; the first one is the default
    offer: str = ""  # of the choices, the one a panel offers first
    title: str = ""  # what it is called where people pick
    # what choices are called there, where their text does not say it
    names: Mapping[str, str] = field(default_factory=dict)
    is_predicted: bool = True  # whether what its settings would give can be predicted
    is_exact: bool = False  # whether all its settings give the gradient and the update of the loop as written
    alike: tuple[Any, ...] = ()  # values with the same numbers, each smaller on the device than the one before
    # whether it concerns the model call alone, so that each model of a shared optimizer can have its own
    is_of_calls: bool = False
    is_beside_engines: bool = False  # whether engines have a way of their own for it
    # whether its settings do the same by degrees, so that half of the error of one is that of another
    is_graded: bool = False
    # by how much more than for others the predicted time may be wrong. What moves data off the device depends on a disk
    # or a bus and on how many pieces there are: on a CPU, activations off it cost steps 0.8 to 4 times what the
    # prediction had for them (`python -m tests.bench.find_plan`)
    doubt: float = 1.0
    # whether one value keeps or raises what another one does; by default the same one, or any over the default
    covers: Callable[[Any, Any], bool] | None = None
    searched: tuple[str, ...] = ()  # values that a search considers
    is_list: bool = False  # whether a value lists settings that are there side by side, as pairs of what and how
    untrained: str = "it works on training only"  # why it means nothing where nothing is trained
    # whether it goes by what the optimizer updates, so that a cell's plan comes when the optimizer is there
    needs_optimizer: bool = False

    @cached_property
    def default(self) -> Any:
        """The value that changes nothing."""
        return self.parse(self.choices[0])

    def contains(self, larger: Any, smaller: Any) -> bool:
        """Return whether one value keeps or raises what another one does."""
        if smaller in (larger, self.default) or (self.covers is not None and self.covers(larger, smaller)):
            return True
        return {larger, smaller} <= {*self.alike} and self.alike.index(larger) > self.alike.index(smaller)

    def parts(self, value: Any) -> tuple[Any, ...]:
        """Return the settings that a value stands for, each as a value of its own."""
        return tuple((pair,) for pair in value) if self.is_list else (value,)

    def joined(self, one: Any, other: Any) -> Any:
        """Return the value with another one added: in its place, or beside what it lists."""
        return tuple((dict(one) | dict(other)).items()) if self.is_list else other

    def is_same(self, one: Any, other: Any) -> bool:
        """Return whether two values compute the same."""
        return one == other or self.is_exact or {one, other} <= {*self.alike}

    def text(self, value: Any) -> str:
        """Text of a value, as `parse` reads it; where it is one of the choices, the choice.

        Example:
            >>> spec = next(each for each in FIELDS if each.name == "offload")
            >>> spec.text(spec.parse("activations,optimizer")), spec.text(spec.parse("optimizer:disk"))
            ('optimizer,activations', 'optimizer:disk')
        """
        return next((choice for choice in self.choices if self.parse(choice) == value), self.write(value))

    def show(self, value: Any) -> str:
        """The flag that sets a value, the shortest there is; empty for the default."""
        if value == self.default:
            return ""
        shorter = {text: flag for flag, text in self.shorthands.items()} | ({self.bare: self.flag} if self.bare else {})
        text = self.write(value)
        return shorter.get(text, f"{self.flag} {text}")


def _count(flag: str, what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise PlanError(f"{flag} {text}: expected a whole number of {what}, 1 or more, as in '{flag} 4'")
        return int(text)

    return parse


def _choice(flag: str, enum: type[_E]) -> Callable[[str], _E]:
    def parse(text: str) -> _E:
        try:
            return enum(text)
        except ValueError:
            raise PlanError(f"{flag} {text}: allowed are {', '.join(enum)}{did_you_mean(text, [*enum])}") from None

    return parse


def _parse_offload(text: str) -> Offload:
    if text in ("", "none"):
        return ()
    tiers: dict[Offloaded, Tier] = {}
    for item in [each.strip() for each in text.split(",") if each.strip()] or [text]:
        what, _, where = item.partition(":")
        target = _choice("--offload", Offloaded)(what)
        if target in tiers:
            raise PlanError(
                f"--offload {text}: {target} is named twice; name each once, as in 'optimizer:disk,activations'"
            )
        tiers[target] = _choice(f"--offload {what}:", Tier)(_TIER_NAMES.get(where, where)) if where else Tier.AUTO
    return tuple(sorted(tiers.items()))


def _parse_scale(text: str) -> ScaleOut:
    if text in ENGINES.keys() - {*ScaleOut}:
        raise PlanError(
            f"--scale {text} is of several processes: give it to a cell, as in '%%memfit --nproc 2 --scale {text}'"
        )
    return _choice("--scale", ScaleOut)(text)


def _offload_text(offload: Offload) -> str:
    return ",".join(what if where is Tier.AUTO else f"{what}:{where}" for what, where in offload)


_COUNTS = ("1", "2", "4", "8", "16")
FIELDS: tuple[PlanField, ...] = (
    PlanField(
        "accumulation", "--accumulate", "N",
        "split each batch into N micro-batches; the gradient is that of the whole batch",
        _count("--accumulate", "micro-batches"),
        choices=_COUNTS, offer="4", title="Gradient accumulation", is_exact=True, is_of_calls=True, is_graded=True,
        covers=operator.ge, searched=_COUNTS,
        untrained="rows do not wait for each other without an update: feed fewer rows at a time",
        names={"2": "2 micro-batches", "4": "4 micro-batches", "8": "8 micro-batches", "16": "16 micro-batches"},
    ),
    PlanField(
        "batchnorm", "--batchnorm", "keep|micro",
        "with --accumulate, let BatchNorm take its statistics from each micro-batch, as in accumulation written by hand",
        _choice("--batchnorm", BatchNorm),
        choices=tuple(BatchNorm), offer="micro", title="BatchNorm per micro-batch", is_of_calls=True,
    ),
    PlanField(
        "checkpointing", "--checkpoint", "[off|full|every:N|selective|budget:SIZE]",
        "recompute activations in the backward pass: of every block, of one block in N, all but matrix products and attention, "
        "or of as few blocks as possible so that what blocks keep between forward and backward fits into SIZE, as in budget:2GiB",
        Checkpointing, bare="full",
        choices=("off", "full", "every:2", "selective"), offer="full", title="Checkpointing", is_exact=True,
        is_of_calls=True, is_beside_engines=True, is_graded=True, covers=Checkpointing.covers,
        searched=("off", "selective", "full"), untrained="nothing is kept for a backward pass that could be recomputed",
        names={"full": "every block", "every:2": "every second block", "selective": "selective"},
    ),
    PlanField(
        "precision", "--precision", "|".join(Precision),
        "number format of forward and backward; fp16 comes with dynamic loss scaling, pure-bf16 also stores parameters and moments in bf16",
        _choice("--precision", Precision),
        shorthands={"--fp16": "fp16", "--bf16": "bf16"}, choices=tuple(Precision), offer="bf16", title="Precision",
        is_beside_engines=True, is_graded=True, searched=("keep", "bf16"),
        names={"pure-bf16": "pure bf16"},
    ),
    PlanField(
        "optimizer", "--optim", "|".join(OptimizerChoice),
        "convert the live optimizer with its moments; --adam8bit needs 2.03 instead of 8 bytes per parameter",
        _choice("--optim", OptimizerChoice),
        shorthands={"--adam8bit": "adam8bit"}, choices=tuple(OptimizerChoice), offer="adam8bit", title="Optimizer",
        alike=EIGHT_BIT, searched=("keep", "adam8bit"), untrained="no optimizer runs",
        names={
            "adam8bit": "8-bit Adam", "paged-adam8bit": "paged 8-bit Adam", "adamw": "AdamW", "adafactor": "Adafactor",
            "lion8bit": "8-bit Lion", "sgd": "SGD", "muon": "Muon",
        },
    ),
    PlanField(
        "offload", "--offload", "WHAT[:host|:disk][,WHAT…]",
        "move optimizer state, activations, the parameters of blocks or frozen models and parts off the device between uses "
        "(WHAT: optimizer, activations, params, frozen)",
        _parse_offload, write=_offload_text,
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
    ),
    PlanField(
        "loss", "--loss", "keep|chunked",
        "compute the cross-entropy over a large vocabulary in tiles, without the full logits",
        _choice("--loss", Loss),
        shorthands={"--chunk-loss": "chunked"}, choices=tuple(Loss), offer="chunked", title="Chunked loss",
        is_exact=True, is_of_calls=True, searched=tuple(Loss), untrained="the tiles save what a backward pass needs",
    ),
    PlanField(
        "gradients", "--gradients", "keep|release",
        "update each parameter inside the backward pass, as soon as its gradient is complete, and free the gradient",
        _choice("--gradients", Gradients),
        shorthands={"--release-grads": "release"}, choices=tuple(Gradients), offer="release",
        title="Gradient release", names={"release": "as soon as used"}, is_exact=True, untrained="there are none",
    ),
    PlanField(
        "padding", "--padding", "keep|packed",
        "run the rows of a padded batch one after another, without their padding; outputs come back in the batch's shape",
        _choice("--padding", Padding),
        shorthands={"--pack": "packed"}, choices=tuple(Padding), offer="packed", title="Packed batches",
        names={"packed": "without padding"}, is_exact=True, is_of_calls=True,
        untrained="calls without gradients keep their padding",
    ),
    PlanField(
        "tiling", "--tile", "N",
        "compute large linear layers in N tiles: feed-forward parts over rows, each tile run again in the backward pass; "
        "others over output features, under autocast",
        _count("--tile", "tiles"),
        choices=_COUNTS, offer="4", title="Tiled layers", is_exact=True, is_of_calls=True, is_graded=True,
        covers=operator.ge, untrained="the tiles save what a backward pass needs",
        names={"2": "2 tiles", "4": "4 tiles", "8": "8 tiles", "16": "16 tiles"},
    ),
    PlanField(
        "adapters", "--lora", "[r=RANK,alpha=NUMBER,dora,targets=NAME,NAME…|off:keep|off:merge|off:drop]",
        "freeze the weights and train low-rank adapters beside linear layers, by peft; when it goes off, what was learnt is kept "
        "beside the model (off), added to the weights (off:merge) or dropped (off:drop)",
        Adapters, bare="r=16,alpha=32",
        choices=("off", "r=16,alpha=32", "r=64,alpha=128", "r=16,alpha=32,dora", "off:merge", "off:drop"),
        offer="r=16,alpha=32", title="Adapters (LoRA)", needs_optimizer=True, untrained="nothing learns",
        names={
            "r=16,alpha=32": "LoRA, rank 16", "r=64,alpha=128": "LoRA, rank 64",
            "r=16,alpha=32,dora": "DoRA, rank 16", "off:merge": "off, merged into the weights", "off:drop": "off, dropped",
        },
    ),
    PlanField(
        "base", "--base", "|".join(BaseBits),
        "with --lora, keep the frozen weights of linear layers in fewer bits, and their own bits off the device until the undo",
        _choice("--base", BaseBits),
        choices=tuple(BaseBits), offer="nf4", title="Frozen weights", untrained="it goes with adapters, and nothing learns",
        names={"bf16": "16 bits", "int8": "8 bits", "nf4": "4 bits (NF4)"},
    ),
    PlanField(
        "scale", "--scale", "|".join(ScaleOut),
        "train under PyTorch's FSDP2 or DeepSpeed's ZeRO, in this process; with --nproc in several",
        _parse_scale,
        choices=tuple(ScaleOut), offer="fsdp2", title="Engine",
        names={"fsdp2": "FSDP2", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}, is_predicted=False,
    ),
)  # fmt: skip
BY_NAME = {spec.name: spec for spec in FIELDS}
BY_FLAG = {flag: spec for spec in FIELDS for flag in (spec.flag, *spec.shorthands)}


def plan_flags() -> tuple[str, ...]:
    """Every flag a plan understands, long forms and shorthands."""
    return tuple(BY_FLAG)


def unknown_flag(word: str, also: tuple[str, ...] = ()) -> PlanError:
    """The error for a word that is no flag, naming the nearest flag."""
    allowed = [*plan_flags(), *also]
    return PlanError(f"unknown flag {word}{did_you_mean(word, allowed)}; flags are {', '.join(allowed)}")
