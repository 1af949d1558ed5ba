"""Your own model."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.workshop.questions import choice, function, number


def _fastest_that_fits(peaks: Sequence[float], speeds: Sequence[float], budget: float) -> int:
    fitting = [at for at, peak in enumerate(peaks) if peak <= budget]
    return max(fitting, key=lambda at: speeds[at], default=-1)


QUESTIONS = (
    choice(
        "q1", "ABC", "C",
        "The other two lower activations, which are not the largest part.",
        "Which of the three moves what the receipt names?",
        "C: --offload optimizer; --adam8bit and --optim adafactor lower the same part",
    ),
    function(
        "q2",
        ((([90, 60, 30], [10.0, 9.0, 6.0], 64), 1), (([90, 60, 30], [10.0, 6.0, 9.0], 64), 2),
         (([90, 60], [10.0, 9.0], 90), 0), (([90, 60], [10.0, 9.0], 50), -1)),
        "First what fits, then what is fast.",
        "Two conditions, in an order: what does not fit has no speed.",
        "def fastest_that_fits(peaks, speeds, budget):\n"
        "    fitting = [at for at, peak in enumerate(peaks) if peak <= budget]\n"
        "    return max(fitting, key=lambda at: speeds[at], default=-1)",
        right=(_fastest_that_fits,),
        wrong=(
            lambda peaks, _speeds, _budget: peaks.index(min(peaks)),
            lambda _peaks, speeds, _budget: speeds.index(max(speeds)),
            lambda peaks, _speeds, budget: next((at for at, peak in enumerate(peaks) if peak <= budget), -1),
        ),
    ),
    number(
        "q3", 250,
        "It shows 128 KiB and holds all 64,000 rows.",
        "A slice is a view. Whose memory is it?",
        "64_000 * 4 / 1024 = 250; data[:32].clone() holds 0.125",
        wrong=(0.125, 32),
    ),
    choice(
        "q4", "ABC", "B",
        "What is still referred to is not freed. sys.last_value, IPython's own copy of the traceback and the last result all refer to it.",
        "Where does %debug read the variables of a function that is long over?",
        "B: the traceback refers to frames, frames to variables, variables to tensors and graphs",
    ),
    choice(
        "q5", "ABC", "B",
        "Exact, within a tolerance and another algorithm are three different promises; each technique says which one it makes.",
        "Which of the two techniques changes the numbers that an update is made from?",
        "B: each technique is held to its own promise",
    ),
)  # fmt: skip
