"""Choice of the plan to try next when memory ran out: pure values in, pure values out.

Rules of the ladder:

1. A rung *contains* the plan that ran out: it keeps every setting and adds or raises some. Raised are: more
   micro-batches, more tiles, selective, every-N or budgeted checkpointing to full, 8-bit moments to paged ones (the
   same numbers, elsewhere). So no rung comes twice, and the ladder ends.
2. Exact rungs come before *lossy* ones, which change numerics within a documented tolerance.
3. Where memory ran out in forward, backward or the loop's own code, the order is that of usual cost: micro-batches
   doubled down to one row each (a few per cent), loss in tiles (about as much, but not for every model), full
   checkpointing (about 30 %), feed-forward parts in tiles (up to 20 % more: they run once again), activations off the
   device (depends on bus or disk), optimizer state off the device (it frees nothing of the pass itself), parameters
   and gradients off the device (they come and go block by block, at every pass); then 8-bit moments and passes in
   16 bits.
4. Where it ran out in the optimizer's update, only what makes the update smaller helps: optimizer state off the
   device, parameters and gradients off it, then 8-bit moments, then paged ones where the first is not to be had (they
   exclude each other).
5. Every rung adds one setting to the one before. The loss in tiles comes on top of the micro-batches: going back to
   fewer of them would be a plan that may need more than the last one.
6. Micro-batches are doubled without leaps. A plan that fails does so in its first micro-batch, so that the n-th
   attempt costs about 1/2ⁿ of a step, and all of them together one step; a leap too far costs speed for as long as
   the training lasts.
7. With predictions, every predicted plan that rules 1 and 4 allow is a rung, the fastest first, unless it does not fit
   for certain. Rungs of rules 3 to 5 whose speed is not predicted come after.
8. Gradient release is on no rung. It serves loops of one kind only, and takes the rescue of backward passes away.
9. A plan that was refused takes with it all plans that contain it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from memlab.errors import PlanError
from memlab.plan import FIELDS, Gradients, Loss, Offloaded, OptimizerChoice, Plan, Precision, Tier
from memlab.records import Fit, Prediction
from memlab.units import format_bytes


class Place(StrEnum):
    """Places where memory can run out."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LOOP = "loop"
    STEP = "step"

    @property
    def words(self) -> str:
        """Return how a sentence names it: "memory ran out in the forward pass"."""
        names = {"forward": "the forward pass", "backward": "the backward pass", "loop": "the loop's own code"}
        return names.get(self, "the optimizer's update")


@dataclass(frozen=True)
class Rung:
    """A plan to try next.

    Args:
        plan: the plan.
        why: what it changes, in words.
        lossy: whether it changes numerics, compared with the plan that ran out.
    """

    plan: Plan
    why: str
    lossy: bool


def pinned(names: Iterable[str]) -> frozenset[str]:
    """Fields of a plan that must not change.

    Args:
        names: fields, or their flags.

    Raises:
        PlanError: no such field, with the nearest one.

    Example:
        >>> sorted(pinned(["precision", "checkpoint"]))
        ['checkpointing', 'precision']
    """
    return frozenset(_field_of(name) for name in names)


