"""`RunReplay`: a recorded run, looked at and steered as a live one.

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
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NoReturn

from memlab.errors import PlanError, SessionError
from memlab.live.feed import Track
from memlab.live.pending_changes import PendingChanges
from memlab.live.source import Can
from memlab.live.views import Drawn, Views
from memlab.plan import Plan
from memlab.plan.plan import BY_NAME
from memlab.records import Prediction, fastest
from memlab.records.live_state import Activity, Change, LivePoint, Moment
from memlab.records.run_record import RunRecord
from memlab.report.wording import rate
from memlab.units import format_bytes

_MOST_EVENTS = 20
_STEP = re.compile(r"step (\d+)\b")
_LONGEST_SECONDS = 20.0
# shorter recordings are slowed down: eyes must be able to follow
_SHORTEST_SECONDS = 4.0
_FASTER = 2.0


class RunReplay:
    """A recorded run; a `memlab.live.source.Source`."""

    def __init__(self, record: RunRecord, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self._points = _points_of(record)
        by_plan = [next(points) for _, points in groupby(self._points, key=lambda point: point.plan)]
        self._changes = record.changes or tuple(Change(point.step, point.plan) for point in by_plan[1:])
        predictions: dict[str, Prediction] = {}
        for each in (*record.comparison.predictions, *record.predictions):
            predictions.setdefault(each.plan, each)
        self._predictions = tuple(predictions.values())
        self._times = _times_of(self._points)
        self._shown = len(self._points)
        self._chosen = ""  # a plan that was measured apart from the steps
        self._activity = Activity.OVER
        self._played_seconds = 0.0
        self._last_tick: float | None = None
        self._budget_bytes = record.budget_bytes
        self._refused: dict[str, tuple[str, str]] = {}  # by field: what was asked for, and why it is not to be had
        self._views = Views(self.moment)
        self._lock = threading.RLock()

    @property
    def playing_seconds(self) -> float:
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
                toggles=self._settings(plan).toggles,
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
        """Let as much time pass as has since the last tick, draw what has changed, and return whether it goes on."""
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
            self._views.draw()
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
            self._views.draw()

    def ask_plan(self, plan: Plan) -> None:
        """Go to where the recording has a whole plan; refused where it has not."""
        with self._lock:
            self._refused.clear()
            before, _ = plan_of(self._label)
            if not _is(self._label, plan) and not self._go_to(plan):
                for name in plan.changes(before):
                    self._refuse(name, BY_NAME[name].text(getattr(plan, name)), self._not_recorded(plan))
        self._views.draw()

    def set_budget(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._views.draw()

    def run(self, *, keep: bool, steps: int | None = None) -> None:
        """Play the recording from its first step to its last; nothing is trained, so nothing is kept or put back."""
        with self._lock:
            if not self._points:
                self._views.say("this recording has no steps to play: it holds settings that were measured one by one")
            else:
                self._go_on_from(0)
                self._activity = Activity.REPLAYING
        self._views.draw()

    def pause(self) -> None:
        self._change(Activity.REPLAYING, Activity.PAUSED)

    def resume(self) -> None:
        self._last_tick = None
        self._change(Activity.PAUSED, Activity.REPLAYING)

    def cancel(self) -> None:
        """Go to the end."""
        with self._lock:
            self._end()
        self._views.draw()

    def training(self) -> NoReturn:
        """Refused: a recording has no model."""
        raise SessionError("a recording cannot train: make a panel with memlab.panel(workload)")

    def find(self) -> None:
        """Go to the fastest recorded setting that fits the budget."""
        budget_bytes = self._budget_bytes
        if budget_bytes is None:
            self._tell("find a plan: set a budget first")
            return
        known = [each for each in self._record.comparison.measurements if each.fits and not plan_of(each.plan)[1]]
        best = fastest(each for each in known if each.needed_bytes <= budget_bytes)
        if best is not None:
            self.ask_plan(plan_of(best.plan)[0])
        else:
            self._tell(f"no setting of this recording fits {format_bytes(budget_bytes)}")

    def undo(self) -> None:
        """Refused: a recording changes nothing."""
        self._tell("a recording cannot undo: there is no model here")

    # -- going somewhere -----------------------------------------------------------------------

    def _go_to(self, plan: Plan) -> bool:
        under = [place for place, each in enumerate(self._points) if _is(each.plan, plan)]
        # the next time from here, else the first time
        found = next((place for place in under if place >= self._shown), next(iter(under), None))
        if found is not None and self._activity is Activity.REPLAYING:
            self._go_on_from(found)
        elif found is not None:
            label, others = self._points[found].plan, range(found, len(self._points))
            self._stand_at(next((place for place in others if self._points[place].plan != label), len(self._points)))
        elif any(_is(each.plan, plan) for each in self._record.comparison.measurements):
            self._stand_at(len(self._points))
            self._chosen = plan.label
        else:
            return False
        return True

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
        return any(each.plan == plan for each in self._points[: self._shown])

    def _events(self, step: int) -> tuple[str, ...]:
        events = self._record.events or self._record.comparison.events
        return tuple(each for each in events if self._is_complete or _step_in(each) <= step)[-_MOST_EVENTS:]

    # -- settings ------------------------------------------------------------------------------

    def _settings(self, plan: Plan) -> PendingChanges:
        """The settings of the plan that is shown: when each was changed, and which were refused."""
        settings = PendingChanges()
        # a plan that was in force from the beginning was not asked for in this run
        if self._points and not self._chosen:
            begun = self._points[0]
            settings.plan = plan_of(begun.plan)[0]
            for each in self._changes_so_far:
                if each.step > begun.step:
                    settings.note_applied(plan_of(each.plan)[0], each.step)
        settings.plan = plan
        for field, (text, reason) in self._refused.items():
            settings.refuse(field, text, reason)
        return settings

    def _refuse(self, field: str, text: str, reason: str) -> None:
        if field in BY_NAME:
            self._refused[field] = text, reason
        else:
            self._views.say(reason)

    def _not_recorded(self, plan: Plan) -> str:
        known = next((each for each in self._predictions if _is(each.plan, plan)), None)
        if known is None:
            return "not in this recording, and not predicted in it"
        if known.refused:
            return f"not in this recording; predicted not to apply: {known.refused}"
        speed = known.samples_per_second
        said = f" and {rate(speed)} samples/s" if math.isfinite(speed) else ""
        return f"not in this recording; predicted {format_bytes(known.needed_bytes)}{said}"

    # -- words ---------------------------------------------------------------------------------

    def _status(self, label: str, unknown: str) -> str:
        last = self._points[-1].step if self._points else 0
        where = f", step {self._step} of {last}" if self._activity is not Activity.OVER else ""
        words = {Activity.REPLAYING: "replaying", Activity.PAUSED: "replay paused"}
        parts = [words.get(self._activity, "a recorded run, shown whole") + where, label]
        parts += [f"{BY_NAME[field].title.lower()} refused: {reason}" for field, (_, reason) in self._refused.items()]
        if unknown:
            parts.append(f"unknown to this version of memlab: {unknown}")
        return " · ".join(parts)

    # -- drawing -------------------------------------------------------------------------------

    def _change(self, before: Activity, after: Activity) -> None:
        with self._lock:
            if self._activity is not before:
                return
            self._activity = after
        self._views.draw()

    def _tell(self, words: str) -> None:
        self._views.say(words)
        self._views.draw()


# -- the recording -----------------------------------------------------------------------------


def _points_of(record: RunRecord) -> tuple[LivePoint, ...]:
    """The points of a recording; of a file without them, made of its steps."""
    points: Iterable[LivePoint] = record.points
    if not record.points:
        measured = {each.plan: each for each in record.comparison.measurements}
        points = (LivePoint.of(step, measured.get(step.plan)) for step in record.steps)
    track = Track()
    for each in sorted(points, key=lambda point: point.step):
        track.add(each)
    return track.points


def _times_of(points: Sequence[LivePoint]) -> tuple[float, ...]:
    """Return when each point comes while it is played: as far apart as in the run, times one factor."""
    took, step = [], points[0].step - 1 if points else 0
    for each in points:
        seconds = each.seconds if math.isfinite(each.seconds) else 0.0
        took.append(max(0.0, seconds) * (each.step - step))
        step = each.step
    whole = sum(took)
    if not whole:
        took, whole = [1.0] * len(points), float(len(points))
    playing = min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, whole / _FASTER))
    return tuple(accumulate(seconds / whole * playing for seconds in took))


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


def _origin(record: RunRecord) -> str:
    """Return where, when and with what a recording was made."""
    device = record.device or record.comparison.measurements[0].device
    made = f", made {record.recorded_at}" if record.recorded_at else ""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"a recording from {device}{made}{f' with {versions}' if versions else ''}: nothing is trained here"


def _step_in(event: str) -> int:
    """The step an event tells of, at its beginning; 0 without one."""
    found = _STEP.match(event)
    return int(found.group(1)) if found else 0
