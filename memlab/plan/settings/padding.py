"""Whether the padding of a batch is computed."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from memlab.plan.fields import PlanField, choice

if TYPE_CHECKING:
    from memlab.plan.plan import Plan


class Padding(StrEnum):
    """What happens to the padding of a batch."""

    KEEP = "keep"
    PACKED = "packed"


def _conflicts(plan: Plan) -> Iterator[str]:
    if plan.padding is Padding.PACKED and plan.accumulation > 1:
        yield "--pack and --accumulate exclude each other: the rows of a packed batch stand in one row, which is not split; drop one of the two, or accumulate in the loop"


PADDING = PlanField(
    "padding", "--padding", "keep|packed",
    "run the rows of a padded batch one after another, without their padding; outputs come back in the batch's shape",
    choice("--padding", Padding),
    shorthands={"--pack": "packed"}, choices=tuple(Padding), offer="packed", title="Packed batches",
    names={"packed": "without padding"}, is_exact=True, is_of_calls=True,
    untrained="calls without gradients keep their padding",
    conflicts=_conflicts,
)  # fmt: skip
