"""The engines by name; only the chosen one's library is imported."""

from __future__ import annotations

import importlib
from typing import Any, cast

from memlab.plan import Plan
from memlab.plan.scale import Scale
from memlab.runtime.workload import Workload
from memlab.scaleout.engines.base import Engine
from memlab.scaleout.in_kernel import InKernel

# module and class; all stages of ZeRO are one
_ENGINES = {"ddp": ("base", "Ddp"), "fsdp2": ("fsdp2", "Fsdp2"), "tp": ("tp", "Tp")}
_LIVE = {"fsdp2": ("fsdp2", "LiveFsdp2")}


def engine_for(scale: Scale) -> type[Engine]:
    """Return the engine of a scale on one rank."""
    return cast("type[Engine]", _imported(*_ENGINES.get(scale.engine, ("zero", "Zero"))))


def live_engine(plan: Plan, workload: Workload) -> InKernel:
    """The engine of a plan in this process."""
    return cast("InKernel", _imported(*_LIVE.get(plan.scale, ("live_zero", "LiveZero")))(plan, workload))


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
