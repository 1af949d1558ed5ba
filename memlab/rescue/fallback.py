"""Choice of the plan to try next when memory ran out: pure values in, pure values out.

Rules:

1. A fallback *contains* the plan that ran out (`Plan.contains`): it keeps every setting and adds or raises some. So no fallback
   comes twice, and there is an end.
2. Exact fallbacks come before *lossy* ones, which change numerics within a documented tolerance.
3. The order is that of `memlab.plan.savings`, each raised by its next stronger setting until there is none.
4. Where memory ran out in the optimizer's update, only what makes the update smaller helps; in a call without gradients, only what takes
   optimizer state and parameters off the device.
5. Every fallback adds one setting to the one before. The loss in tiles comes on top of the micro-batches: going back to
   fewer of them would be a plan that may need more than the last one.
6. Micro-batches are doubled without leaps. A plan that fails does so in its first micro-batch, so that the n-th
   attempt costs about 1/2ⁿ of a step, and all of them together one step; a leap too far costs speed for as long as
   the training lasts.
7. With predictions, every predicted plan that rules 1 and 4 allow is a fallback, the fastest first, unless it does not fit
   for certain. Fallbacks of rules 3 to 5 whose speed is not predicted come after.
8. Gradient release is in no fallback. It serves loops of one kind only, and takes the rescue of backward passes away.
9. A plan that was refused takes with it all plans that contain it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from memlab.errors import PlanError
from memlab.plan import Plan, Precision
from memlab.plan.fields import Saving, did_you_mean
from memlab.plan.plan import BY_FLAG, BY_NAME
from memlab.plan.savings import SAVINGS, changed
from memlab.records import Fit, Prediction
from memlab.units import format_bytes


class Place(StrEnum):
    """Places where memory can run out."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LOOP = "loop"
    EVALUATION = "evaluation"
    STEP = "step"

    @property
    def words(self) -> str:
        """Return how a sentence names it: "memory ran out in the forward pass"."""
        names = {
            "forward": "the forward pass",
            "backward": "the backward pass",
            "loop": "the loop's own code",
            "evaluation": "a call without gradients",
        }
        return names.get(self, "the optimizer's update")


@dataclass(frozen=True)
class Fallback:
    """A plan to try next."""

    plan: Plan
    why: str  # what it changes, in words
    lossy: bool  # whether it changes numerics, compared with the plan that ran out


def pinned(names: Iterable[str]) -> frozenset[str]:
    """Fields of a plan that must not change.

    Example:
        >>> sorted(pinned(["precision", "checkpoint"]))
        ['checkpointing', 'precision']
    """
    return frozenset(_field_of(name) for name in names)


def next_plans(
    plan: Plan,  # the plan that ran out
    place: Place,  # where it did
    *,
    rows: int,  # rows of the batch; no fallback splits it into more micro-batches
    keep: Collection[str] = (),  # fields of the plan that must not change, as `pinned` returns them
    keeps_rows: bool = False,  # whether the batch must stay whole, so that there is no accumulation
    has_optimizer: bool = True,  # whether there is an optimizer whose state a fallback could change
    # plans that do not apply here; a set that grows meanwhile is heeded. Plans contained in `plan` do apply, so those
    # that ran out on the way to it may be among them
    refused: Collection[Plan] = (),
    predictions: Mapping[Plan, Prediction] | None = None,  # what is predicted for plans, where it is
    budget_bytes: int | None = None,  # size of the device, to tell which of them fit; None when unknown
    half: Precision = Precision.BF16,  # the 16-bit format of the device
) -> Iterator[Fallback]:
    """Plans to try after one has run out of memory, in the order to try them.

    Returns:
        The fallbacks, each made when it is asked for; none when nothing is left.

    Example:
        >>> for fallback in next_plans(Plan(), Place.FORWARD, rows=3, keep=["offload", "loss", "optimizer"]):
        ...     print(fallback.plan, "·", fallback.why)
        --accumulate 2 · half the rows at a time
        --accumulate 3 · one row at a time
        --accumulate 3 --checkpoint · activations of every block recomputed in the backward pass
        --accumulate 3 --checkpoint --tile 4 · feed-forward parts in 4 tiles
        --accumulate 3 --checkpoint --bf16 --tile 4 · forward and backward pass in bf16
    """
    limits = _Limits(plan, rows, half, _free_savings(place, frozenset(keep), keeps_rows, has_optimizer))
    return _Order(limits, refused, predictions or {}, budget_bytes).fallbacks()


# -- what may change


