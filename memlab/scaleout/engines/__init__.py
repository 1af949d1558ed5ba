"""The engines by name; only the chosen one's library is imported."""

from __future__ import annotations

import importlib
from typing import cast

from memlab.plan.scale import Scale
from memlab.scaleout.engines.base import Engine

# module and class; all stages of ZeRO are one
_ENGINES = {"ddp": ("ddp", "Ddp"), "fsdp2": ("fsdp2", "Fsdp2"), "tp": ("tp", "Tp")}


def engine_for(scale: Scale) -> type[Engine]:
    """Return the engine of a scale on one rank."""
    module, name = _ENGINES.get(scale.engine, ("zero", "Zero"))
    return cast("type[Engine]", getattr(importlib.import_module(f"{__name__}.{module}"), name))
