"""Large linear layers in tiles."""

from __future__ import annotations

import operator

from memlab.plan.fields import PlanField, Saving, count
from memlab.plan.settings.accumulation import COUNTS

_USUAL = 4
TILING = PlanField(
    "tiling", "--tile", "N",
    "compute large linear layers in N tiles: feed-forward parts over rows, each tile run again in the backward pass; "
    "others over output features, under autocast",
    count("--tile", "tiles"),
    choices=COUNTS, offer="4", title="Tiled layers", is_exact=True, is_of_calls=True, is_graded=True,
    covers=operator.ge, untrained="the tiles save what a backward pass needs",
    names={"2": "2 tiles", "4": "4 tiles", "8": "8 tiles", "16": "16 tiles"},
)  # fmt: skip
SAVING = Saving(
    TILING, lambda _before, n, _rows: f"feed-forward parts in {n} tiles", lambda n: 1.2 if n > 1 else 1.0,
    lambda n, _rows, _half: max(n, _USUAL), measured=(str(_USUAL),),
)  # fmt: skip
