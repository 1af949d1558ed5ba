"""`Control`: what people ask of a live run, from any thread, and what has become of it.

Rules:

1. Asking only notes what is wanted. The thread that trains applies it between two steps; where nothing trains,
   the main thread does, as soon as no cell runs there (`Stage`).
2. There is one control per model, and it outlives sessions and cells: two panels on one model show one state.
3. It keeps neither the model nor its session alive. When the model is gone it says so.
4. Views are drawn on the thread that has something to show: at the ends of steps by `Pace`, else at once. One that
   fails is told so in the next drawing, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MemlabError
from memlab.live.feed import Feed
from memlab.live.live_loop import RUNNING, LiveLoop
from memlab.live.live_model import LiveModel
from memlab.live.live_predictions import Predicting
from memlab.live.live_steps import LiveSteps, OwnRun
from memlab.live.pending_changes import PendingChanges
from memlab.live.source import Can
from memlab.live.stage import Stage
from memlab.live.steering import Steering
from memlab.live.views import Drawn, Views
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.plan.plan import BY_NAME
from memlab.records import Measurement, Prediction
from memlab.records.live_state import Activity, Asked, Moment
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload
from memlab.session import Session, fit, session_of
from memlab.units import format_seconds

_controls: MutableMapping[nn.Module, Control] = WeakIdKeyDictionary()


def control_of(model: nn.Module) -> Control:
    """Return what follows and steers a model's run: one for all its sessions, cells and panels."""
    control = _controls.get(model)
    if control is None:
        control = _controls[model] = Control(model)
    return control


def _loop_of(model: nn.Module) -> LiveLoop | None:
    control = _controls.get(model)
    return control.loop if control is not None else None


