"""Accumulation on generated models and loops: the result of the untouched run, or a refusal that leaves nothing behind.

A run of 2,000 is `python -m tests.techniques.test_generated_accumulation 2000`.
"""

from __future__ import annotations

import collections
import sys

import pytest

from memlab import RefusalError
from tests.techniques.generated_models import Case, by_hand, cases, difference, run

_COUNT = 160
# of these features no combination with others may be refused: each is either served or has no part in it
_SERVED = {
    "norm": ("none", "layer", "group", "spectral"),
    "noise": ("none", "dropout", "gaussian", "attention dropout"),
    "state": ("none", "counter", "calls", "average", "total"),
    "capture": ("none", "attribute", "hook dict", "hook list", "detached list", "global list", "object"),
    "loss": ("mean", "sum", "targets", "class weights", "row weights", "regularised", "loop", "loop on capture", "loop contrastive"),
    "output": ("plain", "dict", "tuple", "named tuple", "dataclass", "object", "metrics"),
    "input": ("tensor", "recurrent state", "list", "mask", "packed"),
}  # fmt: skip
# and each of these is refused whatever else there is
_REFUSED = {"batch": "BatchNorm", "queue": "queue", "contrastive": "loss of Net", "root": "loss of Net"}


def judged(case: Case) -> str:
    """What became of a case: how it was served, or why it was refused.

    Raises:
        AssertionError: another result than that of the untouched run.
    """
    parts = 2 + case.seed % 2
    try:
        found = run(case, f"--accumulate {parts}")
    except RefusalError as refusal:
        seen = getattr(refusal, "seen", None)
        if seen is not None:
            expected = run(case, "", steps=len(seen["losses"]))
            assert case.is_stochastic or not (apart := difference(seen, expected)), f"{case}: refused, and {apart}"
        return f"refused: {refusal}"
    if not case.is_stochastic:
        apart = difference(found, run(case, ""))
        assert not apart, f"{case}: {apart}"
        return "as untouched"
    is_plain = all(case[name] == "none" for name in ("norm", "state", "capture")) and case["input"] == "tensor"
    if is_plain and case["loss"] == "mean":
        apart = difference(found["gradients"], by_hand(case, parts))
        assert not apart, f"{case}: {apart}"
        return "as by hand"
    return "stochastic"


@pytest.mark.parametrize("first", range(0, _COUNT, 40))
def test_every_case_is_served_exactly_or_refused_without_a_trace(first: int) -> None:
    for case in cases(40, first):
        verdict = judged(case)
        if verdict.startswith("refused"):
            assert any(kind not in _SERVED[name] for name, kind in case.chosen), f"{case}: {verdict}"
        assert verdict.startswith("refused") or not any(kind in _REFUSED for _, kind in case.chosen), (
            f"{case}: {verdict}"
        )


if __name__ == "__main__":
    counted: collections.Counter[str] = collections.Counter()
    for case in cases(int(sys.argv[1])):
        try:
            verdict = judged(case)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            verdict = "FAILED"
            print(case, type(error).__name__, error)
        counted[verdict.split(";")[0][:90]] += 1
    for verdict, count in counted.most_common():
        print(count, verdict)
