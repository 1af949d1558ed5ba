"""Low-rank adapters, and the bits of the frozen weights beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from memlab.errors import PlanError
from memlab.plan.fields import PlanField, choice, did_you_mean
from memlab.plan.settings.offload import Offloaded
from memlab.plan.settings.precision import Precision

if TYPE_CHECKING:
    from memlab.plan.plan import Plan


class Adapters(str):
    """Setting of low-rank adapters: the text of the flag, read once.

    Items are separated by commas. What follows ``targets=`` without a sign of equality is a further target.

    Example:
        >>> some = Adapters("dora,targets=q_proj,v_proj,r=8")
        >>> some, some.rank, some.alpha, some.targets, some.is_dora, some.is_on
        ('r=8,alpha=16,dora,targets=q_proj,v_proj', 8, 16.0, ('q_proj', 'v_proj'), True, True)
        >>> Adapters("on"), Adapters("off:keep"), Adapters("off:merge").is_on
        ('r=16,alpha=32', 'off', False)
    """

    __slots__ = ("alpha", "dropout", "is_dora", "is_on", "rank", "targets", "what_was_learnt")
    is_on: bool
    # when adapters leave: "keep" them beside the model, "merge" them into the weights, or "drop" them
    what_was_learnt: str
    rank: int
    alpha: float  # products of adapters are scaled by alpha / rank
    dropout: float
    is_dora: bool
    targets: tuple[str, ...]  # names of layers, or ends of names; empty for all linear layers but the output layer

    def __new__(cls, text: str) -> Self:
        kind, _, after = text.partition(":")
        if kind == "off" and after in ("", "keep", "merge", "drop"):
            self = super().__new__(cls, "off" if after in ("", "keep") else text)
            self.is_on, self.what_was_learnt = False, after or "keep"
            self.rank, self.alpha, self.dropout, self.is_dora, self.targets = 0, 0.0, 0.0, False, ()
            return self
        if kind == "off":
            raise PlanError(
                f"--lora {text}: what was learnt can be off:keep, off:merge or off:drop{did_you_mean(after, ['keep', 'merge', 'drop'])}"
            )
        given: dict[str, str] = {}
        targets: list[str] | None = None
        for item in () if text == "on" else [each.strip() for each in text.split(",")]:
            key, has_value, value = item.partition("=")
            if targets is not None and not has_value and item:
                targets.append(item)
                continue
            if key not in _ADAPTER_KEYS or bool(has_value) is (key == "dora") or (has_value and not value):
                raise PlanError(
                    f"--lora {text}: {item!r} is none of r=RANK, alpha=NUMBER, dropout=SHARE, dora and targets=NAME,NAME…, nor off, "
                    f"off:merge or off:drop{did_you_mean(key, [*_ADAPTER_KEYS])}"
                )
            if key in given:
                raise PlanError(f"--lora {text}: {key} is given twice; give it once")
            given[key] = value
            if key == "targets":
                targets = [value]
        rank, alpha, dropout = _rank_of(text, given), _alpha_of(text, given), _dropout_of(text, given)
        written = [f"r={rank}", f"alpha={alpha:g}"]
        written += [f"dropout={dropout:g}"] if dropout else []
        written += ["dora"] if "dora" in given else []
        written += [f"targets={','.join(targets)}"] if targets else []
        self = super().__new__(cls, ",".join(written))
        self.is_on, self.what_was_learnt = True, "keep"
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.is_dora, self.targets = "dora" in given, tuple(targets or ())
        return self


_ADAPTER_KEYS = ("r", "alpha", "dropout", "dora", "targets")
_USUAL_RANK = 16


def _rank_of(text: str, given: Mapping[str, str]) -> int:
    rank = given.get("r", str(_USUAL_RANK))
    if not rank.isdecimal() or int(rank) < 1:
        raise PlanError(f"--lora {text}: r={rank} is no rank; give a whole number, 1 or more, as in '--lora r=16'")
    return int(rank)


def _alpha_of(text: str, given: Mapping[str, str]) -> float:
    alpha = _number_of(given.get("alpha", str(2 * _rank_of(text, given))))
    if not 0 < alpha < math.inf:
        raise PlanError(
            f"--lora {text}: alpha={given['alpha']} scales nothing; give a number over 0, as in '--lora r=16,alpha=32'"
        )
    return alpha


def _dropout_of(text: str, given: Mapping[str, str]) -> float:
    dropout = _number_of(given.get("dropout", "0"))
    if not 0 <= dropout < 1:
        raise PlanError(
            f"--lora {text}: dropout={given['dropout']} is no share; give a number from 0 up to 1, as in '--lora dropout=0.05'"
        )
    return dropout


def _number_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class BaseBits(StrEnum):
    """Formats of frozen weights beside adapters."""

    KEEP = "keep"
    BF16 = "bf16"
    INT8 = "int8"
    NF4 = "nf4"


def _conflicts(plan: Plan) -> Iterator[str]:
    if plan.base is BaseBits.KEEP:
        return
    if not plan.adapters.is_on:
        yield "--base is about frozen weights beside adapters, and there are none; add --lora"
    if plan.adapters.is_dora:
        yield "--base and --lora dora exclude each other: DoRA takes the norm of the weights in every call; drop dora or --base"
    if plan.tier_of(Offloaded.PARAMS):
        yield "--base and --offload params exclude each other: the weights are off the device already, in fewer bits on it; drop one of the two"
    if plan.precision is Precision.PURE_BF16:
        yield "--base and --precision pure-bf16 exclude each other: both keep the weights in other bits; use --bf16 with --base"
    if plan.tiling > 1:
        yield "--base and --tile exclude each other: tiles read the weights of layers, which are off the device; drop one of the two"


ADAPTERS = PlanField(
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
)  # fmt: skip
BASE = PlanField(
    "base", "--base", "|".join(BaseBits),
    "with --lora, keep the frozen weights of linear layers in fewer bits, and their own bits off the device until the undo",
    choice("--base", BaseBits),
    choices=tuple(BaseBits), offer="nf4", title="Frozen weights", untrained="it goes with adapters, and nothing learns",
    names={"bf16": "16 bits", "int8": "8 bits", "nf4": "4 bits (NF4)"},
    conflicts=_conflicts,
)  # fmt: skip
