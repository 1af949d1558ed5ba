"""How long gradients are kept."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from memlab.plan.fields import PlanField, Saving, choice
from memlab.plan.settings.precision import Precision

if TYPE_CHECKING:
    from memlab.plan.plan import Plan


class Gradients(StrEnum):
    """Lifetimes of gradients."""

    KEEP = "keep"
    RELEASE = "release"


def _conflicts(plan: Plan) -> Iterator[str]:
    if plan.gradients is Gradients.RELEASE and plan.precision is Precision.FP16:
        yield (
            "--release-grads and --fp16 exclude each other: fp16 updates only when no gradient overflowed, and the last one is known "
            "at the end of the backward pass; use --bf16 with --release-grads"
        )


GRADIENTS = PlanField(
    "gradients", "--gradients", "keep|release",
    "update each parameter inside the backward pass, as soon as its gradient is complete, and free the gradient",
    choice("--gradients", Gradients),
    shorthands={"--release-grads": "release"}, choices=tuple(Gradients), offer="release",
    title="Gradient release", names={"release": "as soon as used"}, is_exact=True, untrained="there are none",
    conflicts=_conflicts,
)  # fmt: skip
# next to no time, but it asks most of the loop: nothing between backward and step, and no rescue of a backward pass
SAVING = Saving(
    GRADIENTS, lambda *_: "gradients freed as soon as they are used", lambda value: 1.3 if value == "release" else 1.0,
    measured=("release",),
)  # fmt: skip
