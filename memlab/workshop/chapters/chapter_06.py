"""Offload."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 8 / 12e9 * 24e12 / 6,
        "8 bytes a parameter each way at 12 GB/s, against 6 operations a parameter and token at 24 TFLOP/s. The parameters cancel.",
        "Write down both times for one parameter: 8 bytes each way over the link, and 6 operations for each token. Set them equal.",
        "8 / 12e9 = 6 * tokens / 24e12, so tokens = 8 / 12e9 * 24e12 / 6 = 2667",
        wrong=(333, 16000),
    ),
    function(
        "q2", (((1000,), 16_000), ((124_439_808,), 1_991_036_928), ((7_000_000_000,), 112_000_000_000)),
        "Two moments of four bytes, once in and once out.",
        "How many numbers does AdamW keep for a parameter, of how many bytes, and how often are they copied in a step?",
        "def over_the_link(parameters):\n    return parameters * 2 * 4 * 2",
        right=(lambda parameters: 16 * parameters,),
        wrong=(lambda parameters: 8 * parameters, lambda parameters: 4 * parameters),
    ),
    choice(
        "q3", "ABC", "B",
        "Move what is largest at the peak. Activations are freed by then, whatever the batch.",
        "Which of the three is still there when the update runs?",
        "B: --offload optimizer. In the update there are no activations, so A and C lower another peak",
    ),
    choice(
        "q4", "ABC", "C",
        "State moves once for each update, and there are four times as many samples in it.",
        "When is the state needed: in each backward pass, or in each update?",
        "C: a quarter. The same bytes for each update, shared by four times as many samples",
    ),
    choice(
        "q5", "ABC", "B",
        "With assign=True the values that were loaded become the parameters, and only the optimizer still holds the old ones.",
        "Which of them makes new Parameter objects, where the others write into those that are there?",
        "B: assign=True. Make the optimizer after it, or load without it",
    ),
)  # fmt: skip
