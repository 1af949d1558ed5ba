"""The number format of the forward and backward pass."""

from __future__ import annotations

from enum import StrEnum

from memlab.plan.fields import PlanField, Saving, choice


class Precision(StrEnum):
    """Number format of the forward and backward pass."""

    KEEP = "keep"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    PURE_BF16 = "pure-bf16"


_TIME = {Precision.FP16: 0.6, Precision.BF16: 0.6, Precision.PURE_BF16: 0.65}
PRECISION = PlanField(
    "precision", "--precision", "|".join(Precision),
    "number format of forward and backward; fp16 comes with dynamic loss scaling, pure-bf16 also stores parameters and moments in bf16",
    choice("--precision", Precision),
    shorthands={"--fp16": "fp16", "--bf16": "bf16"}, choices=tuple(Precision), offer="bf16", title="Precision",
    is_beside_engines=True, is_graded=True, searched=("keep", "bf16"),
    names={"pure-bf16": "pure bf16"},
)  # fmt: skip
SAVING = Saving(
    PRECISION, lambda _before, after, _rows: f"forward and backward pass in {after}",
    lambda value: _TIME.get(value, 1.0), lambda value, _rows, half: half if value is Precision.KEEP else value,
    measured=("bf16",),
)  # fmt: skip
