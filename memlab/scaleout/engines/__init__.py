"""The engines by name; only the chosen one's library is imported."""

from __future__ import annotations

from memlab.plan.scale import Scale
from memlab.scaleout.engines.base import Engine


def engine_for(scale: Scale) -> type[Engine]:
    """Return the engine of a scale on one rank."""
    if scale.engine == "ddp":
        from memlab.scaleout.engines.ddp import Ddp

        return Ddp
    if scale.engine == "fsdp2":
        from memlab.scaleout.engines.fsdp2 import Fsdp2

        return Fsdp2
    if scale.engine == "tp":
        from memlab.scaleout.engines.tp import Tp

        return Tp
    from memlab.scaleout.engines.zero import Zero

    return Zero