class Control(Observer):
    """The live run of one model: to views a `memlab.live.source.Source`, to the model's sessions an observer."""

    def __init__(self, model: nn.Module, stage: Stage | None = None) -> None:
        self.model = LiveModel(model, self.follow, self._model_gone)  # with what is known of training it
        self.feed = Feed()  # what was measured
        self.views = Views(self.moment)
        self.loop = LiveLoop(self.model, self.views, stage or Stage(), _loop_of)
        self.predicting = Predicting(self.loop, self.feed)
        self.steering = Steering(self.loop, self.feed, self.predicting)
        self.steps = LiveSteps(self.loop, self.feed, self.steering)
        self.own_run = OwnRun(self.loop, self.steps, self.steering, self.predicting)
        self._numbers = count()  # of moments

    # -- what it follows -----------------------------------------------------------------------

    def follow(self, session: Session) -> None:
        """Listen to a session; harmless when it does already."""
        if all(observer is not self for observer in session.observers.all):
            session.observers.add(self)
        if session.steps < self.feed.step and self.model.session is not session:
            with self.loop.lock:
                self.feed.begin_anew()
                self.loop.pending_changes.forget_past()
        self.model.follow(session)
        self.loop.pending_changes.plan = session.plan
        if session.pending is not None:
            self.loop.pending_changes.ask_plan(session.pending)
        if self.feed.meter is None and self.feed.step == 0:
            self.steps.title = f"memfit · {session.workload.describe()}"

    def begin(self, workload: Workload, capacity_bytes: int | None = None, budget_bytes: int | None = None) -> None:
        """Take a workload under control, with its batch where that is known: a session that only watches, unless it has one."""
        self.follow(session_of(workload.model) or fit(workload.held_weakly()))
        if workload.batch is not None:
            self.model.batch, self.model.loss_fn = workload.batch, workload.loss_fn
        self.steps.capacity_bytes = capacity_bytes or self.steps.capacity_bytes
        self.predicting.budget_bytes = budget_bytes or self.predicting.budget_bytes
        self.views.draw()  # panels that are open already

    def training_begins(self, session: Session, meter: Meter, beside: Control | None = None) -> None:
        """Follow a cell that trains the model until `steps.end`, perhaps beside that of another control, by the meter that measures it."""
        if self.loop.playing is not None:
            self.loop.playing.cancel()
        self.follow(session)
        if beside is not None:
            self.loop.join(beside.loop)
        self.steering.training_begins(session)
        self.steps.begin(session, meter, Activity.TRAINING)

    def know(self, measurements: Iterable[Measurement] = (), predictions: Iterable[Prediction] = ()) -> None:
        """Take in what was measured and predicted elsewhere."""
        with self.loop.lock:
            self.feed.know(measurements)
            self.predicting.known.know(predictions)

    def see_variables(self, namespace: Mapping[str, Any]) -> None:
        """Look whether a notebook's variables still hold the model, for the status line."""
        if self.model.see_variables(namespace):
            self.views.draw()

    def _model_gone(self) -> None:
        # called by whatever thread collects the model: views are drawn where that does no harm
        with suppress(MemlabError):
            self.loop.stage.when_idle(self.views.draw)

    # -- observer: on the training thread ------------------------------------------------------

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer, for the session after this one."""
        self.model.optimizer_found(optimizer)

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self.model.returns_loss = loss is not None

    def step_boundary(self) -> None:
        self.steps.boundary()

    def plan_changed(self, plan: Plan) -> None:
        self.steering.note_applied(plan)

    def plan_asked(self, plan: Plan) -> None:
        self.steering.asked_elsewhere(plan)

    def plan_refused(self, plan: Plan, refusal: MemlabError) -> None:
        self.steering.refuse(plan, str(refusal))

    # -- source: on any thread -----------------------------------------------------------------

    def moment(self) -> Moment:
        with self.loop.lock:
            self.feed.take_in()
            self.feed.measure()
            session, changes = self.model.session, self.loop.pending_changes
            rescuer = session.rescuer if session is not None else None
            activity = Activity.GONE if self.model.is_gone else self.loop.hold.activity
            return Moment(
                title=self.steps.title,
                activity=activity,
                step=self.feed.step,
                plan=changes.plan,
                pending=changes.target,
                toggles=changes.toggles,
                points=self.feed.points,
                changes=tuple(self.feed.changes),
                measurements=tuple(self.feed.measurements.values()),
                predictions=self.predicting.known.predictions,
                budget_bytes=self.predicting.budget_bytes,
                capacity_bytes=self.steps.capacity_bytes,
                events=tuple(self.feed.events),
                rescues=tuple(rescuer.rescues) if rescuer is not None else (),
                status=_status_line(
                    activity, self.model, self.feed, changes, self.own_run.doing or self.predicting.doing
                ),
                world=self.steps.world,
                errors=tuple(self.views.errors),
                frame=self.views.frame,
                number=next(self._numbers),
            )

    def can(self) -> Can:
        return self.loop.can()

    def watch(self, drawn: Drawn, after_seconds: float = 0.0) -> Callable[[], None]:
        return self.views.watch(drawn, after_seconds)

    def ask(self, field: str, text: str) -> None:
        self.steering.ask(lambda: self.loop.pending_changes.ask(field, text))

    def set_budget(self, budget_bytes: int | None) -> None:
        self.predicting.budget_bytes = budget_bytes
        self.views.hurry()
        self.loop.show_asked()

    def run(self, *, keep: bool, steps: int | None = None) -> None:
        self.views.errors.clear()
        self.loop.when_idle(lambda: self.own_run.begin(keep=keep, steps=steps))

    def pause(self) -> None:
        if self.loop.hold.activity in RUNNING:
            playing = self.loop.playing
            self.loop.hold.begin(is_at_rest=playing is not None)
            if playing is not None:
                playing.pause()
            self.loop.show_asked()

    def resume(self) -> None:
        was_held = self.loop.hold.is_held
        self.loop.hold.end()
        playing, meter = self.loop.playing, self.feed.meter
        if playing is not None and was_held:
            if meter is not None:
                meter.pause()
            playing.resume()
        self.loop.show_asked()

    def cancel(self) -> None:
        playing = self.loop.playing
        if playing is not None:
            self.loop.stage.when_idle(playing.cancel)
        elif not self.loop.is_idle:
            self.loop.hold.cancel()
        self.loop.show_asked()

    def predict(self) -> None:
        self.predicting.predict()

    def find(self) -> None:
        self.predicting.find(self.steering.ask_plan)

    def undo(self) -> None:
        self.steering.undo()

    @contextmanager
    def training(self) -> Iterator[None]:
        if not self.loop.is_idle:
            yield  # it is measured already
            return
        session = self.model.attached()
        with self.steps.measured(session) as meter, ExitStack() as undo:
            session.observers.add(self.steps)
            undo.callback(session.observers.remove, self.steps)
            self.training_begins(session, meter)
            undo.callback(self.steps.end)
            yield


def _status_line(activity: Activity, model: LiveModel, feed: Feed, changes: PendingChanges, doing: str) -> str:
    """Return the activity of a model, its plan and speed, what is waited for, and what is done beside it."""
    if activity is Activity.GONE:
        return f"{model.name} is deleted: this panel is over"
    parts = [str(activity)]
    newest, plan = feed.newest, changes.plan
    if newest is not None:
        parts = [f"{activity}, step {feed.step}", plan.label]
    if newest is not None and newest.plan == plan.label:
        parts.append(f"{format_seconds(newest.seconds)} a step")
    measured = feed.measurements.get(plan.label)
    if measured is not None and measured.peak_allocated_bytes:
        parts.append(f"peak {measured.peak_text}")
    waiting = (each for each in changes.toggles if each.asked is Asked.PENDING)
    parts += [f"{BY_NAME[each.field].title.lower()} {each.text}" for each in waiting]
    if activity is Activity.IDLE and model.is_left:
        parts.append(f"{model.name} is in no variable of this notebook any more: run %memfit panel again")
    return " · ".join([*parts, *filter(None, [doing])])