def next_plans(
    plan: Plan,
    place: Place,
    *,
    rows: int,
    keep: Collection[str] = (),
    keeps_rows: bool = False,
    has_optimizer: bool = True,
    refused: Collection[Plan] = (),
    predictions: Mapping[Plan, Prediction] | None = None,
    budget_bytes: int | None = None,
    half: Precision = Precision.BF16,
) -> Iterator[Rung]:
    """Plans to try after one has run out of memory, in the order to try them.

    Args:
        plan: the plan that ran out.
        place: where it did.
        rows: rows of the batch; no rung splits it into more micro-batches.
        keep: fields of the plan that must not change, as `pinned` returns them.
        keeps_rows: whether the batch must stay whole, so that there is no accumulation.
        has_optimizer: whether there is an optimizer whose state a rung could change.
        refused: plans that do not apply here; a set that grows meanwhile is heeded. Plans contained in `plan` do
            apply, so those that ran out on the way to it may be among them.
        predictions: what is predicted for plans, where it is.
        budget_bytes: size of the device, to tell which of them fit; None when unknown.
        half: the 16-bit format of the device.

    Returns:
        The rungs, each made when it is asked for; none when nothing is left.

    Example:
        >>> for rung in next_plans(Plan(), Place.FORWARD, rows=3, keep=["offload", "loss", "optimizer"]):
        ...     print(rung.plan, "·", rung.why)
        --accumulate 2 · half the rows at a time
        --accumulate 3 · one row at a time
        --accumulate 3 --checkpoint · activations of every block recomputed in the backward pass
        --accumulate 3 --checkpoint --tile 4 · feed-forward parts in 4 tiles
        --accumulate 3 --checkpoint --bf16 --tile 4 · forward and backward pass in bf16
    """
    limits = _Limits(plan, rows, _free_settings(place, frozenset(keep), keeps_rows, has_optimizer), half)
    return _Climb(limits, refused, predictions or {}, budget_bytes).rungs()


def contains(larger: Plan, smaller: Plan) -> bool:
    """Return whether one plan keeps every setting of another, or raises it (rule 1).

    Example:
        >>> contains(Plan.parse("--accumulate 4 --checkpoint"), Plan.parse("--checkpoint selective"))
        True
        >>> contains(Plan.parse("--accumulate 4"), Plan.parse("--checkpoint selective"))
        False
    """
    paged = (smaller.optimizer, larger.optimizer) == (OptimizerChoice.ADAM8BIT, OptimizerChoice.PAGED_ADAM8BIT)
    return (
        larger.accumulation >= smaller.accumulation
        and _recomputes_as_much(larger, smaller)
        and smaller.precision in (larger.precision, Precision.KEEP)
        and (smaller.optimizer in (larger.optimizer, OptimizerChoice.KEEP) or paged)
        and set(smaller.offload) <= set(larger.offload)
        and smaller.loss in (larger.loss, Loss.KEEP)
        and larger.tiling >= smaller.tiling
        and smaller.gradients in (larger.gradients, Gradients.KEEP)
    )


def _recomputes_as_much(larger: Plan, smaller: Plan) -> bool:
    if larger.checkpointing in (smaller.checkpointing, "full") or smaller.checkpointing == "off":
        return True
    budgets = larger.budget_bytes, smaller.budget_bytes
    return budgets[0] is not None and budgets[1] is not None and budgets[0] <= budgets[1]


# -- what may change

# a plan's fields; of what is offloaded each thing for itself
_OFF_DEVICE = {
    "activations": Offloaded.ACTIVATIONS,
    "optimizer state": Offloaded.OPTIMIZER,
    "parameters": Offloaded.PARAMS,
}
_SETTINGS = ("accumulation", "loss", "checkpointing", "tiling", *_OFF_DEVICE, "optimizer", "precision")
_OF_THE_OPTIMIZER = frozenset({"optimizer state", "optimizer"})
_OF_THE_UPDATE = _OF_THE_OPTIMIZER | {"parameters"}


def _free_settings(place: Place, keep: frozenset[str], keeps_rows: bool, has_optimizer: bool) -> frozenset[str]:
    """Settings that may change, and whose change helps at that place."""
    free = _OF_THE_UPDATE if place is Place.STEP else frozenset(_SETTINGS)
    if not has_optimizer:
        free -= _OF_THE_UPDATE if place is Place.STEP else _OF_THE_OPTIMIZER
    if keeps_rows:
        free -= {"accumulation"}
    return frozenset(setting for setting in free if ("offload" if setting in _OFF_DEVICE else setting) not in keep)


def _changed(before: Plan, after: Plan) -> list[str]:
    """Settings in which two plans differ, in the order of rule 3."""
    return [setting for setting in _SETTINGS if _value(before, setting) != _value(after, setting)]


