"""The engines by name. DeepSpeed is imported when an engine of its own starts."""

from __future__ import annotations

from memlab.plan import Plan, ScaleOut
from memlab.plan.scale import Scale
from memlab.runtime.workload import Workload
from memlab.scaleout.engines.base import Ddp, Engine
from memlab.scaleout.engines.fsdp2 import Fsdp2, LiveFsdp2
from memlab.scaleout.engines.live_zero import LiveZero
from memlab.scaleout.engines.tp import Tp
from memlab.scaleout.engines.zero import Zero
from memlab.scaleout.in_process import InProcessEngine

# all stages of ZeRO are one
_ENGINES: dict[str, type[Engine]] = {"ddp": Ddp, "fsdp2": Fsdp2, "tp": Tp}


def engine_for(scale: Scale) -> type[Engine]:
    """Return the engine of a scale on one rank."""
    return _ENGINES.get(scale.engine, Zero)


def live_engine(plan: Plan, workload: Workload) -> InProcessEngine:
    """The engine of a plan in this process."""
    return LiveFsdp2(plan, workload) if plan.scale is ScaleOut.FSDP2 else LiveZero(plan, workload)
