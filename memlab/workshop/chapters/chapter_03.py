"""Checkpointing."""

from __future__ import annotations

from math import ceil, sqrt

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 1 / 3,
        "One more forward pass, on three thirds of work: 4/3.",
        "Call the work of a forward pass 1. What is the step then, and what is added to it?",
        "forward 1 + backward 2 = 3; recomputation adds 1, and 1/3 = 0.33",
        within=0.02,
        wrong=(0.2, 1.33),
    ),
    function(
        "q2", (((100,), 10), ((64,), 8), ((50,), 8), ((1,), 1)),
        "Ten segments of ten layers: ten inputs to keep, and ten layers to recompute at a time.",
        "With k segments of n/k layers, k inputs are kept and one segment of n/k layers is recomputed at a time. Which k makes k + n/k smallest?",
        "def segments(layers):\n    return -int(-(layers**0.5) // 1)",
        right=(lambda layers: ceil(sqrt(layers)),),
        wrong=(lambda layers: layers, lambda layers: layers / 2),
    ),
    choice(
        "q3", "ABC", "B",
        "A mask that is drawn again belongs to another network than the one whose loss was computed.",
        "The recomputation has to give what the forward pass gave, number for number. Which of the three draws numbers?",
        "B: dropout. Its mask has to be drawn from the same random state again (preserve_rng_state=True, the default)",
    ),
    choice(
        "q4", "ABC", "A",
        "Nothing is kept of a block that is recomputed, but the logits belong to no block.",
        "Which of them is computed outside of the repeated blocks?",
        "A: the logits. --chunk-loss or --accumulate lower them",
    ),
)  # fmt: skip
