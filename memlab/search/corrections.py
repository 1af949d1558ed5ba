"""`Corrections`: what trials teach about the errors of predictions."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from memlab.plan import Offloaded, Plan
from memlab.plan.plan import BY_NAME

# what an error is the sum of: that of every plan (), of a field whose settings do the same by degrees, of one setting
_Part = tuple[str, ...]


class Corrections:
    """Logarithms of measured over predicted, as the sum of one overall error and one of each setting.

    Gaussian process regression: the errors of two plans covary by what they have in common.

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
        self._seen: list[Plan] = []
        self._errors: list[float] = []
        self._noise: list[float] = []
        # of the covariance of the errors seen, with their noise; and what each counts towards another plan's mean
        self._inverse, self._weights = np.empty((0, 0)), np.empty(0)

    def expected(self, plan: Plan) -> tuple[float, float]:
        """Mean and standard deviation of the error of a plan."""
        shared = np.array([self._covariance(plan, each) for each in self._seen])
        explained = shared @ self._inverse @ shared
        return float(shared @ self._weights), math.sqrt(max(0.0, self._covariance(plan, plan) - explained))

    def deviation_before(self, plan: Plan) -> float:
        """Standard deviation of the error before anything was learnt."""
        return math.sqrt(self._covariance(plan, plan))

    def learn(self, plan: Plan, error: float, noise: float) -> None:
        """Take in the error of one plan."""
        self._seen.append(plan)
        self._errors.append(error)
        self._noise.append(noise)
        among = [[self._covariance(one, other) for other in self._seen] for one in self._seen]
        self._inverse = np.linalg.inv(np.array(among) + np.diag(np.square(self._noise)))
        self._weights = self._inverse @ self._errors

    def _covariance(self, one: Plan, other: Plan) -> float:
        """Covariance of the errors of two plans before anything was learnt."""
        return sum(self._prior(part) for part in _parts(one) if part in _parts(other))

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
