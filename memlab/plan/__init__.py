"""Plans: what is applied to a training loop, as values without torch.

`plan` holds the frozen value and its conflicts, `settings` the values of settings, `fields` the table of flags, `savings` what to try next
and what it usually costs, `space` the plans worth trying.
"""

from __future__ import annotations

from memlab.plan.fields import FIELDS, PlanField, plan_flags, unknown_flag
from memlab.plan.plan import Plan
from memlab.plan.settings import (
    Adapters,
    BaseBits,
    BatchNorm,
    Checkpointing,
    Gradients,
    Loss,
    Offloaded,
    OptimizerChoice,
    Padding,
    Precision,
    ScaleOut,
    Tier,
)

__all__ = [
    "FIELDS",
    "Adapters",
    "BaseBits",
    "BatchNorm",
    "Checkpointing",
    "Gradients",
    "Loss",
    "Offloaded",
    "OptimizerChoice",
    "Padding",
    "Plan",
    "PlanField",
    "Precision",
    "ScaleOut",
    "Tier",
    "plan_flags",
    "unknown_flag",
]