@dataclass(frozen=True)
class _Limits:
    """Plans to try after the one that ran out."""

    plan: Plan
    rows: int
    half: Precision
    free: frozenset[Saving]

    def allow(self, candidate: Plan) -> bool:
        changes = changed(self.plan, candidate)
        return (
            bool(changes)
            and candidate.contains(self.plan)
            and self.free.issuperset(changes)
            and candidate.accumulation <= max(self.rows, self.plan.accumulation)
            and all(each.field.is_exact or self._leads_to(each, candidate) for each in changes)
        )

    def _leads_to(self, saving: Saving, candidate: Plan) -> bool:
        """Return whether a setting is reached by strengthening; of what changes numerics no other one is tried."""
        plan: Plan | None = self.plan
        while plan is not None and saving.of(plan) != saving.of(candidate):
            plan = saving.raised(plan, self.rows, self.half)
        return plan is not None

    def raised(self, plan: Plan, saving: Saving) -> Plan | None:
        candidate = saving.raised(plan, self.rows, self.half)
        return candidate if candidate is not None and self.allow(candidate) else None

    def is_lossy(self, candidate: Plan) -> bool:
        return not candidate.has_numbers_of(self.plan)


def _free_savings(place: Place, keep: frozenset[str], keeps_rows: bool, has_optimizer: bool) -> frozenset[Saving]:
    """Savings that may change, and whose change helps at that place."""
    if place is Place.STEP and not has_optimizer:
        return frozenset()
    closed = keep | ({"accumulation"} if keeps_rows else frozenset())
    return frozenset(
        saving
        for saving in SAVINGS
        if saving.stronger is not None
        and saving.field.name not in closed
        and (saving.is_in_update or place not in (Place.STEP, Place.EVALUATION))
        and (saving.is_in_evaluation or place is not Place.EVALUATION)
        and (has_optimizer or not saving.is_of_optimizer)
    )


# -- the order


class _Order:
    """The order in which fallbacks are tried."""

    def __init__(
        self,
        limits: _Limits,
        refused: Collection[Plan],
        predictions: Mapping[Plan, Prediction],
        budget_bytes: int | None,
    ) -> None:
        self._limits = limits
        self._refused = refused
        self._predictions = predictions
        self._refused_predicted = [plan for plan, prediction in predictions.items() if prediction.refused]
        self._budget_bytes = budget_bytes
        self._base = limits.plan

    def fallbacks(self) -> Iterator[Fallback]:
        """Exact fallbacks, then lossy ones; of each those with a predicted speed first."""
        for lossy in (False, True):
            yield from self._predicted(lossy)
            yield from self._usual(lossy)

    def _predicted(self, lossy: bool) -> Iterator[Fallback]:
        plan, limits = self._limits.plan, self._limits
        timed = [each for each in self._predictions if self._has_speed(each) and limits.allow(each)]
        for candidate in sorted((each for each in timed if limits.is_lossy(each) == lossy), key=self._place):
            if self._fits(candidate) and not self._is_refused(candidate):
                needed = format_bytes(self._predictions[candidate].needed_bytes)
                why = f"{_why(plan, candidate, limits.rows)}; predicted to need {needed}"
                yield Fallback(candidate, why, lossy)

    def _usual(self, lossy: bool) -> Iterator[Fallback]:
        for saving in SAVINGS:
            while (candidate := self._limits.raised(self._base, saving)) is not None:
                if self._limits.is_lossy(candidate) != lossy or self._is_refused(candidate):
                    break
                if not self._has_speed(candidate) and self._fits(candidate):
                    yield Fallback(candidate, _why(self._base, candidate, self._limits.rows), lossy)
                    if self._is_refused(candidate):
                        break
                self._base = candidate

    def _has_speed(self, plan: Plan) -> bool:
        predicted = self._predictions.get(plan)
        return predicted is not None and math.isfinite(predicted.step_seconds)

    def _fits(self, plan: Plan) -> bool:
        """Return whether it may fit, as far as anything is known."""
        predicted = self._predictions.get(plan)
        if predicted is None or self._budget_bytes is None:
            return True
        return predicted.verdict(self._budget_bytes).fit is not Fit.NO

    def _is_refused(self, plan: Plan) -> bool:
        refused = [*self._refused, *self._refused_predicted]
        return any(plan.contains(each) and not self._limits.plan.contains(each) for each in refused)

    def _place(self, plan: Plan) -> tuple[float, int, str]:
        changes = changed(self._limits.plan, plan)
        return self._predictions[plan].step_seconds, len(changes), plan.label


# -- words


def _why(before: Plan, after: Plan, rows: int) -> str:
    return ", ".join(each.words(each.of(before), each.of(after), rows) for each in changed(before, after))


_SPELLINGS = {name: name for name in BY_NAME} | {flag.removeprefix("--"): spec.name for flag, spec in BY_FLAG.items()}


def _field_of(name: str) -> str:
    spelled = name.strip().removeprefix("--")
    if spelled not in _SPELLINGS:
        meant = did_you_mean(spelled, [*_SPELLINGS])
        raise PlanError(f"--keep {name}: allowed are {', '.join(BY_NAME)}, and the flags that set them{meant}")
    return _SPELLINGS[spelled]
