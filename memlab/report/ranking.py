"""Predictions in order: what fits a budget, what nothing else beats, what to show of hundreds.

A prediction is judged by what a budget must hold (`Prediction.needed_bytes`: the reserved peak on
CUDA, the allocated peak elsewhere) and by its samples per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memlab.plan import Plan
from memlab.records import Fit, Prediction, speed_of
from memlab.units import format_bytes

# a table of more rows than this is thinned
MOST_ROWS = 24
_MOST_OF_FRONT = 12
_FITS = (Fit.YES, Fit.UNCERTAIN, Fit.NO)


@dataclass(frozen=True)
class Ranking:
    """Predictions in the order of a table."""

    first: Prediction  # what the others are compared with: the plan as written, or else the first one given
    others: tuple[Prediction, ...]  # the rest, best first
    front: frozenset[str]  # labels of the plans that no other plan beats in both memory and speed
    budget_bytes: int | None  # what the plans are to fit into, or None

    @property
    def every(self) -> tuple[Prediction, ...]:
        return (self.first, *self.others)


def rank(predictions: Sequence[Prediction], budget_bytes: int | None = None) -> Ranking | None:
    """Put predictions in order; None when there is none, or all are refused.

    With a budget: those that fit, the fastest first; then the uncertain ones; then the others, the nearest
    to fitting first. Without one: the Pareto-optimal ones first, the fastest of them first.
    """
    known = [each for each in predictions if not each.refused]
    if not known:
        return None
    first = next((each for each in known if each.plan == Plan().label), known[0])
    front = frozenset(each.plan for each in pareto_front(known))
    others = [each for each in known if each is not first]
    if budget_bytes is None:
        others.sort(key=lambda each: (each.plan not in front, -speed_of(each), each.needed_bytes))
    else:
        others.sort(key=lambda each: _by_verdict(each, budget_bytes))
    return Ranking(first, tuple(others), front, budget_bytes)


def pareto_front(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """The predictions that no other one beats in both memory and speed, from the smallest on.

    Of several that are equal in both, the one with the fewest flags. Where no time is predicted, the smallest
    alone is left.
    """
    by_size = sorted(
        (each for each in predictions if not each.refused),
        key=lambda each: (each.needed_bytes, -speed_of(each), len(each.plan)),
    )
    front: list[Prediction] = []
    for each in by_size:
        if not front or speed_of(each) > speed_of(front[-1]):
            front.append(each)
    return tuple(front)


def shown(ranking: Ranking, measured: Iterable[str] = (), *, every: bool = False) -> tuple[Prediction, ...]:
    """The rows worth reading: all of a short list; of a long one the Pareto-optimal plans, the best of each verdict and those measured."""
    if every or len(ranking.others) < MOST_ROWS:
        return ranking.every
    front = _spread([each for each in ranking.others if each.plan in ranking.front], _MOST_OF_FRONT)
    kept = {ranking.first.plan, *(each.plan for each in front), *best_of_each_verdict(ranking), *measured}
    return tuple(each for each in ranking.every if each.plan in kept)


def best_of_each_verdict(ranking: Ranking) -> tuple[str, ...]:
    """Labels: the fastest that fits, the fastest uncertain one, the one that is nearest to fitting; empty without a budget."""
    budget_bytes = ranking.budget_bytes
    if budget_bytes is None:
        return ()
    groups = ([each for each in ranking.others if each.verdict(budget_bytes).fit is fit] for fit in _FITS)
    return tuple(group[0].plan for group in groups if group)


def counts(predictions: Iterable[Prediction], budget_bytes: int | None) -> str:
    """Return how many there are, by verdict.

    Example:
        >>> p = Prediction("as written", "T4", 2**30, None, 0, {}, (), 0.5, 8, 0, (2**30, 2**30), (0.5, 0.5))
        >>> counts([p], None), counts([p, p], 2**31)
        ('1 plan', '2 plans: 2 fit')
    """
    given = list(predictions)
    said = f"{len(given)} plan{'' if len(given) == 1 else 's'}"
    if budget_bytes is None:
        return said
    words = {Fit.YES: "fit", Fit.UNCERTAIN: "uncertain", Fit.NO: "do not fit"}
    fits = [each.verdict(budget_bytes).fit for each in given]
    return f"{said}: {', '.join(f'{fits.count(fit)} {words[fit]}' for fit in _FITS if fit in fits)}"


def verdict_words(prediction: Prediction, budget_bytes: int) -> str:
    """Return whether it fits, and by how much.

    Example:
        >>> p = Prediction("--fp16", "T4", 3 * 2**30, None, 0, {}, (), 0.5, 8, 0, (2 * 2**30, 4 * 2**30), (0.5, 0.5))
        >>> [verdict_words(p, size * 2**30) for size in (1, 3, 5)]
        ['does not fit, 2.00 GiB too much', 'uncertain, 0 B to spare ± 1.00 GiB', 'fits, 2.00 GiB to spare']
    """
    verdict = prediction.verdict(budget_bytes)
    by = format_bytes(abs(verdict.spare_bytes))
    words = f"{verdict.fit}, {by} {'too much' if verdict.spare_bytes < 0 else 'to spare'}"
    if verdict.fit is not Fit.UNCERTAIN:
        return words
    low, high = prediction.interval_bytes
    return f"{words} ± {format_bytes(max(high - prediction.needed_bytes, prediction.needed_bytes - low))}"


def refusals(predictions: Iterable[Prediction]) -> dict[str, list[str]]:
    """The plans that do not apply, by reason, the most frequent reason first."""
    by_reason: dict[str, list[str]] = {}
    for each in predictions:
        if each.refused:
            by_reason.setdefault(each.refused, []).append(each.plan)
    return dict(sorted(by_reason.items(), key=lambda found: -len(found[1])))


def _by_verdict(prediction: Prediction, budget_bytes: int) -> tuple[int, float, float]:
    verdict = prediction.verdict(budget_bytes)
    place = _FITS.index(verdict.fit)
    if verdict.fit is Fit.NO:
        return (place, -verdict.spare_bytes, 0)
    return (place, -speed_of(prediction), -verdict.spare_bytes)


def _spread(predictions: Sequence[Prediction], most: int) -> list[Prediction]:
    """Return at most so many of them, both ends included."""
    if len(predictions) <= most:
        return list(predictions)
    return [predictions[round(i * (len(predictions) - 1) / (most - 1))] for i in range(most)]
