"""Lower precision."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 1.0,
        "bf16 has 8 bits for the fraction, so beside 1 the next number is 1.0078125.",
        "torch.finfo(torch.bfloat16).eps is the distance from 1 to the next number.",
        "1.0: a change of 0.003 is less than half of the distance to the next number, 0.0078",
        within=0.0,
        wrong=(1.003, 1.0078125),
    ),
    number(
        "q2", 8,
        "2 for the parameter, 2 for the gradient, 2 for each of two moments: half of fp32's 16.",
        "The same four numbers as in fp32, each in 16 bits.",
        "2 + 2 + 2 + 2 = 8. (pure-bf16 of memlab spends 2 more on what rounding cut off the weights, so that they return bit for bit)",
        wrong=(10, 12),
    ),
    choice(
        "q3", "ABC", "B",
        "fp16 has 5 bits of exponent where bf16 has the 8 of fp32: small gradients become zero.",
        "Which of the formats has another range than fp32?",
        "B: fp16, whose smallest number is 6e-8",
    ),
    function(
        "q4", (((2.0**16 * 0.5, 2.0**16), 0.5), ((3072.0, 1024.0), 3.0)),
        "The gradient of scale × loss is scale × gradient, and a limit of 1.0 is meant for the true one.",
        "The backward pass ran on scale × loss. What is every gradient multiplied by, then?",
        "def true_norm(norm, scale):\n    return norm / scale",
        right=(lambda norm, scale: norm / scale,),
        wrong=(lambda norm, _scale: norm, lambda norm, scale: norm * scale),
    ),
)  # fmt: skip