def _value(plan: Plan, setting: str) -> Any:
    return plan.tier_of(_OFF_DEVICE[setting]) if setting in _OFF_DEVICE else getattr(plan, setting)


@dataclass(frozen=True)
class _Limits:
    """Plans to try after the one that ran out."""

    plan: Plan
    rows: int
    free: frozenset[str]
    half: Precision

    def allow(self, candidate: Plan) -> bool:
        return (
            candidate != self.plan
            and contains(candidate, self.plan)
            and self.free.issuperset(_changed(self.plan, candidate))
            and candidate.accumulation <= max(self.rows, self.plan.accumulation)
            and candidate.precision in (self.plan.precision, self.half)
            and candidate.optimizer in (self.plan.optimizer, *_8BIT)
            and candidate.gradients is self.plan.gradients
        )

    def is_lossy(self, candidate: Plan) -> bool:
        has_other_moments = candidate.optimizer is not self.plan.optimizer and self.plan.optimizer not in _8BIT
        return has_other_moments or candidate.precision is not self.plan.precision


# -- one setting more

_USUAL_TILES = 4
_8BIT = (OptimizerChoice.ADAM8BIT, OptimizerChoice.PAGED_ADAM8BIT)


def _more_micro_batches(plan: Plan, limits: _Limits) -> Plan:
    return replace(plan, accumulation=max(plan.accumulation, min(2 * plan.accumulation, limits.rows)))


def _off_device(what: Offloaded) -> _Raise:
    def raised(plan: Plan, _limits: _Limits) -> Plan:
        return replace(plan, offload=(*plan.offload, (what, Tier.AUTO))) if plan.tier_of(what) is None else plan

    return raised


def _8bit_moments(plan: Plan, _limits: _Limits) -> Plan:
    is_free = plan.optimizer is OptimizerChoice.KEEP
    return replace(plan, optimizer=OptimizerChoice.ADAM8BIT) if is_free else plan


def _paged_moments(plan: Plan, _limits: _Limits) -> Plan:
    has_8bit = plan.optimizer is OptimizerChoice.ADAM8BIT
    return replace(plan, optimizer=OptimizerChoice.PAGED_ADAM8BIT) if has_8bit else plan


def _half_precision(plan: Plan, limits: _Limits) -> Plan:
    return replace(plan, precision=limits.half) if plan.precision is Precision.KEEP else plan


_Raise = Callable[[Plan, _Limits], Plan]
# in the order of rules 3 and 4
_RAISES: tuple[_Raise, ...] = (
    _more_micro_batches,
    lambda plan, _: replace(plan, loss=Loss.CHUNKED),
    lambda plan, _: replace(plan, checkpointing="full"),
    lambda plan, _: replace(plan, tiling=max(plan.tiling, _USUAL_TILES)),
    _off_device(Offloaded.ACTIVATIONS),
    _off_device(Offloaded.OPTIMIZER),
    _off_device(Offloaded.PARAMS),
    _8bit_moments,
    _paged_moments,
    _half_precision,
)


def _raised(plan: Plan, by: _Raise, limits: _Limits) -> Plan | None:
    """The plan with one setting more; None when it cannot have it."""
    try:
        candidate = by(plan, limits)
    except PlanError:
        return None  # settings that exclude each other
    return candidate if candidate != plan and limits.allow(candidate) else None


# -- the climb


