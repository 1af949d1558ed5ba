"""Optimizers that can update the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from memlab.plan.fields import PlanField, Saving, choice
from memlab.plan.settings.offload import Offloaded

if TYPE_CHECKING:
    from memlab.plan.plan import Plan


class OptimizerChoice(StrEnum):
    """Optimizers that can update the parameters, with the moments converted."""

    KEEP = "keep"
    ADAMW = "adamw"
    ADAM8BIT = "adam8bit"
    PAGED_ADAM8BIT = "paged-adam8bit"
    ADAMW4BIT = "adamw4bit"
    LION8BIT = "lion8bit"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    MUON = "muon"
    APOLLO = "apollo"


EIGHT_BIT = (OptimizerChoice.ADAM8BIT, OptimizerChoice.PAGED_ADAM8BIT)


def _moments(before: OptimizerChoice, after: OptimizerChoice, _rows: int) -> str:
    if before in EIGHT_BIT:
        return "the optimizer's 8-bit moments paged to the host"
    return "the optimizer's moments in 8 bits" + (", paged to the host" if after is EIGHT_BIT[-1] else "")


def _conflicts(plan: Plan) -> Iterator[str]:
    if plan.tier_of(Offloaded.OPTIMIZER) is None:
        return
    if plan.optimizer is OptimizerChoice.PAGED_ADAM8BIT:
        yield "--optim paged-adam8bit and --offload optimizer exclude each other: paged moments move to the host by themselves; drop one of the two"
    if plan.optimizer is OptimizerChoice.SGD:
        yield "--optim sgd and --offload optimizer exclude each other: SGD without momentum keeps no state to offload; drop one of the two"


OPTIMIZER = PlanField(
    "optimizer", "--optim", "|".join(OptimizerChoice),
    "convert the live optimizer with its moments; --adam8bit needs 2.03 instead of 8 bytes per parameter",
    choice("--optim", OptimizerChoice),
    shorthands={"--adam8bit": "adam8bit"}, choices=tuple(OptimizerChoice), offer="adam8bit", title="Optimizer",
    alike=EIGHT_BIT, searched=("keep", "adam8bit"), untrained="no optimizer runs",
    names={
        "adam8bit": "8-bit Adam", "paged-adam8bit": "paged 8-bit Adam", "adamw": "AdamW", "adafactor": "Adafactor",
        "adamw4bit": "4-bit AdamW", "lion8bit": "8-bit Lion", "sgd": "SGD", "muon": "Muon", "apollo": "APOLLO",
    },
    conflicts=_conflicts,
)  # fmt: skip
SAVING = Saving(
    OPTIMIZER, _moments, lambda choice: 1.02 if choice in EIGHT_BIT else 1.0,
    lambda choice, _rows, _half: {OptimizerChoice.KEEP: EIGHT_BIT[0], EIGHT_BIT[0]: EIGHT_BIT[1]}.get(choice, choice),
    measured=("adam8bit",), is_in_update=True, is_of_optimizer=True,
)  # fmt: skip
