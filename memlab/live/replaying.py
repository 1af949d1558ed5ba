"""`Replay`: a recorded run, looked at and steered as a live one.

1. It opens at the end, with everything there is to see. `run` plays it from the first step, in twenty seconds at most.
2. Time passes in `tick`, which a view calls from a timer: nothing runs by itself here.
3. A setting that was asked for is looked up: where the recording has it, the replay goes there; where it was only
   predicted, it is refused with what was predicted.
"""

from __future__ import annotations

import math
import re
import shlex
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from memlab.errors import PlanError
from memlab.live.recording import Stretch, changes_of, points_of, stretches_of, times_of
from memlab.live.source import Can
from memlab.live.views import Drawn, Views
from memlab.plan import FIELDS, Plan, PlanField
from memlab.plan.fields import BY_NAME
from memlab.records import Prediction, fastest
from memlab.records.live_state import Activity, Asked, Change, Moment, Toggle
from memlab.records.run_record import RunRecord
from memlab.units import format_bytes

_MOST_EVENTS = 20
_STEP = re.compile(r"step (\d+)\b")


class Replay:
    """A recorded run; a `memlab.live.source.Source`.

    Args:
        record: the recording.
        clock: tells the time, in seconds.
    """

    def __init__(self, record: RunRecord, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self._points = points_of(record)
        self._stretches = stretches_of(self._points)
        self._changes = record.changes or changes_of(self._points, self._stretches)
        self._predictions = _first_of_each_plan((*record.comparison.predictions, *record.predictions))
        self._times = times_of(self._points)
        self._shown = len(self._points)
        self._chosen = ""  # a plan that was measured apart from the steps
        self._activity = Activity.OVER
        self._played_seconds = 0.0
        self._last_tick: float | None = None
        self._budget_bytes = record.budget_bytes
        self._refused: dict[str, Toggle] = {}
        self._views = Views()
        self._lock = threading.RLock()

    @property
    def playing_seconds(self) -> float:
        """Return how long the whole recording plays."""
        return self._times[-1] if self._times else 0.0

    # -- what views see ------------------------------------------------------------------------

    def moment(self) -> Moment:
        with self._lock:
            record, step = self._record, self._step
            label = self._label
            plan, unknown = plan_of(label)
            return Moment(
                title=record.title or record.comparison.title,
                activity=self._activity,
                step=step,
                plan=plan,
                pending=None,
                toggles=self._toggles(plan),
                points=self._points[: self._shown],
                changes=self._changes_so_far,
                measurements=tuple(each for each in record.comparison.measurements if self._is_known(each.plan)),
                predictions=self._predictions,
                budget_bytes=self._budget_bytes,
                capacity_bytes=record.capacity_bytes,
                events=self._events(step),
                rescues=tuple(each for each in record.rescues if each.step <= step or self._is_complete),
                status=self._status(label, unknown),
                world=_origin(record),
                errors=tuple(self._views.errors),
                frame=self._views.frame,
            )

    def can(self) -> Can:
        with self._lock:
            if not self._points:
                return Can.SWITCH
            if self._activity is Activity.REPLAYING:
                return Can.SWITCH | Can.PAUSE | Can.CANCEL
            if self._activity is Activity.PAUSED:
                return Can.SWITCH | Can.RUN | Can.RESUME | Can.CANCEL
            return Can.SWITCH | Can.RUN | Can.FIND

    def watch(self, drawn: Drawn) -> Callable[[], None]:
        return self._views.watch(drawn)

    # -- time ----------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Let as much time pass as has passed since the last tick, and draw what has changed.

        Returns:
            Whether it goes on: a view needs no timer otherwise.
        """
        now = self._clock()
        before, self._last_tick = self._last_tick, now
        return self.advance(now - before if before is not None else 0.0)

    def advance(self, seconds: float) -> bool:
        """Let time pass; without effect while nothing is played."""
        with self._lock:
            if self._activity is not Activity.REPLAYING:
                return False
            before = self._shown
            self._played_seconds += max(0.0, seconds)
            self._shown = max(self._shown, bisect_right(self._times, self._played_seconds))
            is_over = self._played_seconds >= self.playing_seconds
            if is_over:
                self._end()
        if self._shown != before or is_over:
            self._draw()
        return not is_over

    # -- what views ask ------------------------------------------------------------------------

    def ask(self, field: str, text: str) -> None:
        """Go to where the recording has a setting; refused where it has not."""
        with self._lock:
            try:
                plan = plan_of(self._label)[0].with_setting(field, text)
            except PlanError as error:
                self._refuse(field, text, str(error))
                plan = None
        if plan is not None:
            self.ask_plan(plan)
        else:
            self._draw()

    def ask_plan(self, plan: Plan) -> None:
        """Go to where the recording has a whole plan; refused where it has not."""
        with self._lock:
            self._refused.clear()
            before, _ = plan_of(self._label)
            if not _is(self._label, plan) and not self._go_to(plan):
                for spec in FIELDS:
                    if getattr(plan, spec.name) != getattr(before, spec.name):
                        self._refuse(spec.name, spec.text(getattr(plan, spec.name)), self._not_recorded(plan))
        self._draw()

    def set_budget(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._draw()

    def run(self, *, keep: bool) -> None:
        """Play the recording from its first step; nothing is trained, so nothing is kept or put back."""
        with self._lock:
            if not self._points:
                self._views.say("this recording has no steps to play: it holds settings that were measured one by one")
            else:
                self._go_on_from(0)
                self._activity = Activity.REPLAYING
        self._draw()

    def pause(self) -> None:
        self._change(Activity.REPLAYING, Activity.PAUSED)

    def resume(self) -> None:
        self._last_tick = None
        self._change(Activity.PAUSED, Activity.REPLAYING)

    def cancel(self) -> None:
        """Go to the end."""
        with self._lock:
            self._end()
        self._draw()

    def predict(self) -> None:
        """Refused: a recording has no model."""
        self._cannot("predict")

    def find(self) -> None:
        """Go to the fastest recorded setting that fits the budget."""
        budget_bytes = self._budget_bytes
        if budget_bytes is None:
            self._views.say("find a plan: set a budget first")
            self._draw()
            return
        known = [each for each in self._record.comparison.measurements if each.fits and not plan_of(each.plan)[1]]
        best = fastest(each for each in known if each.needed_bytes <= budget_bytes)
        if best is not None:
            self.ask_plan(plan_of(best.plan)[0])
        else:
            self._views.say(f"no setting of this recording fits {format_bytes(budget_bytes)}")
            self._draw()

    def undo(self) -> None:
        """Refused: a recording changes nothing."""
        self._cannot("undo")

    # -- going somewhere -----------------------------------------------------------------------

    def _go_to(self, plan: Plan) -> bool:
        found = self._stretch_of(plan)
        if found is not None and self._activity is Activity.REPLAYING:
            self._go_on_from(found.start)
        elif found is not None:
            self._stand_at(found.stop)
        elif any(_is(each.plan, plan) for each in self._record.comparison.measurements):
            self._stand_at(len(self._points))
            self._chosen = plan.label
        else:
            return False
        return True

    def _stretch_of(self, plan: Plan) -> Stretch | None:
        """Return where a plan was in force: the next time from here, else the first time."""
        found = [each for each in self._stretches if _is(each.plan, plan)]
        later = [each for each in found if each.start >= self._shown]
        return next(iter(later or found), None)

    def _go_on_from(self, start: int) -> None:
        self._chosen = ""
        self._refused.clear()
        self._shown = start + 1
        self._played_seconds = self._times[start - 1] if start else 0.0
        self._last_tick = None

    def _stand_at(self, stop: int) -> None:
        self._chosen = ""
        self._shown = stop
        self._played_seconds = self._times[stop - 1] if stop else 0.0
        self._activity = Activity.OVER if self._is_complete else Activity.PAUSED

    def _end(self) -> None:
        self._stand_at(len(self._points))
        self._activity = Activity.OVER

    @property
    def _is_complete(self) -> bool:
        return self._shown == len(self._points)

    # -- what is known by then -----------------------------------------------------------------

    @property
    def _step(self) -> int:
        return self._points[self._shown - 1].step if self._shown else 0

    @property
    def _changes_so_far(self) -> tuple[Change, ...]:
        return tuple(each for each in self._changes if each.step <= self._step)

    @property
    def _label(self) -> str:
        """Label of the plan in force, as it was written."""
        if self._chosen or not self._shown:
            return self._chosen or self._record.comparison.measurements[0].plan
        return self._points[self._shown - 1].plan

    def _is_known(self, plan: str) -> bool:
        """Return whether a step under a plan has been shown; what was measured apart comes last."""
        if self._is_complete:
            return True
        return any(each.plan == plan and each.start < self._shown for each in self._stretches)

    def _events(self, step: int) -> tuple[str, ...]:
        events = self._record.events or self._record.comparison.events
        return tuple(each for each in events if self._is_complete or _step_in(each) <= step)[-_MOST_EVENTS:]

    # -- settings ------------------------------------------------------------------------------

    def _toggles(self, plan: Plan) -> tuple[Toggle, ...]:
        applied = self._applied_at() if not self._chosen else {}
        return tuple(_toggle(spec, plan, self._refused.get(spec.name), applied.get(spec.name)) for spec in FIELDS)

    def _applied_at(self) -> dict[str, int]:
        """The step at which each field was changed last; those that never were are missing."""
        applied: dict[str, int] = {}
        before: Plan | None = None
        for each in self._changes_so_far:
            plan, _ = plan_of(each.plan)
            if before is not None:  # a plan that was in force from the beginning was not asked for in this run
                applied |= dict.fromkeys(plan.changes(before), each.step)
            before = plan
        return applied

    def _refuse(self, field: str, text: str, reason: str) -> None:
        if field in BY_NAME:
            self._refused[field] = Toggle(field, "", text, Asked.REFUSED, reason=reason)
        else:
            self._views.say(reason)

    def _not_recorded(self, plan: Plan) -> str:
        predicted = next((each for each in self._predictions if _is(each.plan, plan)), None)
        return f"not in this recording{_predicted(predicted)}"

    # -- words ---------------------------------------------------------------------------------

    def _status(self, label: str, unknown: str) -> str:
        last = self._points[-1].step if self._points else 0
        where = f", step {self._step} of {last}" if self._activity is not Activity.OVER else ""
        words = {Activity.REPLAYING: "replaying", Activity.PAUSED: "replay paused"}
        parts = [words.get(self._activity, "a recorded run, shown whole") + where, label]
        parts += [f"{BY_NAME[toggle.field].title.lower()} {toggle.text}" for toggle in self._refused.values()]
        if unknown:
            parts.append(f"unknown to this version of memlab: {unknown}")
        return " · ".join(parts)

    def _cannot(self, what: str) -> None:
        self._views.say(f"a recording cannot {what}: there is no model here")
        self._draw()

    # -- drawing -------------------------------------------------------------------------------

    def _change(self, before: Activity, after: Activity) -> None:
        with self._lock:
            if self._activity is not before:
                return
            self._activity = after
        self._draw()

    def _draw(self) -> None:
        self._views.draw(self.moment, figures=True)


# -- plans and words ---------------------------------------------------------------------------


@lru_cache(maxsize=256)
def plan_of(label: str) -> tuple[Plan, str]:
    """A plan from its label, and the words of it that this version of memlab does not know.

    Example:
        >>> plan, unknown = plan_of("--accumulate 4 --quantize 4")
        >>> str(plan), unknown
        ('--accumulate 4', '--quantize 4')
    """
    if label == Plan().label:
        return Plan(), ""
    try:
        plan, unknown = Plan.parse_known(shlex.split(label))
    except ValueError:  # a value that is unknown, or no flags at all
        return Plan(), label
    return plan, " ".join(unknown)


def _is(label: str, plan: Plan) -> bool:
    """Return whether a label says exactly this plan."""
    return plan_of(label) == (plan, "")


def _toggle(spec: PlanField, plan: Plan, refused: Toggle | None, step: int | None) -> Toggle:
    """A setting as it is in a plan: refused, applied at a step, or never asked for."""
    value = spec.text(getattr(plan, spec.name))
    if refused is not None:
        return replace(refused, value=value)
    return Toggle(spec.name, value, value) if step is None else Toggle(spec.name, value, value, Asked.APPLIED, step)


def _origin(record: RunRecord) -> str:
    """Where, when and with what a recording was made."""
    device = record.device or record.comparison.measurements[0].device
    made = f", made {record.recorded_at}" if record.recorded_at else ""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"a recording from {device}{made}{f' with {versions}' if versions else ''}: nothing is trained here"


def _first_of_each_plan(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    found: dict[str, Prediction] = {}
    for each in predictions:
        found.setdefault(each.plan, each)
    return tuple(found.values())


def _predicted(prediction: Prediction | None) -> str:
    if prediction is None:
        return ", and not predicted in it"
    if prediction.refused:
        return f"; predicted not to apply: {prediction.refused}"
    speed = prediction.samples_per_second
    known = f" and {_rate(speed)} samples/s" if math.isfinite(speed) else ""
    return f"; predicted {format_bytes(prediction.needed_bytes)}{known}"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _step_in(event: str) -> int:
    """The step an event tells of, at its beginning; 0 without one."""
    found = _STEP.match(event)
    return int(found.group(1)) if found else 0
