"""Finding the plan."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 3.0,
        "Reserved less allocated is what the allocator holds and nobody uses: 3 GiB, if the pieces fit the requests.",
        "Which of the three numbers is what PyTorch holds already, and which is what tensors use of it?",
        "11.0 reserved - 8.0 allocated = 3.0; the other 0.5 GiB of the process are CUDA's context",
        wrong=(3.5, 0.5),
    ),
    function(
        "q2", (((1, 5), 8), ((4, 0), 12), ((500, 1300), 2800)),
        "The weights, two moments of the same size from the first step, and the activations. In the first step it was one of these three less.",
        "What did the first step leave behind that was not there in its own forward pass?",
        "def second_step(weights, activations):\n    return weights + 2 * weights + activations",
        right=(lambda weights, activations: 3 * weights + activations,),
        wrong=(lambda weights, activations: weights + activations, lambda weights, activations: 4 * weights + activations),
    ),
    choice(
        "q3", "ABC", "B",
        "The technique has to lower what is largest at the peak.",
        "Two of the three lower activations only.",
        "B: --adam8bit shrinks the moments to a quarter; --offload optimizer would remove them from the device",
    ),
    number(
        "q4", 4,
        "(8, 90) is better than (8, 80), and (6, 60), which is faster and needs less, is better than (7, 55).",
        "For each plan, look for another one that is at least as fast and needs no more. Where there is one, the plan is not on the front.",
        "4: (10, 100), (8, 90), (6, 60) and (4, 30)",
        within=0.0,
        wrong=(5, 6, 3),
    ),
    choice(
        "q5", "ABC", "C",
        "The peak of a run is that of its worst batch.",
        "What ends the run, when one batch of a thousand does not fit?",
        "C: the longest that can occur. Predictions and searches take its shape",
    ),
)  # fmt: skip
