"""Values that the settings of a plan can have."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from memlab.errors import PlanError
from memlab.units import exact_size, parse_bytes


class BatchNorm(StrEnum):
    """Over which rows BatchNorm takes its statistics when a batch is split."""

    KEEP = "keep"
    MICRO = "micro"


# operators of `torch.ops.aten` whose results `--checkpoint selective` keeps: the costliest to compute again
SELECTIVE_KEEPS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


class Checkpointing(str):
    """Setting of recomputation in the backward pass: the text of the flag, read once.

    Example:
        >>> half, some = Checkpointing("every:2"), Checkpointing("budget:1.5KiB")
        >>> half.kind, half.every, some, some.budget_bytes, half == "every:2"
        ('every', 2, 'budget:1536B', 1536, True)
    """

    __slots__ = ("budget_bytes", "every", "kind")
    kind: str  # "off", "full", "every", "selective" or "budget"
    every: int  # of blocks that are chosen by number, one in how many is recomputed
    # what recomputed blocks may keep of each (micro-)batch between forward and backward; None without such a budget
    budget_bytes: int | None

    def __new__(cls, text: str) -> Self:
        kind, _, amount = text.partition(":")
        every, budget_bytes = 1, None
        if kind == "every" and amount.isdecimal() and int(amount) >= 1:
            every = int(amount)
            text = f"every:{every}"
        elif kind == "budget" and amount:
            budget_bytes = parse_bytes(amount)
            text = f"budget:{exact_size(budget_bytes)}"
        elif text not in ("off", "full", "selective"):
            raise PlanError(
                f"--checkpoint {text}: allowed are off, full, selective, every:N with N ≥ 1, as in '--checkpoint every:2', "
                "and budget:SIZE, as in '--checkpoint budget:2GiB'"
            )
        self = super().__new__(cls, text)
        self.kind, self.every, self.budget_bytes = kind, every, budget_bytes
        return self

    def covers(self, other: Checkpointing) -> bool:
        """Return whether everything is recomputed that another setting recomputes."""
        if self in (other, "full") or other == "off":
            return True
        return (
            self.budget_bytes is not None and other.budget_bytes is not None and self.budget_bytes <= other.budget_bytes
        )


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


class Precision(StrEnum):
    """Number format of the forward and backward pass."""

    KEEP = "keep"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    PURE_BF16 = "pure-bf16"


class OptimizerChoice(StrEnum):
    """Optimizers that can update the parameters, with the moments converted."""

    KEEP = "keep"
    ADAMW = "adamw"
    ADAM8BIT = "adam8bit"
    PAGED_ADAM8BIT = "paged-adam8bit"
    LION8BIT = "lion8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    MUON = "muon"


class Loss(StrEnum):
    """Ways to compute the cross-entropy over a large vocabulary."""

    KEEP = "keep"
    CHUNKED = "chunked"


class Padding(StrEnum):
    """What happens to the padding of a batch."""

    KEEP = "keep"
    PACKED = "packed"


class Gradients(StrEnum):
    """Lifetimes of gradients."""

    KEEP = "keep"
    RELEASE = "release"


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
Offload = tuple[tuple[Offloaded, Tier], ...]
EIGHT_BIT = (OptimizerChoice.ADAM8BIT, OptimizerChoice.PAGED_ADAM8BIT)


def zero_stage(engine: str) -> int:
    """Return the stage of DeepSpeed's ZeRO that an engine is; 0 for the others."""
    return int(engine.removeprefix("zero")) if engine.startswith("zero") else 0


def did_you_mean(given: str, allowed: list[str]) -> str:
    """Return the end of an error that names the closest allowed word; empty where none is close."""
    close = difflib.get_close_matches(given, allowed, n=1)
    return f"; did you mean {close[0]}?" if close else ""
