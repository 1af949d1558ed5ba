"""The techniques, one per file, and the list that decides their order.

Order matters twice: a forward runs through the list from the last to the first (accumulation splits
the batch before precision and the rest see it), and optimizer state is packed from the first to
the last (converted to 8 bit, then moved off the device).
What changes which parameters there are comes first. An engine stands alone.
"""

from __future__ import annotations

from memlab.plan import Plan
from memlab.techniques.accumulation.accumulation import Accumulation
from memlab.techniques.accumulation.batchnorm import MicroStatistics
from memlab.techniques.adapters.adapters import LowRankAdapters
from memlab.techniques.adapters.base_bits import QuantisedBase
from memlab.techniques.base import Technique
from memlab.techniques.checkpointing.checkpointing import ActivationCheckpointing
from memlab.techniques.chunked_loss import ChunkedLoss
from memlab.techniques.gradient_release.gradient_release import GradientRelease
from memlab.techniques.offload.activations import OffloadActivations
from memlab.techniques.offload.frozen import OffloadFrozen
from memlab.techniques.offload.optimizer_state import OffloadOptimizer
from memlab.techniques.offload.params import OffloadParams
from memlab.techniques.optimizer.optimizer import OptimizerConversion
from memlab.techniques.packing import Packing
from memlab.techniques.precision.precision import PrecisionChoice
from memlab.techniques.scale import Scaling
from memlab.techniques.tiling.tiling import Tiling

TECHNIQUES: tuple[type[Technique], ...] = (
    LowRankAdapters,
    QuantisedBase,
    Tiling,
    ActivationCheckpointing,
    ChunkedLoss,
    OptimizerConversion,
    PrecisionChoice,
    OffloadParams,
    OffloadFrozen,
    OffloadOptimizer,
    OffloadActivations,
    Accumulation,
    MicroStatistics,
    Packing,
    GradientRelease,
    Scaling,
)


def is_wanted(kind: type[Technique], plan: Plan) -> bool:
    """Return whether a plan puts a technique on the model: an engine is there alone, and sees to the rest of the plan itself."""
    return kind.wanted(plan) and (kind.traits.is_engine or not Scaling.wanted(plan))


__all__ = ["TECHNIQUES", "Technique", "is_wanted"]
