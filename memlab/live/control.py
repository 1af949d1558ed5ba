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

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MemlabError, SessionError, TraceError, WorkloadError
from memlab.live.feed import Feed
from memlab.live.live_model import NEEDS_LOSS, LiveModel, steps_of
from memlab.live.live_predictions import LivePredictions, calibration
from memlab.live.pending_changes import PendingChanges
from memlab.live.source import Can
from memlab.live.stage import Hold, Playing, Stage
from memlab.live.views import Drawn, Views
from memlab.measuring.beside import meter_of
from memlab.measuring.device import device_for
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.plan.fields import BY_NAME
from memlab.records import Measurement, Prediction
from memlab.records.live_state import Activity, Asked, Moment
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.observer import Observer
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.workload import Workload
from memlab.session import Session, fit, session_of
from memlab.units import format_bytes, format_seconds

_MOST_EVENTS = 20
# between the end of a cell and predictions: where many cells run one after another, each would wait for one
_QUIET_SECONDS = 0.5
_RUNNING = (Activity.TRAINING, Activity.MEASURING)


_controls: MutableMapping[nn.Module, Control] = WeakIdKeyDictionary()


def control_of(model: nn.Module) -> Control:
    """Return what follows and steers a model's run: one for all its sessions, cells and panels."""
    control = _controls.get(model)
    if control is None:
        control = _controls[model] = Control(model)
    return control


class _Steps(Observer):
    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._ended()


