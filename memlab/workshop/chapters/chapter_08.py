"""Keep going."""

from __future__ import annotations

from math import ceil

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 2600,
        "600 steps, and then 2,000 of half the size. A schedule made for 1,000 steps ended before the second start was half done.",
        "How many batches of half the size do 1,000 batches make? And what of the steps that were done before?",
        "600 + 2 * 1000 = 2600",
        within=0.0,
        wrong=(1400, 2000, 1000),
    ),
    choice(
        "q2", "ABC", "B",
        "The failed pass has drawn its dropout masks; continued from there, the second attempt would draw others.",
        "Which of the three does a forward pass change?",
        "B: the random state (and buffers, such as the statistics of BatchNorm). Weights and rates change in the update only",
    ),
    choice(
        "q3", "ABC", "B",
        "When the handler is over, the error goes, and with it its traceback, the frames and the graph they hold.",
        "Where is the error when step(quarter) is called: being handled, kept in a list, or gone?",
        "B: in A the error is still being handled, and emptying a cache frees nothing that is held; in C the list keeps it",
    ),
    function(
        "q4", (((4, 1), 4), ((8, 8), 1), ((16, 5), 4), ((12, 4), 4), ((5, 1), 8)),
        "Doubling finds a number of parts in few attempts; each attempt costs a forward pass.",
        "Begin with one part. The largest part of rows in n parts has ceil(rows / n) rows.",
        "def parts(rows, rows_that_fit):\n    n = 1\n    while -(-rows // n) > rows_that_fit:\n        n *= 2\n    return n",
        right=(lambda rows, fit: 2 ** max(0, (ceil(rows / fit) - 1).bit_length()),),
        wrong=(lambda rows, fit: ceil(rows / fit), lambda rows, fit: 2 * rows / fit, lambda _rows, fit: fit),
    ),
)  # fmt: skip
