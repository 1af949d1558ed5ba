"""Inference."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 128,
        "131,072 bytes for each token, so 8,192 tokens are a GiB.",
        "2 × layers × key-value heads × head size × bytes of a number; the head size is 4096 / 32.",
        "2 * 32 * 8 * 128 * 2 / 1024 = 128",
        wrong=(512, 131072),
    ),
    function(
        "q2",
        (((24, 16, 1, 2), 4), ((40 * 2**30, 15 * 2**30, 2**17, 8192), 25), ((100, 10, 7, 4), 3)),
        "The weights are there once, the cache once for each row.",
        "What do the weights leave, and how much of it does one row take? Half a row is none.",
        "def rows_that_fit(budget, weights, bytes_per_token, tokens):\n"
        "    return (budget - weights) // (bytes_per_token * tokens)",
        right=(
            lambda budget, weights, each, tokens: (budget - weights) // (each * tokens),
            lambda budget, weights, each, tokens: int((budget - weights) / (each * tokens)),
        ),
        wrong=(
            lambda budget, _weights, each, tokens: budget // (each * tokens),
            lambda budget, weights, each, tokens: budget // (weights + each * tokens),
            lambda budget, weights, each, tokens: (budget - weights) / (each * tokens),
        ),
    ),
    choice(
        "q3", "ABC", "B",
        "A number has no graph. Better still is torch.no_grad(), under which no graph is made at all.",
        "What does a loss keep in memory that was computed with gradients on?",
        "B: output.loss.item(); the tensor kept the graph of its whole forward pass, and eval() does not switch that off",
    ),
    number(
        "q4", 15.625,
        "128,000 × 128 KiB: as much as the weights, for one user.",
        "You know what one token takes from q1.",
        "128_000 * 131_072 / 2**30 = 15.6",
        wrong=(8, 128, 62.5),
    ),
    choice(
        "q5", "ABC", "C",
        "Two bytes for each number in place of four; the other factors belong to the model and to the text.",
        "Look for a factor of the formula.",
        "C: bf16. Query heads are not in the formula, and logits are no keys",
    ),
)  # fmt: skip
