"""`Corrections`: what trials teach about the errors of predictions.

Every trial teaches the ratio of what was measured to what was predicted. In logarithms it is the sum of one overall
error and one error of each setting of the plan; with normal priors (shrinkage) each trial corrects all of them at
once, and with them the prediction of every other plan.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

from memlab.plan import Offloaded, Plan
from memlab.plan.fields import BY_NAME

# what an error is the sum of: that of every plan (), of a field whose settings do the same by degrees, of one setting
_Part = tuple[str, ...]


class Corrections:
    """Logarithms of measured over predicted, as the sum of one overall error and one of each setting.

    Linear regression with normal priors, learnt one observation at a time.

    Args:
        overall: standard deviation of the error that all plans share.
        setting: standard deviation of one setting's error.
        has_doubts: whether it is larger for the settings of some fields (`PlanField.doubt`).

    Example:
        >>> errors = Corrections(overall=0.3, setting=0.1)
        >>> errors.learn(Plan(), 0.2, noise=0.01)
        >>> round(errors.expected(Plan.parse("--bf16"))[0], 2)
        0.2
    """

    def __init__(self, overall: float, setting: float, *, has_doubts: bool = False) -> None:
        self._overall, self._setting, self._has_doubts = overall, setting, has_doubts
        self._mean: dict[_Part, float] = {}
        self._covariance: dict[tuple[_Part, _Part], float] = {}

    def expected(self, plan: Plan) -> tuple[float, float]:
        """Mean and standard deviation of the error of a plan."""
        parts = _parts(plan)
        variance = sum(self._between(a, b) for a, b in product(parts, parts))
        return sum(self._mean.get(part, 0.0) for part in parts), math.sqrt(max(0.0, variance))

    def deviation_before(self, plan: Plan) -> float:
        """Standard deviation of the error before anything was learnt."""
        return math.sqrt(sum(self._prior(part) for part in _parts(plan)))

    def learn(self, plan: Plan, error: float, noise: float) -> None:
        """Take in the error of one plan."""
        parts = _parts(plan)
        known = {part for pair in self._covariance for part in pair} | set(parts)
        towards = {part: sum(self._between(part, other) for other in parts) for part in known}
        variance = sum(towards[part] for part in parts) + noise**2
        surprise = error - sum(self._mean.get(part, 0.0) for part in parts)
        for part in known:
            self._mean[part] = self._mean.get(part, 0.0) + towards[part] * surprise / variance
        self._covariance = {
            (a, b): self._between(a, b) - towards[a] * towards[b] / variance for a, b in product(known, known)
        }

    def _between(self, a: _Part, b: _Part) -> float:
        """Covariance of two parts; a part that was in no observation is still as its prior."""
        found = self._covariance.get((a, b))
        if found is not None:
            return found
        return self._prior(a) if a == b else 0.0

    def _prior(self, part: _Part) -> float:
        if not part:
            return self._overall**2
        spec = BY_NAME[part[0]]
        return (self._setting * (spec.doubt if self._has_doubts else 1.0)) ** 2 / (2 if spec.is_graded else 1)


def settings_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The settings of a plan that differ from the default, by field; each thing offloaded is one of its own."""
    settings = {name: (str(getattr(plan, name)),) for name in plan.changes() if name != "offload"}
    offloaded = tuple(str(what) for what in Offloaded if plan.tier_of(what))
    return settings | ({"offload": offloaded} if offloaded else {})


@lru_cache(maxsize=4096)
def _parts(plan: Plan) -> tuple[_Part, ...]:
    """Return what the error of a plan is the sum of."""
    settings = settings_of(plan)
    single = [(name, value) for name, values in settings.items() for value in values]
    return ((), *((name,) for name in settings if BY_NAME[name].is_graded), *single)
