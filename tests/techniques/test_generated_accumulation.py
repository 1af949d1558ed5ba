"""Accumulation on generated models and loops: the result of the untouched run, or a refusal that leaves nothing behind.

A run of 2,000 is `python -m tests.techniques.test_generated_accumulation 0 2000`.
"""

from __future__ import annotations

import collections
import sys
import warnings

import pytest
import torch

from memlab import MemlabError, RefusalError
from tests.techniques.generated_models import TOLERANCE, Case, by_hand, cases, difference, run

# of these features no combination with others may be refused: each is either served or has no part in it
_SERVED = {
    "norm": {"none", "layer", "group", "spectral", "old spectral", "weight norm", "old weight norm", "frozen batch"},
    "noise": {
        "none", "dropout", "gaussian", "attention dropout", "drop path", "layer drop", "each row", "numpy rows", "own generator",
        "places",
    },
    "state": {"none", "counter", "calls", "average", "total", "replaced", "array", "largest", "dictionary", "deque"},
    "capture": {
        "none", "attribute", "hook dict", "hook list", "detached list", "global list", "object", "auxiliary list", "auxiliary",
        "slots", "class", "tuple",
    },
    "loss": {
        "mean", "sum", "targets", "class weights", "row weights", "regularised", "loop", "loop on capture", "loop contrastive",
        "focal", "row sums", "items", "learned", "one number", "each row", "two", "loop each row", "loop triplets", "penalty",
    },
    "output": {"plain", "dict", "tuple", "named tuple", "dataclass", "object", "metrics", "slots", "ordered", "only loss", "nested"},
    "input": {
        "tensor", "recurrent state", "list", "mask", "packed", "keywords", "dict", "dataclass", "time first", "square mask",
        "row masks", "texts", "lengths", "numbers", "segments",
    },
}  # fmt: skip
# and each of these is refused whatever else there is
_REFUSED = {"batch", "queue", "contrastive", "root", "variance", "router", "largest of batch"}
_ERRORS = (ValueError, RuntimeError, IndexError, TypeError, AttributeError)
# a mean over rows, or a loss of the loop; and inputs whose rows are easily taken: these can be accumulated by hand
_BY_HAND = {
    "loss": {"mean", "focal", "row sums", "penalty", "learned", "loop", "loop each row", "loop contrastive", "loop triplets"},
    "input": {"tensor", "keywords", "dict", "dataclass", "mask", "row masks", "numbers", "texts", "lengths"},
    "batch": {"usual", "one first", "two first", "growing", "uneven", "one"},
    "loop": {"plain"}, "norm": {"none"}, "state": {"none"}, "capture": {"none"},
}  # fmt: skip


def judged(case: Case) -> str:
    """What became of a case: how it was served, or why it was refused.

    Raises:
        AssertionError: another result than that of the untouched run.
    """
    parts, tolerance = 2 + case.seed % 2, TOLERANCE[case["dtype"]]
    try:
        untouched, error = run(case, ""), None
    except _ERRORS as raised:  # the loop's own
        untouched, error = {}, raised
    try:
        found = run(case, f"--accumulate {parts}")
    except RefusalError as refusal:
        seen = getattr(refusal, "seen", {})
        if seen and not error and case["loop"] not in ("no gradients", "evaluates"):
            expected = run(case, "", steps=len(seen["losses"]))
            apart = difference({**seen, "extra": ()}, {**expected, "extra": ()}, tolerance)
            assert (case.is_stochastic and seen["losses"]) or not apart, f"{case}: refused, and {apart}"
        return f"refused: {refusal}"
    except (*_ERRORS, MemlabError) as raised:
        same = (type(error), str(error)) == (type(raised), str(raised))
        if not same:
            raise AssertionError(f"{case}: {raised!r}") from raised
        return "the loop's own error"
    assert error is None, f"{case}: no {error!r}"
    notes = found.pop("notes")
    if not case.is_stochastic:
        apart = difference(found, untouched, tolerance)
        assert not apart, f"{case}: {apart}"
        return "as untouched"
    if _can_be_done_by_hand(case) and not any("run whole" in note for note in notes):
        drawn = {"gradients", "random", "own random"}
        hand = {name: value for name, value in by_hand(case, parts).items() if name in drawn}
        apart = difference(found, hand, tolerance)
        assert not apart, f"{case}: {apart}"
        return "as by hand"
    return "stochastic"


def _can_be_done_by_hand(case: Case) -> bool:
    is_joined = not case["loss"].startswith("loop") or case["output"] == "plain"
    # rows that are mixed within a batch are mixed within a micro-batch by hand; memlab may split along places instead
    return (
        is_joined
        and case["noise"]
        not in ("shuffled rows", "layer drop")  # the latter draws a number of Python's for a whole batch
        and all(case[name] in kinds for name, kinds in _BY_HAND.items())
    )


@pytest.mark.parametrize(
    ("first", "count"), [(0, 20), *(pytest.param(first, 40, marks=pytest.mark.full) for first in range(20, 220, 40))]
)
def test_every_case_is_served_exactly_or_refused_without_a_trace(first: int, count: int) -> None:
    refused = 0
    for case in cases(count, first):
        verdict = judged(case)
        if verdict.startswith("refused"):
            assert any(case[name] not in kinds for name, kinds in _SERVED.items()), f"{case}: {verdict}"
        depends = not _REFUSED.isdisjoint(dict(case.chosen).values())
        refused += depends and verdict.startswith("refused")
    # a loss that depends on the batch may be the same for its parts: the variance of what a norm has made equal
    assert refused


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counted: collections.Counter[str] = collections.Counter()
    for case in cases(int(sys.argv[2]), int(sys.argv[1])):
        try:
            verdict = judged(case)
        except AssertionError as error:
            verdict = "FAILED"
            print(error, flush=True)
        counted[verdict.split(";")[0][:90]] += 1
    for verdict, count in counted.most_common():
        print(count, verdict)
