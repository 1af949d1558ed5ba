"""Exercises of chapter 01."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 16,
        "4 bytes for the parameter, 4 for its gradient, 8 for AdamW's two moments.",
        "At the moment of optimizer.step() four numbers exist for each parameter. How many bytes has a number in fp32?",
        "parameter 4 + gradient 4 + first moment 4 + second moment 4 = 16 bytes",
        wrong=(12, 18),
    ),
    function(
        "q2", (((64, 4, 32 * 32 * 3), 64 * 4 * 3072**2 * 4), ((64, 4, 64 * 64 * 3), 64 * 4 * 12288**2 * 4)),
        "9.7 GB for an image of 32 × 32 × 3 values, 154.6 GB for 64 × 64 × 3: four times the tokens, sixteen times the scores.",
        "Every head of every layer has one score for each pair of tokens, and a score takes 4 bytes.",
        "def attention_bytes(layers, heads, tokens):\n    return layers * heads * tokens**2 * 4",
        right=(lambda layers, heads, tokens: layers * heads * tokens * tokens * 4,),
        wrong=(
            lambda layers, heads, tokens: layers * heads * tokens * 4,
            lambda layers, _heads, tokens: layers * tokens**2 * 4,
            lambda layers, heads, tokens: layers * heads * tokens**2,
        ),
    ),
    choice(
        "q3", "ABCD", "C",
        "Activations are kept for every row; the other three depend on the model alone.",
        "Three of the four are as large as the model, and do not depend on the batch.",
        "C: the activations",
    ),
    choice(
        "q4", "ABC", "B",
        "The update makes moments of all parameters once, and they stay; in the first step they were not there yet when the backward pass peaked.",
        "Which of the parts of the bar does not exist before the first optimizer.step()?",
        "B: AdamW's moments are made in the first optimizer.step(), so only from the second step on they are there during the backward pass",
    ),
)  # fmt: skip
