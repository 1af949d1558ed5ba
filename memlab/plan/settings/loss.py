"""Ways to compute a loss over a large vocabulary."""

from __future__ import annotations

from enum import StrEnum

from memlab.plan.fields import PlanField, Saving, choice


class Loss(StrEnum):
    """Ways to compute the cross-entropy over a large vocabulary."""

    KEEP = "keep"
    CHUNKED = "chunked"


LOSS = PlanField(
    "loss", "--loss", "keep|chunked",
    "compute the cross-entropy over a large vocabulary in tiles, without the full logits",
    choice("--loss", Loss),
    shorthands={"--chunk-loss": "chunked"}, choices=tuple(Loss), offer="chunked", title="Chunked loss",
    is_exact=True, is_of_calls=True, searched=tuple(Loss), untrained="the tiles save what a backward pass needs",
)  # fmt: skip
SAVING = Saving(
    LOSS, lambda *_: "the loss in tiles, without the full logits", lambda loss: 1.02 if loss is Loss.CHUNKED else 1.0,
    lambda *_: Loss.CHUNKED, measured=("chunked",),
)  # fmt: skip
