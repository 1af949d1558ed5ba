"""What several models that train together need: each predicted by itself, and added up.

Rules:

1. All have the same plan. What one of them refuses, all do.
2. The peak is that of one model's own step while the others hold what they always hold: parameters, gradients and
   optimizer state. That is what steps in turn need, which is how a trial runs them.
3. A loop may keep graphs of several at once, as a generator's while its judge is called. The upper end of the interval
   is therefore the sum of all peaks, and a plan is only chosen unseen where that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memlab.records import Category, Prediction
from memlab.units import format_bytes

_ALWAYS_HELD = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


def of_all(of_each: Sequence[Sequence[Prediction]], names: Sequence[str]) -> list[Prediction]:
    """Predictions of the same plans for several models, as those of all together.

    Args:
        of_each: predictions for each model.
        names: of the models.
    """
    by_label = [{prediction.plan: prediction for prediction in predictions} for predictions in of_each]
    shared = [label for label in by_label[0] if all(label in each for each in by_label)]
    return [_added([each[label] for each in by_label], names) for label in shared]


def _added(predictions: Sequence[Prediction], names: Sequence[str]) -> Prediction:
    """Predictions of one plan for several models, as one."""
    refused = next((each for each in predictions if each.refused), None)
    if refused is not None:
        return refused
    held = [sum(each.breakdown.get(str(name), 0) for name in _ALWAYS_HELD) for each in predictions]
    peaks = [each.peak_allocated_bytes + sum(held) - own for each, own in zip(predictions, held, strict=True)]
    highest = max(range(len(peaks)), key=peaks.__getitem__)
    first, others_bytes = predictions[highest], sum(held) - held[highest]
    breakdown = dict(first.breakdown)
    for each in predictions:
        for name in _ALWAYS_HELD if each is not first else ():
            breakdown[str(name)] = breakdown.get(str(name), 0) + each.breakdown.get(str(name), 0)
    reserved = first.peak_reserved_bytes
    most_bytes = sum(each.interval_bytes[1] for each in predictions)
    return replace(
        first,
        peak_allocated_bytes=peaks[highest],
        peak_reserved_bytes=None if reserved is None else reserved + others_bytes,
        host_bytes=sum(each.host_bytes for each in predictions),
        breakdown={name: size for name, size in breakdown.items() if size},
        timeline=(),
        step_seconds=sum(each.step_seconds for each in predictions),
        interval_bytes=(first.interval_bytes[0] + others_bytes, most_bytes),
        interval_seconds=(
            sum(each.interval_seconds[0] for each in predictions),
            sum(each.interval_seconds[1] for each in predictions),
        ),
        notes=(
            *dict.fromkeys(note for each in predictions for note in each.notes),
            f"{', '.join(names)} in turn; a loop that keeps graphs of several at once needs up to {format_bytes(most_bytes)}",
        ),
    )
