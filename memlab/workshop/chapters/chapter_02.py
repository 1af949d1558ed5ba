"""Gradient accumulation."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 4,
        "Four micro-batches of 16 rows are a batch of 64.",
        "How many times does 16 go into 64?",
        "64 / 16 = 4, so --accumulate 4",
        wrong=(16, 64),
    ),
    function(
        "q2", (((0.9, 30, 1.5, 10), 1.05), ((2.0, 5, 4.0, 15), 3.5), ((1.0, 8, 3.0, 8), 2.0)),
        "A part with three times the targets counts three times.",
        "The loss of the whole batch is the sum over all targets, divided by how many there are. What is the sum over the targets of one part?",
        "def whole_loss(loss_a, targets_a, loss_b, targets_b):\n"
        "    return (loss_a * targets_a + loss_b * targets_b) / (targets_a + targets_b)",
        right=(lambda a, n, b, m: a * n / (n + m) + b * m / (n + m),),
        wrong=(lambda a, _n, b, _m: (a + b) / 2, lambda a, n, b, m: a * n + b * m),
    ),
    choice(
        "q3", "ABCD", "C",
        "The gradients of the parts are added up in one place, which has to stay between them.",
        "One of them is added to from the first part to the last.",
        "C: gradients: the sum has to be kept from one part to the next, and it is as large as the model",
    ),
    number(
        "q4", 250,
        "The scheduler goes with the optimizer: once for each step, which is once for four batches.",
        "How often does optimizer.step() run?",
        "1000 batches / 4 batches for each step = 250",
        wrong=(1000, 4000),
    ),
)  # fmt: skip
