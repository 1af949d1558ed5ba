"""Beyond one GPU."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number


def _kept(parameters: float, stage: int, ranks: int) -> float:
    parts = ((2, 3), (2, 2), (12, 1))  # bytes, and the stage from which on they are divided
    return sum(parameters * size / (ranks if stage >= divided_from else 1) for size, divided_from in parts)


QUESTIONS = (
    function(
        "q1",
        (((7.5e9, 0, 64), 120e9), ((7.5e9, 1, 64), 31.40625e9), ((7.5e9, 2, 64), 16.640625e9), ((7.5e9, 3, 64), 1.875e9),
         ((1e9, 3, 1), 16e9)),
        "120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 GPUs: the figures of the ZeRO paper.",
        "Each stage divides one more of the three: first the 12 bytes, then the gradients, then the weights.",
        "def bytes_kept(parameters, stage, ranks):\n"
        "    optimizer = 12 / ranks if stage >= 1 else 12\n"
        "    gradients = 2 / ranks if stage >= 2 else 2\n"
        "    weights = 2 / ranks if stage >= 3 else 2\n"
        "    return parameters * (optimizer + gradients + weights)",
        right=(_kept,),
        wrong=(
            lambda parameters, _stage, ranks: 16 * parameters / ranks,
            lambda parameters, stage, ranks: parameters * (16 - 12 * (stage > 0)) + 0 * ranks,
            lambda parameters, stage, ranks: _kept(parameters, min(stage, 2), ranks),
        ),
    ),
    number(
        "q2", 700,
        "A reduce-scatter and an all-gather, each 7/8 of the gradient.",
        "An average is a reduce-scatter and an all-gather. In each of them a rank sends every part but one.",
        "2 * (8 - 1) / 8 * 400 = 700",
        within=0.005,
        wrong=(400, 800, 3200),
    ),
    choice(
        "q3", "ABC", "B",
        "It divides the moments and sends what DDP sends; ZeRO-3 would gather the weights once more.",
        "Which of the three divides moments, and which of those sends less?",
        "B: ZeRO-1. DDP keeps all moments on every rank; ZeRO-3 sends half as much more",
    ),
    choice(
        "q4", "ABCD", "D",
        "All three divide activations only by giving each rank other rows, and there is only one row.",
        "What do they do to the batch? Into how many parts can one row be cut?",
        "D: none. --checkpoint or --offload activations lower them, or parallelism along the sequence, which this course leaves out",
    ),
    choice(
        "q5", "ABC", "B",
        "It prints a whole program in plain PyTorch. DeepSpeed's configuration is for the ZeRO stages, and refuses fsdp2.",
        "%memfit export deepspeed --scale fsdp2 says what it can do.",
        "B: %memfit export fsdp2 --scale fsdp2; export accelerate writes the file for accelerate launch",
    ),
)  # fmt: skip
