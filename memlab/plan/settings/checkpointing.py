"""What is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from memlab.errors import PlanError
from memlab.plan.fields import PlanField, Saving
from memlab.plan.settings.offload import Offloaded
from memlab.units import exact_size, parse_bytes

if TYPE_CHECKING:
    from memlab.plan.plan import Plan

# operators of `torch.ops.aten` whose results `--checkpoint selective` keeps: the costliest to compute again
SELECTIVE_KEEPS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


class Checkpointing(str):
    """Setting of recomputation in the backward pass: the text of the flag, read once.

    Example:
        >>> half, some = Checkpointing("every:2"), Checkpointing("budget:1.5KiB")
        >>> half.kind, half.every, some, some.budget_bytes, half == "every:2"
        ('every', 2, 'budget:1536B', 1536, True)
    """

    __slots__ = ("budget_bytes", "every", "kind")
    kind: str  # "off", "full", "every", "selective" or "budget"
    every: int  # of blocks that are chosen by number, one in how many is recomputed
    # what recomputed blocks may keep of each (micro-)batch between forward and backward; None without such a budget
    budget_bytes: int | None

    def __new__(cls, text: str) -> Self:
        kind, _, amount = text.partition(":")
        every, budget_bytes = 1, None
        if kind == "every" and amount.isdecimal() and int(amount) >= 1:
            every = int(amount)
            text = f"every:{every}"
        elif kind == "budget" and amount:
            budget_bytes = parse_bytes(amount)
            text = f"budget:{exact_size(budget_bytes)}"
        elif text not in ("off", "full", "selective"):
            raise PlanError(
                f"--checkpoint {text}: allowed are off, full, selective, every:N with N ≥ 1, as in '--checkpoint every:2', "
                "and budget:SIZE, as in '--checkpoint budget:2GiB'"
            )
        self = super().__new__(cls, text)
        self.kind, self.every, self.budget_bytes = kind, every, budget_bytes
        return self

    def covers(self, other: Checkpointing) -> bool:
        """Return whether everything is recomputed that another setting recomputes."""
        if self in (other, "full") or other == "off":
            return True
        return (
            self.budget_bytes is not None and other.budget_bytes is not None and self.budget_bytes <= other.budget_bytes
        )


def _recomputed(_before: Checkpointing, after: Checkpointing, _rows: int) -> str:
    if after.kind == "every":
        return f"activations of one block in {after.every} recomputed in the backward pass"
    if after.budget_bytes is not None:
        return f"activations of blocks recomputed in the backward pass until {exact_size(after.budget_bytes)} hold the rest"
    which = "of every block" if after == "full" else "but for matrix products and attention"
    return f"activations {which} recomputed in the backward pass"


def _conflicts(plan: Plan) -> Iterator[str]:
    if plan.checkpointing.budget_bytes is not None and plan.tier_of(Offloaded.ACTIVATIONS):
        yield "--checkpoint budget and --offload activations exclude each other: offloaded activations use nothing of the budget; drop one of the two"


_TIME = {"off": 1.0, "selective": 1.1, "every": 1.15, "budget": 1.15, "full": 1.3}
CHECKPOINTING = PlanField(
    "checkpointing", "--checkpoint", "[off|full|every:N|selective|budget:SIZE]",
    "recompute activations in the backward pass: of every block, of one block in N, all but matrix products and attention, "
    "or of as few blocks as possible so that what blocks keep between forward and backward fits into SIZE, as in budget:2GiB",
    Checkpointing, bare="full",
    choices=("off", "full", "every:2", "selective"), offer="full", title="Checkpointing", is_exact=True,
    is_of_calls=True, is_beside_engines=True, is_graded=True, covers=Checkpointing.covers,
    searched=("off", "selective", "full"), untrained="nothing is kept for a backward pass that could be recomputed",
    names={"full": "every block", "every:2": "every second block", "selective": "selective"},
    conflicts=_conflicts,
)  # fmt: skip
SAVING = Saving(
    CHECKPOINTING, _recomputed, lambda value: _TIME[value.kind], lambda *_: Checkpointing("full"),
    measured=("selective", "full"),
)  # fmt: skip
