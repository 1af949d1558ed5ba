"""The engines by name; only the chosen one's library is imported."""

from __future__ import annotations

from memlab.plan import Plan, ScaleOut
from memlab.plan.scale import Scale
from memlab.runtime.workload import Workload
from memlab.scaleout.engines.base import Ddp, Engine
from memlab.scaleout.in_process import InProcessEngine


def engine_for(scale: Scale) -> type[Engine]:
    """Return the engine of a scale on one rank; all stages of ZeRO are one."""
    if scale.engine == "ddp":
        return Ddp
    if scale.engine == "fsdp2":
        from memlab.scaleout.engines.fsdp2 import Fsdp2

        return Fsdp2
    if scale.engine == "tp":
        from memlab.scaleout.engines.tp import Tp

        return Tp
    from memlab.scaleout.engines.zero import Zero

    return Zero


def live_engine(plan: Plan, workload: Workload) -> InProcessEngine:
    """The engine of a plan in this process."""
    if plan.scale is ScaleOut.FSDP2:
        from memlab.scaleout.engines.fsdp2 import LiveFsdp2

        return LiveFsdp2(plan, workload)
    from memlab.scaleout.engines.live_zero import LiveZero

    return LiveZero(plan, workload)