class Control(Observer):
    """The live run of one model; a `memlab.live.source.Source`.

    It is long because asking, training and resting change one state under one lock.
    """

    def __init__(self, model: nn.Module, stage: Stage | None = None) -> None:
        self._events: deque[str] = deque(maxlen=_MOST_EVENTS)
        self.feed = Feed(self._events.append)  # what was measured
        self.stage = stage or Stage()  # as given; a panel that is opened later may bring its own
        self.world = ""  # how clicks reach the run, in words, where that is not for the panel to find out
        self.model = LiveModel(model, self._model_gone)  # with what is known of training it
        self.views = Views()
        self.capacity_bytes: int | None = None
        # called when a run of its own has ended, with what was measured
        self.run_ended: Callable[[Moment], None] | None = None
        # whether another cell runs beside the main thread, and may come to train this model
        self.is_taken: Callable[[], bool] = bool
        self._title = f"memfit · {self.model.name}"
        self._pending_changes = PendingChanges()
        self._live_predictions = LivePredictions()
        self._numbers = count()  # of moments
        self._budget_bytes: int | None = None
        self._doing = ""
        self._hold = Hold()
        self._is_beside = False  # whether the hold is another control's, whose loop trains this model as well
        self._is_undo_waiting = False  # until no cell runs, or something else is asked for
        self._playing: Playing | None = None
        self._predicting: Playing | None = None
        self._is_predictable = True
        self._lock = threading.RLock()

    # -- what it follows -----------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        return self.model.session

    def follow(self, session: Session) -> None:
        """Listen to a session; harmless when it does already."""
        if all(observer is not self for observer in session.observers.all):
            session.observers.add(self)
        if session.steps < self.feed.step and self.session is not session:
            with self._lock:
                self.feed.begin_anew()
        self.model.follow(session)
        self._pending_changes.plan = session.plan
        if session.pending is not None:
            self._pending_changes.ask_plan(session.pending)
        if self.feed.meter is None and self.feed.step == 0:
            self._title = f"memfit · {session.workload.describe()}"

    def begin(self, workload: Workload, capacity_bytes: int | None = None, budget_bytes: int | None = None) -> None:
        """Take a workload under control, with its batch where that is known: a session that only watches, unless it has one."""
        self.follow(session_of(workload.model) or fit(workload.held_weakly()))
        if workload.batch is not None:
            self.model.batch, self.model.loss_fn = workload.batch, workload.loss_fn
        self.capacity_bytes = capacity_bytes or self.capacity_bytes
        self._budget_bytes = budget_bytes or self._budget_bytes
        self.draw()  # panels that are open already

    def training_begins(self, session: Session, meter: Meter, beside: Control | None = None) -> None:
        """A cell trains the model from now on, perhaps beside that of another control, and a meter measures it."""
        if self._playing is not None:
            self._playing.cancel()
        self._is_undo_waiting = False  # it has asked for the plan that changes nothing, which comes with the first step
        self.follow(session)
        if beside is not None:
            self._hold, self._is_beside = beside._hold, True
        # asked for when the cell ran already and had no session yet
        with self._lock:
            wanted = self._pending_changes.ask_again(session.plan)
        if wanted is not None:
            session.switching.ask(wanted)
        self._watch(session, meter, Activity.TRAINING)

    @contextmanager
    def training(self) -> Iterator[None]:
        if self._activity is not Activity.IDLE:
            yield  # it is measured already
            return
        session = self._attached()
        with self._measured(session) as meter, ExitStack() as undo:
            steps = _Steps(self.stepped)
            session.observers.add(steps)
            undo.callback(session.observers.remove, steps)
            self.training_begins(session, meter)
            undo.callback(self.training_ended)
            yield

    @contextmanager
    def _measured(self, session: Session) -> Iterator[Meter]:
        """A meter that is told of the session's steps."""
        with ExitStack() as undo:
            device = undo.enter_context(closing(device_for(session.workload.device, self.capacity_bytes)))
            meter = undo.enter_context(closing(meter_of(lambda: [session], device)))
            session.observers.add(meter)
            undo.callback(session.observers.remove, meter)
            meter.plan_changed(session.plan)
            yield meter

    def stepped(self) -> None:
        """A step has ended; on the training thread, after the meter has been told."""
        if not self.views.due():
            return  # the meter keeps the steps until somebody looks
        with self._lock:
            self.feed.take_in()
        self.views.draw_when_due(self.moment)

    def know(self, measurements: Iterable[Measurement] = (), predictions: Iterable[Prediction] = ()) -> None:
        """Take in what was measured and predicted elsewhere."""
        with self._lock:
            self.feed.know(measurements)
            self._live_predictions.know(predictions)

    def _watch(self, session: Session, meter: Meter, activity: Activity) -> None:
        is_beside = threading.current_thread() is not threading.main_thread()
        self.world = "the cell trains in the background: clicks are applied at the next step" if is_beside else ""
        self.capacity_bytes = meter.device.capacity_bytes
        self._title = f"memfit · {session.workload.describe().rpartition(' · ')[0]} · {meter.device.name}"
        if not self._is_beside:
            self._hold.reset(activity)
        with self._lock:
            self.feed.begin(meter, session.steps)
        self.views.begin_anew()
        self.draw()

    def training_ended(self) -> None:
        with self._lock:
            self.feed.end()
        self.world = ""
        if self._is_beside:
            self._hold, self._is_beside = Hold(), False
        self._hold.reset(Activity.IDLE)
        self.draw()
        self._request_waiting()

    # -- observer: on the training thread ------------------------------------------------------

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer, for the session after this one."""
        self.model.optimizer_found(optimizer)

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self.model.returns_loss = loss is not None

    def step_boundary(self) -> None:
        """Stand still, or end, where that was asked for."""
        if self._hold.is_off:
            return
        session = self.session if self._is_beside else None
        if session is not None and any(each.position.is_within_step for each in session.companions):
            return  # another model of the loop has been called and not stepped: it is not between two steps
        with self._lock:
            # many short steps are taken in together
            self.feed.take_in()
        # steps of its own are not advanced while they are paused: a cell that is run meanwhile must not wait for them
        if not self._hold.is_cancelled and self._playing is None:
            self._stand_still()
        self._hold.end_if_cancelled(self.feed.step)

    def _stand_still(self) -> None:
        if self.feed.meter is not None:
            self.feed.meter.pause()
        with self._hold.at_rest():
            self._draw_all()
            self._hold.wait()
        self._draw_all()

    def plan_changed(self, plan: Plan) -> None:
        with self._lock:
            session, before = self.session, self._pending_changes.plan
            step = (session.steps if session is not None else self.feed.step) + 1
            self._pending_changes.came_true(plan, step)
            self.feed.take_in()
            self.feed.plan_changed(plan, step)
            self._events.append(f"step {step}: {before.label} → {plan.label}")
        self._draw_soon()

    def plan_asked(self, plan: Plan) -> None:
        """Show what was asked for in another panel, of a model that trains in the same loop."""
        with self._lock:
            if plan == (self._pending_changes.target or self._pending_changes.plan):
                return
            self._pending_changes.ask_plan(plan)
        self.draw(figures=False)

    def plan_refused(self, plan: Plan, refusal: MemlabError) -> None:
        self._refuse(plan, str(refusal))

    # -- what views see ------------------------------------------------------------------------

    def moment(self) -> Moment:
        with self._lock:
            self.feed.take_in()
            self.feed.measure()
            session = self.session
            rescuer = session.rescuer if session is not None else None
            activity = Activity.GONE if self.model.is_gone else self._activity
            return Moment(
                title=self._title,
                activity=activity,
                step=self.feed.step,
                plan=self._pending_changes.plan,
                pending=self._pending_changes.target,
                toggles=self._pending_changes.toggles,
                points=self.feed.points,
                changes=tuple(self.feed.changes),
                measurements=tuple(self.feed.measurements.values()),
                predictions=self._live_predictions.predictions,
                budget_bytes=self._budget_bytes,
                capacity_bytes=self.capacity_bytes,
                events=tuple(self._events),
                rescues=tuple(rescuer.rescues) if rescuer is not None else (),
                status=_status_line(activity, self.model.name, self.feed, self._pending_changes, self._doing),
                world=self.world,
                errors=tuple(self.views.errors),
                frame=self.views.frame,
                number=next(self._numbers),
            )

    def can(self) -> Can:
        if self.model.is_gone:
            return Can.NOTHING
        if self._activity is Activity.IDLE:
            is_free = self.stage.can_play and self.model.batch is not None and not self.is_taken()
            of_loop = Can.RUN | Can.AS_RECORDED if self.model.has_own_step else Can.NOTHING
            run = Can.RUN if self.model.has_loss else of_loop
            return Can.SWITCH | Can.UNDO | (run | Can.PREDICT | Can.FIND if is_free else Can.NOTHING)
        paused = Can.RESUME if self._hold.is_held else Can.PAUSE
        return Can.SWITCH | Can.CANCEL | Can.UNDO | paused

    def watch(self, drawn: Drawn, after_seconds: float = 0.0) -> Callable[[], None]:
        return self.views.watch(drawn, after_seconds)

    @property
    def is_watched(self) -> bool:
        return self.views.any_open

    def draw(self, *, figures: bool = True) -> None:
        self.views.draw(self.moment, figures=figures)

    def _draw_soon(self) -> None:
        """Draw at the end of the step; at once where no steps are told of, as in cells without the magic."""
        self.views.hurry()
        if self._activity is Activity.IDLE:
            self.draw()

    def _draw_all(self, *, figures: bool = True) -> None:
        """Draw the views of every model of the loop."""
        for each in self._of_loop:
            if each._hold is self._hold:
                each.draw(figures=figures)

    @property
    def _of_loop(self) -> list[Control]:
        """This control, and those of the other models of its loop."""
        session = self.session
        others = (_controls.get(each.workload.model) for each in (session.companions if session is not None else ()))
        return [self, *(each for each in others if each is not None)]

    # -- what views ask ------------------------------------------------------------------------

    @property
    def _activity(self) -> Activity:
        return self._hold.activity

    def ask(self, field: str, text: str) -> None:
        self._asked(lambda: self._pending_changes.ask(field, text))

    def ask_plan(self, plan: Plan) -> None:
        self._asked(lambda: self._pending_changes.ask_plan(plan))

    def _asked(self, note: Callable[[], Plan | None]) -> None:
        """Note what is asked for, and request the plan that is wanted now."""
        self.views.errors.clear()
        self._is_undo_waiting = False
        with self._lock:
            plan = note()
        if plan is not None:
            self._ask_for(plan)
        self._changed()

    def set_budget(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self.views.hurry()
        self._changed()

    def run(self, *, keep: bool) -> None:
        self.views.errors.clear()
        self._when_idle(lambda: self._run(keep=keep))

    def pause(self) -> None:
        if self._activity in _RUNNING:
            playing = self._playing
            self._hold.begin(is_at_rest=playing is not None)
            if playing is not None:
                playing.pause()
            self._changed()

    def resume(self) -> None:
        was_held = self._hold.is_held
        self._hold.end()
        playing, meter = self._playing, self.feed.meter
        if playing is not None and was_held:
            if meter is not None:
                meter.pause()
            playing.resume()
        self._changed()

    def cancel(self) -> None:
        if self._playing is not None:
            playing = self._playing
            self.stage.when_idle(playing.cancel)
        elif self._activity is not Activity.IDLE:
            self._hold.cancel()
        self._changed()

    def predict(self) -> None:
        self._when_idle(self._predict)

    def find(self) -> None:
        """Ask for the fastest plan that is predicted to fit the budget; what is not predicted yet is predicted first."""
        self.views.errors.clear()
        self._when_idle(lambda: self._predict(then_choose=True))

    def undo(self) -> None:
        """Give the workload back as it was; while a cell trains it, take every setting off."""
        playing = self._playing
        if self._activity is not Activity.IDLE and playing is None:  # a cell trains, be it paused
            self.ask_plan(Plan())
            return
        if playing is not None:
            self.stage.when_idle(playing.cancel)
        elif self.session is not None:
            # for a loop that comes before this is done, or that trains without the magic
            self.session.switching.ask(Plan())
        self._is_undo_waiting = True
        self._when_idle(self._undo)

    # -- doing it ------------------------------------------------------------------------------

    def _ask_for(self, plan: Plan) -> None:
        """Request a plan, unless nothing trains and it is known not to apply to the batch at hand."""
        known = self._live_predictions.refusal_of(plan) if self._activity is Activity.IDLE else ""
        if known:
            self._refuse(plan, known)
        else:
            self._request(plan)

    def _request(self, plan: Plan) -> None:
        session = self.session
        if session is None:
            self._when_idle(lambda: self._begin(plan))
            return
        session.switching.ask(plan)
        if any(each._activity is not Activity.IDLE for each in self._of_loop):
            # the next click on any model of a loop that runs adds to this one
            for other in session.companions:
                other.switching.ask(plan)
        if self._activity is Activity.IDLE:
            self.stage.when_idle(self._apply_waiting)
        elif self._playing is not None:
            self.views.hurry()

    def _begin(self, plan: Plan) -> None:
        """Apply a plan to a model that has no session."""
        if self._pending_changes.target != plan:
            return
        try:
            session = self.session or self._attached()
        except SessionError as error:
            self._refuse(plan, str(error))
            return
        session.switching.ask(plan)
        self._apply_waiting()

    def _apply_waiting(self) -> None:
        """Apply what was asked for, on the main thread, unless something trains."""
        session = self.session
        if session is None or session.pending is None or self._activity is not Activity.IDLE:
            return
        plan = session.pending
        try:
            session.switch(plan, now=True, on_trial=True)
        except Exception as error:
            if not isinstance(error, MemlabError) and not is_out_of_memory(error):
                raise
            session.switching.ask(None)
            self._refuse(plan, str(error).splitlines()[0])
        self.draw()
        self._predict_on()

    def _model_gone(self) -> None:
        # called by whatever thread collects the model: views are drawn where that does no harm
        with suppress(MemlabError):
            self.stage.when_idle(self.draw)

    def _refuse(self, plan: Plan, reason: str) -> None:
        with self._lock:
            waiting = self._pending_changes.target
            wanted = self._pending_changes.came_to_nothing(plan, reason)
            self._events.append(f"refused {plan.label}: {reason}")
        session = self.session
        # what was asked for since holds the settings that are refused
        if session is None or session.pending in (None, waiting):
            if wanted is not None:
                self._request(wanted)
            elif session is not None:
                session.switching.ask(None)
        self._draw_soon()

    def _attached(self) -> Session:
        session = self.model.attached()
        self.follow(session)
        return session

    def _run(self, *, keep: bool) -> None:
        workload = self.model.workload()
        if not self.model.has_loss and (keep or not self.model.has_own_step):
            raise WorkloadError(NEEDS_LOSS)
        if self._playing is not None or Can.RUN not in self.can():
            return
        self._stop_predicting()
        steps = self._measured_steps(workload, self._attached(), keep=keep)
        self._playing = self.stage.play(steps, self._run_ended)

    def _measured_steps(self, workload: Workload, session: Session, *, keep: bool) -> Iterator[float]:
        """Steps as of `steps_of`, measured and rescued as those of a cell."""
        with self._measured(session) as meter, ExitStack() as undo:
            if session.rescuer is None:
                session.accept(Rescuer(capacity_bytes=meter.device.capacity_bytes))
                undo.callback(session.dismiss)
            self._watch(session, meter, Activity.MEASURING)
            undo.callback(self.training_ended)
            # last in, first out: what the steps changed is put back while everything else still stands
            for loss in undo.enter_context(closing(steps_of(workload, session, keep=keep))):
                self.stepped()
                yield loss

    def _run_ended(self, error: BaseException | None) -> None:
        self._playing = None
        self._hold.reset(Activity.IDLE)
        if error is not None:
            self.views.report(error)
        self.draw()
        self._request_waiting()
        self._predict_on()
        if self.run_ended is not None and self.feed.step:
            self.run_ended(self.moment())

    def _request_waiting(self) -> None:
        session = self.session
        if session is not None and session.pending is not None:
            self.stage.when_idle(self._apply_waiting)

    def _undo(self) -> None:
        if not self._is_undo_waiting:
            return
        self._is_undo_waiting = False
        session = self.session
        if session is not None:
            session.undo()
        with self._lock:
            self._pending_changes.forget(Plan())
            self._events.append("everything is as it was")
        self.draw()

    # -- predicting ---------------------------------------------------------------------------

    def _predict_on(self) -> None:
        """Predict what is not predicted yet, where somebody looks and it can be done."""
        if self.is_watched and self.model.batch is not None and self._is_predictable:
            self.predict()

    def _predict(self, *, then_choose: bool = False) -> None:
        self.model.workload()
        if Can.PREDICT not in self.can():
            return
        self._stop_predicting()
        after_seconds = 0.0 if then_choose else _QUIET_SECONDS
        steps = self._predicted(then_choose=then_choose)
        self._predicting = self.stage.play(steps, self._predictions_ended, after_seconds)

    def _stop_predicting(self) -> None:
        predicting, self._predicting = self._predicting, None
        if predicting is not None:
            predicting.cancel()

    def _predicted(self, *, then_choose: bool) -> Iterator[None]:
        workload = self.model.workload()
        measured = calibration(self.feed.measurements.values(), workload)
        for doing in self._live_predictions.plan_by_plan(
            workload, self._pending_changes.plan, measured, every=then_choose
        ):
            self._doing = doing
            if self.views.are_figures_due():
                self.draw(figures=False)
            yield
        if not then_choose:
            return
        if self._budget_bytes is None:
            raise MemlabError("find a plan: set a budget first")
        self.ask_plan(self._live_predictions.fastest_within(self._budget_bytes))

    def _predictions_ended(self, error: BaseException | None) -> None:
        was_stopped, self._predicting, self._doing = self._predicting is None, None, ""
        if error is not None:
            self._is_predictable = not isinstance(error, TraceError)
            self.views.report(error)
        elif not was_stopped and not self._live_predictions.is_complete:
            # a cell came in between: the rest is predicted when it has ended
            self.predict()
        self.draw()

    def _changed(self) -> None:
        """Show what was asked, in every panel of the loop: figures as well where no steps come to draw them."""
        try:
            self._draw_all(figures=self._activity not in _RUNNING)
        except Exception as error:  # noqa: BLE001 - whoever asks is a widget's callback, which swallows errors
            self.views.report(error)

    def _when_idle(self, work: Callable[[], None]) -> None:
        """Do something as soon as no cell runs, and tell what goes wrong."""

        def told() -> None:
            try:
                work()
            except MemlabError as error:
                self._pending_changes.target = None
                self.views.report(error)
                self.draw()

        self.stage.when_idle(told)


def _status_line(activity: Activity, name: str, feed: Feed, changes: PendingChanges, doing: str) -> str:
    """Return the activity of a model called `name`, its plan and speed, what is waited for, and what is done beside it."""
    if activity is Activity.GONE:
        return f"{name} is deleted: this panel is over"
    parts = [str(activity)]
    newest, plan = feed.newest, changes.plan
    if newest is not None:
        parts = [f"{activity}, step {feed.step}", plan.label]
    if newest is not None and newest.plan == plan.label:
        parts.append(f"{format_seconds(newest.seconds)} a step")
    measured = feed.measurements.get(plan.label)
    if measured is not None and measured.peak_allocated_bytes:
        parts.append(f"peak {format_bytes(measured.peak_allocated_bytes)}")
    waiting = (each for each in changes.toggles if each.asked is Asked.PENDING)
    parts += [f"{BY_NAME[each.field].title.lower()} {each.text}" for each in waiting]
    return " · ".join([*parts, *filter(None, [doing])])
