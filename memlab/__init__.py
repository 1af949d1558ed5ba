"""memlab: make the training cell that ran out of memory fit, on the live model.

    %load_ext memlab

    %%memfit --accumulate 4 --checkpoint
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The same from a script:

    with memlab.fit(memlab.Workload(model, optimizer), "--accumulate 4 --checkpoint"):
        train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlab.errors import MemlabError, PlanError, RefusalError
from memlab.extras import imported, needing_torch
from memlab.plan import Plan
from memlab.plan.scale import ENGINE_MAKERS
from memlab.records.measurement import Shown

if TYPE_CHECKING:
    from memlab.building import build
    from memlab.exporting import export
    from memlab.inferring.inference import inference
    from memlab.jupyter.panel import panel
    from memlab.measuring.runs import compare, measure
    from memlab.predicting import predict, predict_all
    from memlab.runtime.workload import Workload
    from memlab.scaleout.launching import launch
    from memlab.scaleout.predicting import compare_ranks, how_many, predict_ranks
    from memlab.search import ablation, find_plan
    from memlab.session import fit
    from memlab.techniques.adapters.injected import save_adapters
    from memlab.techniques.scale import LiveEngine

    __version__: str

__all__ = [
    "MemlabError",
    "Plan",
    "PlanError",
    "RefusalError",
    "Workload",
    "ablation",
    "build",
    "compare",
    "compare_ranks",
    "export",
    "find_plan",
    "fit",
    "how_many",
    "inference",
    "launch",
    "measure",
    "panel",
    "predict",
    "predict_all",
    "predict_ranks",
    "save_adapters",
]


# where each name is, imported when it is first asked for: values, reports and replay need no torch
_PLACES = {
    "Workload": "memlab.runtime.workload",
    "ablation": "memlab.search",
    "build": "memlab.building",
    "compare": "memlab.measuring.runs",
    "compare_ranks": "memlab.scaleout.predicting",
    "export": "memlab.exporting",
    "find_plan": "memlab.search",
    "fit": "memlab.session",
    "how_many": "memlab.scaleout.predicting",
    "inference": "memlab.inferring.inference",
    "launch": "memlab.scaleout.launching",
    "measure": "memlab.measuring.runs",
    "panel": "memlab.jupyter.panel",
    "predict": "memlab.predicting",
    "predict_all": "memlab.predicting",
    "predict_ranks": "memlab.scaleout.predicting",
    "save_adapters": "memlab.techniques.adapters.injected",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _PLACES:
        raise AttributeError(f"module 'memlab' has no attribute {name!r}")
    with needing_torch(f"memlab.{name}"):
        return getattr(imported(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("memlab")
    except PackageNotFoundError:  # a source that was not installed
        return "0.1.0"


def _live_engine(plan: Plan, workload: Workload) -> LiveEngine:
    """The engine of a plan; imported when one is wanted, since what it needs of torch is slow to import."""
    from memlab.scaleout.engines import live_engine

    return live_engine(plan, workload)


def _reports() -> Any:
    """Return the module that shows records; imported when one is shown."""
    from memlab.report import showing

    return showing


ENGINE_MAKERS.append(_live_engine)
Shown.reports = staticmethod(_reports)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext memlab`: register the magics."""
    with needing_torch("%load_ext memlab"):
        from memlab.jupyter.magic import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext memlab`: undo every session the magics opened, and remove them."""
    from memlab.jupyter.magic import unload

    unload(shell)
