"""`SAVINGS`: the ways in which a plan can need less memory, in the order in which they are tried where memory runs out (`memlab.rescue.fallback`).

Ablations measure them in the order of cost; a search that has no predicted times goes by the same costs.
"""

from __future__ import annotations

import math

from memlab.plan.fields import Saving
from memlab.plan.plan import Plan
from memlab.plan.settings import accumulation, checkpointing, gradients, loss, offload, optimizer, precision, tiling
from memlab.plan.settings.precision import Precision

# Of what frees bytes of the passes: micro-batches first, since a plan that fails does so in the first of them; the loss in
# tiles on top of them, for not every model has it; tiles run feed-forward parts once more where all is recomputed.
# Optimizer state off the device frees nothing of the pass itself.
SAVINGS: tuple[Saving, ...] = (
    accumulation.SAVING,
    loss.SAVING,
    checkpointing.SAVING,
    tiling.SAVING,
    gradients.SAVING,
    offload.ACTIVATIONS_SAVING,
    offload.OPTIMIZER_SAVING,
    offload.PARAMS_SAVING,
    offload.FROZEN_SAVING,
    optimizer.SAVING,
    precision.SAVING,
)


def changed(before: Plan, after: Plan) -> list[Saving]:
    """Savings whose values two plans differ in."""
    return [saving for saving in SAVINGS if saving.of(before) != saving.of(after)]


def usual_cost(plan: Plan) -> float:
    """Return the usual time of a step under a plan, relative to one as written."""
    return math.prod(saving.cost(saving.of(plan)) for saving in SAVINGS)


def to_measure() -> list[Plan]:
    """Return the settings that an ablation adds: exact ones first, by usual cost, then those that change numerics.

    Of these, half precision is last although it gains time on a GPU: it changes more than 8-bit moments do.

    Example:
        >>> [str(plan) for plan in to_measure()][:3]
        ['--chunk-loss', '--accumulate 4', '--checkpoint selective']
    """
    plans = [Plan().with_setting(saving.field.name, text) for saving in SAVINGS for text in saving.measured]
    lossy = [plan for plan in plans if not plan.is_exact]
    return sorted((plan for plan in plans if plan.is_exact), key=usual_cost) + lossy


def more_micro_batches(plan: Plan, rows: int | None = None) -> str:
    """Return the flag of the next higher number of micro-batches; empty where a batch has no more rows.

    Example:
        >>> more_micro_batches(Plan.parse("--accumulate 4")), more_micro_batches(Plan(), rows=1)
        ('--accumulate 8', '')
    """
    more = accumulation.SAVING.raised(plan, rows or 2 * plan.accumulation, Precision.KEEP)
    return accumulation.ACCUMULATION.show(more.accumulation) if more is not None else ""
