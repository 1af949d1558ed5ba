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

from typing import Any

from memlab.building import build
from memlab.errors import MemlabError, PlanError, RefusalError
from memlab.exporting import export
from memlab.inferring.inference import inference
from memlab.measuring.runs import compare, measure
from memlab.plan import Plan
from memlab.predicting import compare_ranks, how_many, predict, predict_all, predict_ranks
from memlab.search import find_plan, ladder
from memlab.session import fit
from memlab.techniques.scale import LiveEngine, Scaling
from memlab.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "MemlabError",
    "Plan",
    "PlanError",
    "RefusalError",
    "Workload",
    "build",
    "compare",
    "compare_ranks",
    "export",
    "find_plan",
    "fit",
    "how_many",
    "inference",
    "ladder",
    "launch",
    "measure",
    "panel",
    "predict",
    "predict_all",
    "predict_ranks",
]


def panel(workload: Workload, *, budget: str = "", capacity: str = "") -> Any:
    """The panel on a live model, see `memlab.jupyter.panels.panel`."""
    from memlab.jupyter.panels import panel as made

    return made(workload, budget=budget, capacity=capacity)


def launch(train: Any, workload: Workload, plan: str, **options: Any) -> Any:
    """Train in many processes and bring the results back, see `memlab.scaleout.launching.launch`."""
    from memlab.scaleout.launching import launch as launched

    return launched(train, workload, plan, **options)


def _live_engine(plan: Plan, workload: Workload) -> LiveEngine:
    """The engine of a plan; imported when one is wanted, since what it needs of torch is slow to import."""
    from memlab.scaleout.in_kernel import live_engine

    return live_engine(plan, workload)


Scaling.makers.append(_live_engine)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext memlab`: register the magics."""
    from memlab.jupyter.magic import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext memlab`: undo every session the magics opened, and remove them."""
    from memlab.jupyter.magic import unload

    unload(shell)
