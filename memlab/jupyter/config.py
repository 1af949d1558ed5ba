"""`%config MemLab`: the defaults of the magics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traitlets import Bool, TraitError, Unicode, validate
from traitlets.config import Configurable

from memlab.errors import PlanError
from memlab.plan import Plan
from memlab.rescue.fallback import pinned
from memlab.units import parse_bytes


class MemLab(Configurable):
    """Defaults of `%%memfit` and `%memfit`."""

    capacity = Unicode(
        "",
        help="memory size to give the device, such as '4GiB'; empty for its own. Allocations beyond it raise an out-of-memory error.",
    ).tag(config=True)
    budget = Unicode(
        "", help="memory that the plan of %%memfit cells without flags must fit into, such as '8GiB'; empty for none"
    ).tag(config=True)
    predict = Bool(True, help="show in comparisons what was predicted for the plans measured").tag(config=True)
    predict_cells = Bool(
        False, help="predict the plans of a %%memfit cell before its receipt is shown, which takes a second or more"
    ).tag(config=True)
    quiet = Bool(False, help="show no progress while a cell trains").tag(config=True)
    rescue = Bool(True, help="change the plan of a %%memfit cell and go on when memory runs out").tag(config=True)
    keep = Unicode(
        "", help="settings that must stay as they are when memory runs out, such as 'precision,optimizer'"
    ).tag(config=True)
    plan = Unicode("", help="flags of %%memfit cells that give none, such as '--accumulate 4'").tag(config=True)
    free = Bool(
        True,
        help="release what functions hold when a cell ran out of memory or a %%memfit cell was interrupted; "
        "False keeps their variables for %debug, and their memory",
    ).tag(config=True)
    picture = Bool(True, help="put a PNG picture into receipts, for pages that show no HTML").tag(config=True)

    @property
    def capacity_bytes(self) -> int | None:
        """The capacity in bytes, or None for the device's own size."""
        return parse_bytes(self.capacity) if self.capacity else None

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes, or None for none."""
        return parse_bytes(self.budget) if self.budget else None

    @property
    def kept(self) -> frozenset[str]:
        """Names of the plan fields in `keep`."""
        return _fields(self.keep) if self.keep else frozenset()

    @validate("capacity", "budget", "plan", "keep")
    def _check(self, proposal: Any) -> str:
        text: str = proposal["value"]
        try:
            if text:
                _READ[proposal["trait"].name](text)
        except PlanError as error:
            raise TraitError(str(error)) from None
        return text


def _fields(names: str) -> frozenset[str]:
    return pinned(names.split(","))


_READ: dict[str, Callable[[str], Any]] = {
    "capacity": parse_bytes, "budget": parse_bytes, "plan": Plan.parse, "keep": _fields,
}  # fmt: skip
