"""Make it fit."""

from __future__ import annotations

from typing import Any

from memlab.plan import Offloaded, OptimizerChoice, Plan, Precision
from memlab.workshop.questions import Question, choice, number


def _fault_of_flags(given: Any) -> str | None:
    """Return what is wrong with the flags of a plan that is to lower activations and moments and keep every number's format."""
    if not isinstance(given, str):
        return f"{given!r} are no flags: write them as a text, such as '--accumulate 4'."
    plan = Plan.parse(given)
    offloaded = {what for what, _ in plan.offload}
    if plan.precision is not Precision.KEEP or plan.optimizer is not OptimizerChoice.KEEP:
        return "It changes number formats, or the algorithm."
    if plan.accumulation == 1 and plan.checkpointing == "off" and Offloaded.ACTIVATIONS not in offloaded:
        return "Nothing in it lowers the activations."
    if Offloaded.OPTIMIZER not in offloaded:
        return "Nothing in it lowers the optimizer state."
    return None


QUESTIONS = (
    choice(
        "q1", "ABC", "B",
        "Moments are 8 bytes for each parameter, and about 2 in 8 bits. The other two lower what grows with the batch.",
        "Optimizer state is what AdamW keeps for each parameter, whatever the batch is.",
        "B: --adam8bit, or --offload optimizer",
    ),
    Question(
        "q2", _fault_of_flags,
        "Smaller parts of the batch, recomputation or offload for the activations, and offloaded moments: the numbers stay the same.",
        "Three flags lower activations, each by itself. Of those that lower moments, --adam8bit changes their format; which one only moves them?",
        "--accumulate 4 --offload optimizer (or --checkpoint, or --offload activations,optimizer)",
        ("--accumulate 4 --offload optimizer", "--checkpoint --offload optimizer", "--offload activations,optimizer:disk"),
        ("--accumulate 4", "--offload optimizer", "--checkpoint --adam8bit", "--bf16 --offload optimizer,activations",
         "--checkpoint --optim sgd", "--accumulate none", 4),
    ),
    number(
        "q3", 12,
        "The optimizer is the same object under every plan, and so it goes on counting.",
        "Was a new optimizer made anywhere?",
        "9 + 3 = 12",
        within=0.0,
        wrong=(3, 9),
    ),
)  # fmt: skip
