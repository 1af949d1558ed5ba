"""`SAVINGS`: the ways in which a plan can need less memory, what each usually costs, and the next stronger setting.

Their order is that in which they are tried where memory runs out (`memlab.rescue.fallback`). Ablations measure them in the
order of cost; a search that has no predicted times goes by the same costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memlab.errors import PlanError
from memlab.plan.fields import BY_NAME
from memlab.plan.plan import Plan
from memlab.plan.settings import EIGHT_BIT, Checkpointing, Loss, Offloaded, OptimizerChoice, Precision, Tier
from memlab.units import exact_size

_USUAL_TILES = 4
_RECOMPUTING = {"off": 1.0, "selective": 1.1, "every": 1.15, "budget": 1.15, "full": 1.3}
_HALF = {Precision.FP16: 0.6, Precision.BF16: 0.6, Precision.PURE_BF16: 0.65}


@dataclass(frozen=True)
class Saving:
    """One way to need less memory. Each thing that can be offloaded is one of its own."""

    field: str  # of the plan
    # what a change does, from the value before, the one after and the rows of a batch
    words: Callable[[Any, Any, int], str]
    # usual time of a step under a value, relative to one without: an order, not a prediction
    cost: Callable[[Any], float]
    # the next stronger value, for a batch of so many rows and a device of this 16-bit format; the same value where
    # there is none. None for what is never tried unless somebody asks for it
    stronger: Callable[[Any, int, Precision], Any] | None = None
    measured: tuple[str, ...] = ()  # values that an ablation measures
    what: Offloaded | None = None  # of what is offloaded, the part that it is about
    is_in_update: bool = False  # whether it lowers what the optimizer's update needs
    is_of_optimizer: bool = False  # whether it needs an optimizer
    is_in_evaluation: bool = False  # whether it lowers what calls without gradients need

    def of(self, plan: Plan) -> Any:
        """Return its value in a plan."""
        return getattr(plan, self.field) if self.what is None else plan.tier_of(self.what)

    def raised(self, plan: Plan, rows: int, half: Precision) -> Plan | None:
        """The plan with the next stronger setting; None where there is none, or where the others exclude it."""
        if self.stronger is None or (value := self.stronger(self.of(plan), rows, half)) == self.of(plan):
            return None
        change: Any = value if self.what is None else (*plan.offload, (self.what, value))
        try:
            return replace(plan, **{self.field: change})
        except PlanError:
            return None


def _off_device(what: Offloaded, words: str, cost: float, **facts: bool) -> Saving:
    costs, stronger = lambda tier: cost if tier else 1.0, lambda tier, _rows, _half: tier or Tier.AUTO
    return Saving("offload", lambda *_: words, costs, stronger, (what,), what, is_in_evaluation=True, **facts)


def _rows_at_a_time(before: int, after: int, rows: int) -> str:
    if after >= rows:
        return "one row at a time"
    if (before, after) == (1, 2):
        return "half the rows at a time"
    return f"at most {math.ceil(rows / after)} rows at a time"


def _recomputed(_before: Checkpointing, after: Checkpointing, _rows: int) -> str:
    if after.kind == "every":
        return f"activations of one block in {after.every} recomputed in the backward pass"
    if after.budget_bytes is not None:
        return f"activations of blocks recomputed in the backward pass until {exact_size(after.budget_bytes)} hold the rest"
    which = "of every block" if after == "full" else "but for matrix products and attention"
    return f"activations {which} recomputed in the backward pass"


def _moments(before: OptimizerChoice, after: OptimizerChoice, _rows: int) -> str:
    if before in EIGHT_BIT:
        return "the optimizer's 8-bit moments paged to the host"
    return "the optimizer's moments in 8 bits" + (", paged to the host" if after is EIGHT_BIT[-1] else "")


# Of what frees bytes of the passes: micro-batches first, since a plan that fails does so in the first of them; the loss in
# tiles on top of them, for not every model has it; tiles run feed-forward parts once more where all is recomputed.
# Optimizer state off the device frees nothing of the pass itself.
SAVINGS: tuple[Saving, ...] = (
    Saving(
        "accumulation", _rows_at_a_time, lambda n: 1.03 ** math.log2(n),
        lambda n, rows, _half: max(n, min(2 * n, rows)), measured=("4",),
    ),
    Saving(
        "loss", lambda *_: "the loss in tiles, without the full logits", lambda loss: 1.02 if loss is Loss.CHUNKED else 1.0,
        lambda *_: Loss.CHUNKED, measured=("chunked",),
    ),
    Saving(
        "checkpointing", _recomputed, lambda value: _RECOMPUTING[value.kind], lambda *_: Checkpointing("full"),
        measured=("selective", "full"),
    ),
    Saving(
        "tiling", lambda _before, n, _rows: f"feed-forward parts in {n} tiles", lambda n: 1.2 if n > 1 else 1.0,
        lambda n, _rows, _half: max(n, _USUAL_TILES), measured=(str(_USUAL_TILES),),
    ),
    # next to no time, but it asks most of the loop: nothing between backward and step, and no rescue of a backward pass
    Saving(
        "gradients", lambda *_: "gradients freed as soon as they are used", lambda value: 1.3 if value == "release" else 1.0,
        measured=("release",),
    ),
    _off_device(Offloaded.ACTIVATIONS, "activations off the device until the backward pass", 1.4),
    _off_device(Offloaded.OPTIMIZER, "optimizer state off the device between updates", 1.3,
                is_in_update=True, is_of_optimizer=True),
    _off_device(Offloaded.PARAMS, "parameters of blocks off the device between uses", 1.6, is_in_update=True),
    # never tried: what is frozen is mostly beside the model, and only the loop knows when it is used
    replace(
        _off_device(Offloaded.FROZEN, "frozen models and parts off the device between uses", 1.2),
        stronger=None, measured=(),
    ),
    Saving(
        "optimizer", _moments, lambda choice: 1.02 if choice in EIGHT_BIT else 1.0,
        lambda choice, _rows, _half: {OptimizerChoice.KEEP: EIGHT_BIT[0], EIGHT_BIT[0]: EIGHT_BIT[1]}.get(choice, choice),
        measured=("adam8bit",), is_in_update=True, is_of_optimizer=True,
    ),
    Saving(
        "precision", lambda _before, after, _rows: f"forward and backward pass in {after}",
        lambda value: _HALF.get(value, 1.0), lambda value, _rows, half: half if value is Precision.KEEP else value,
        measured=("bf16",),
    ),
)  # fmt: skip


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
    plans = [Plan().with_setting(saving.field, text) for saving in SAVINGS for text in saving.measured]
    lossy = [plan for plan in plans if not plan.is_exact]
    return sorted((plan for plan in plans if plan.is_exact), key=usual_cost) + lossy


def more_micro_batches(plan: Plan, rows: int | None = None) -> str:
    """Return the flag of the next higher number of micro-batches; empty where a batch has no more rows.

    Example:
        >>> more_micro_batches(Plan.parse("--accumulate 4")), more_micro_batches(Plan(), rows=1)
        ('--accumulate 8', '')
    """
    spec, saving = BY_NAME["accumulation"], SAVINGS[0]
    more = saving.raised(plan, rows or 2 * plan.accumulation, Precision.KEEP)
    return spec.show(more.accumulation) if more is not None else ""
