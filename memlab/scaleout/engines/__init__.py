"""The engines by name; only the chosen one's library is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from memlab.plan.scale import Scale
from memlab.runtime.workload import Workload
from memlab.scaleout.engines.base import Engine


def engine_for(scale: Scale) -> Callable[[Workload, Path, torch.device], Engine]:
    """Return what makes the engine of a scale on one rank."""
    if scale.engine == "ddp":
        from memlab.scaleout.engines.ddp import Ddp

        return Ddp
    if scale.engine == "fsdp2":
        from memlab.scaleout.engines.fsdp2 import Fsdp2, OffloadedFsdp2

        return OffloadedFsdp2 if scale.plan.offload else Fsdp2
    if scale.engine == "tp":
        from memlab.scaleout.engines.tp import Tp

        return Tp
    from memlab.scaleout.engines.zero import zero_engine

    return zero_engine(int(scale.engine.removeprefix("zero")), scale.plan)