class _Climb:
    """One way up the ladder.

    Args:
        limits: which plans are on it.
        refused: plans that do not apply; may grow.
        predictions: what is predicted.
        budget_bytes: what plans are to fit into.
    """

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

    def rungs(self) -> Iterator[Rung]:
        """Exact rungs, then lossy ones; of each those with a predicted speed first."""
        for lossy in (False, True):
            yield from self._predicted(lossy)
            yield from self._usual(lossy)

    def _predicted(self, lossy: bool) -> Iterator[Rung]:
        plan, limits = self._limits.plan, self._limits
        timed = [each for each in self._predictions if self._has_speed(each) and limits.allow(each)]
        for candidate in sorted((each for each in timed if limits.is_lossy(each) == lossy), key=self._place):
            if self._fits(candidate) and not self._is_refused(candidate):
                needed = format_bytes(self._predictions[candidate].needed_bytes)
                why = f"{_why(plan, candidate, limits.rows)}; predicted to need {needed}"
                yield Rung(candidate, why, lossy)

    def _usual(self, lossy: bool) -> Iterator[Rung]:
        for by in _RAISES:
            while (candidate := _raised(self._base, by, self._limits)) is not None:
                if self._limits.is_lossy(candidate) != lossy or self._is_refused(candidate):
                    break
                if not self._has_speed(candidate) and self._fits(candidate):
                    yield Rung(candidate, _why(self._base, candidate, self._limits.rows), lossy)
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
        return any(contains(plan, each) and not contains(self._limits.plan, each) for each in refused)

    def _place(self, plan: Plan) -> tuple[float, int, str]:
        changes = _changed(self._limits.plan, plan)
        return self._predictions[plan].step_seconds, len(changes), plan.label


# -- words

_WORDS: Mapping[str, Callable[[Plan, Plan, int], str]] = {
    "accumulation": lambda before, after, rows: _rows_at_a_time(before.accumulation, after.accumulation, rows),
    "loss": lambda _before, _after, _rows: "the loss in tiles, without the full logits",
    "checkpointing": lambda _before, after, _rows: _recomputed(after.checkpointing),
    "tiling": lambda _before, after, _rows: f"feed-forward parts in {after.tiling} tiles",
    "activations": lambda _before, _after, _rows: "activations off the device until the backward pass",
    "optimizer state": lambda _before, _after, _rows: "optimizer state off the device between updates",
    "parameters": lambda _before, _after, _rows: "parameters of blocks off the device between uses",
    "optimizer": lambda before, after, _rows: _moments(before.optimizer, after.optimizer),
    "precision": lambda _before, after, _rows: f"forward and backward pass in {after.precision}",
}


def _why(before: Plan, after: Plan, rows: int) -> str:
    return ", ".join(_WORDS[setting](before, after, rows) for setting in _changed(before, after))


def _rows_at_a_time(before: int, after: int, rows: int) -> str:
    if after >= rows:
        return "one row at a time"
    if (before, after) == (1, 2):
        return "half the rows at a time"
    return f"at most {math.ceil(rows / after)} rows at a time"


def _recomputed(checkpointing: str) -> str:
    kind, _, value = checkpointing.partition(":")
    if kind == "every":
        return f"activations of one block in {value} recomputed in the backward pass"
    if kind == "budget":
        return f"activations of blocks recomputed in the backward pass until {value} hold the rest"
    which = "of every block" if checkpointing == "full" else "but for matrix products and attention"
    return f"activations {which} recomputed in the backward pass"


def _moments(before: OptimizerChoice, after: OptimizerChoice) -> str:
    paged = after is OptimizerChoice.PAGED_ADAM8BIT
    if before in _8BIT:
        return "the optimizer's 8-bit moments paged to the host"
    return "the optimizer's moments in 8 bits" + (", paged to the host" if paged else "")


_FIELD_NAMES = tuple(spec.name for spec in FIELDS)
_SPELLINGS = {name: name for name in _FIELD_NAMES} | {
    flag.removeprefix("--"): spec.name for spec in FIELDS for flag in (spec.flag, *spec.shorthands)
}


def _field_of(name: str) -> str:
    spelled = name.strip().removeprefix("--")
    if spelled not in _SPELLINGS:
        close = difflib.get_close_matches(spelled, _SPELLINGS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise PlanError(f"--keep {name}: allowed are {', '.join(_FIELD_NAMES)}, and the flags that set them{meant}")
    return _SPELLINGS[spelled]
