"""Plans: what is applied to a training loop, as values without torch.

`plan` holds the frozen value, `settings` all that is known of each setting, `savings` in which order settings are tried, `space` the
plans worth trying.
"""

from __future__ import annotations

from memlab.plan.fields import PlanField
from memlab.plan.plan import FIELDS, Plan, plan_flags, unknown_flag
from memlab.plan.settings.accumulation import BatchNorm
from memlab.plan.settings.adapters import Adapters, BaseBits
from memlab.plan.settings.checkpointing import Checkpointing
from memlab.plan.settings.gradients import Gradients
from memlab.plan.settings.loss import Loss
from memlab.plan.settings.offload import Offloaded, Tier
from memlab.plan.settings.optimizer import OptimizerChoice
from memlab.plan.settings.padding import Padding
from memlab.plan.settings.precision import Precision
from memlab.plan.settings.scale import ScaleOut

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
