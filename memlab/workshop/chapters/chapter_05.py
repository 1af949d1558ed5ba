"""8-bit Adam and Adafactor."""

from __future__ import annotations

from memlab.workshop.questions import choice, function, number

QUESTIONS = (
    number(
        "q1", 52.2,
        "Eight bytes for each of seven billion parameters, and the parameters themselves are only half of that.",
        "Two numbers of four bytes for each parameter, and a GiB is 2**30 bytes.",
        "7e9 * 8 / 2**30 = 52.2",
        wrong=(26.1, 56.0),
    ),
    function(
        "q2", (((4096, 4096), 8192), ((50257, 768), 51025), ((10, 1), 11)),
        "One mean for each row and one for each column stand for the whole table.",
        "Adafactor keeps the means of the squares over the rows and over the columns, and multiplies them when it needs the table.",
        "def numbers_kept(rows, columns):\n    return rows + columns",
        right=(lambda rows, columns: rows + columns,),
        wrong=(lambda rows, columns: rows * columns, lambda rows, _columns: rows),
    ),
    choice(
        "q3", "ABC", "C",
        "Each block of 256 has a scale of its own, so one large value makes only 255 others inexact.",
        "What would one scale for a whole tensor do to its small values, when one value is a thousand times larger?",
        "C: the scale of a block is its own largest value",
    ),
    choice(
        "q4", "ABC", "A",
        "The scheduler was made for the old optimizer and goes on setting the rates of that one.",
        "Which object does scheduler.optimizer point to?",
        "A: the rate stays where it was. memlab changes the update behind the same optimizer object, so the scheduler notices nothing",
    ),
)  # fmt: skip
