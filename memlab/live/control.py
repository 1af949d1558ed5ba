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
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from inspect import ismethod
from time import perf_counter
from typing import Any

import torch
from torch import nn

from memlab.errors import MemlabError, PlanError, WorkloadError
from memlab.live.effects import settings_beside
from memlab.live.feed import Feed
from memlab.live.pace import Pace
from memlab.live.rehearsing import steps_of
from memlab.live.source import Can
from memlab.live.stage import AtOnce, Playing, Stage
from memlab.measuring.steps import Meter, device_for, shapes_of
from memlab.moment import Activity, Asked, Moment, Toggle
from memlab.observer import Observer
from memlab.plan import FIELDS, Plan
from memlab.predicting import predict_each
from memlab.records import Fit, Measurement, Prediction
from memlab.rescue.rescuer import Rescuer
from memlab.search.finding import considered
from memlab.session import Session, fit, session_of
from memlab.units import format_bytes, format_seconds
from memlab.workload import Workload

_MOST_EVENTS = 20
_MOST_ERRORS = 5
_LOOK_SECONDS = 0.1
_RUNNING = (Activity.TRAINING, Activity.MEASURING)

Drawn = Callable[[Moment], None]


class Cancelled(KeyboardInterrupt):
    """Training was cancelled from a panel, between two steps.

    It is a `KeyboardInterrupt`, so that every loop ends by it as it does by Ctrl-C.
    """


_controls: weakref.WeakKeyDictionary[nn.Module, Control] = weakref.WeakKeyDictionary()


def control_of(model: nn.Module) -> Control:
    """What follows and steers a model's run: one for all its sessions, cells and panels."""
    control = _controls.get(model)
    if control is None:
        control = _controls[model] = Control(model)
    return control


class Control(Observer):
    """The live run of one model; a `memlab.live.source.Source`.

    Args:
        model: whose run it is; not kept alive.
        stage: does what must not meet a running cell.

    Attributes:
        feed: what was measured.
        stage: as given; a panel that is opened later may bring its own.
        world: how clicks reach the run, in words, where that is not for the panel to find out.
        batch: what the model is called with, to measure and to foretell with; None where it is not known yet.
        loss_fn: called as ``loss_fn(output, target)``; None when the model returns its own loss.
        run_ended: called when a run of its own has ended, with what was measured.
        is_taken: whether another cell runs beside the main thread, and may come to train this model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> control = Control(model)
        >>> with fit(Workload(model, optimizer)) as session:
        ...     control.follow(session)
        ...     control.ask("accumulation", "2")
        ...     control.moment().toggles[0].text
        'applied at step 1'
    """

    def __init__(self, model: nn.Module, stage: Stage | None = None) -> None:
        self.feed = Feed()
        self.stage: Stage = stage or AtOnce()
        self.world = ""
        self.batch: Any = None
        self.loss_fn: Callable[..., torch.Tensor] | None = None
        self.capacity_bytes: int | None = None
        self.run_ended: Callable[[Moment], None] | None = None
        self.is_taken: Callable[[], bool] = bool
        self._model = weakref.ref(model, self._model_gone)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._name = type(model).__name__
        self._session: weakref.ref[Session] | None = None
        self._title = f"memfit · {self._name}"
        self._plan = Plan()
        self._target: Plan | None = None
        self._toggles: dict[str, Toggle] = {}
        self._budget_bytes: int | None = None
        self._predictions: dict[str, Prediction] = {}
        self._foretold_for: tuple[Any, ...] | None = None
        self._events: deque[str] = deque(maxlen=_MOST_EVENTS)
        self._errors: deque[str] = deque(maxlen=_MOST_ERRORS)
        self._views: list[Callable[[], Drawn | None]] = []
        self._pace = Pace()
        self._frame = 0
        self._activity = Activity.IDLE
        self._doing = ""
        self._go = threading.Event()
        self._go.set()
        self._is_cancelled = False
        self._playing: Playing | None = None
        self._predicting: Playing | None = None
        self._has_more_to_foretell = False
        self._meter: Meter | None = None
        self._lock = threading.RLock()

    # -- what it follows -----------------------------------------------------------------------

    @property
    def session(self) -> Session | None:
        """The session of the model, while it is attached."""
        session = self._session() if self._session is not None else None
        return session if session is not None and session.attached else None

    def follow(self, session: Session) -> None:
        """Listen to a session; harmless when it does already."""
        if all(observer is not self for observer in session.observers):
            session.observers.append(self)
        self._session = weakref.ref(session)
        self._optimizers = [weakref.ref(optimizer) for optimizer in session.workload.optimizers]
        self.loss_fn = self.loss_fn or session.workload.loss_fn
        self.batch = self.batch if self.batch is not None else session.workload.batch
        self._plan = session.plan
        self._name = session.workload.name
        self._title = f"memfit · {session.workload.describe()}"

    def begin(self, workload: Workload, capacity_bytes: int | None = None, budget_bytes: int | None = None) -> None:
        """Take a workload under control: a session that only watches, unless it has one.

        Args:
            workload: with a batch and a `loss_fn`, where they are known.
            capacity_bytes: size the device is to behave as.
            budget_bytes: where the budget line stands at first; None leaves it.
        """
        self.follow(session_of(workload.model) or fit(workload))
        self.loss_fn = workload.loss_fn or self.loss_fn
        self.batch = workload.batch if workload.batch is not None else self.batch
        self.capacity_bytes = capacity_bytes or self.capacity_bytes
        self._budget_bytes = budget_bytes or self._budget_bytes

    def training_begins(self, session: Session, meter: Meter) -> None:
        """A cell trains the model from now on, and a meter measures it."""
        if self._playing is not None:
            self._playing.cancel()
        self.follow(session)
        self._watch(session, meter, Activity.TRAINING)

    def training_ended(self) -> None:
        """The cell is over."""
        self._rest()

    def stepped(self) -> None:
        """A step has ended; on the training thread, after the meter has been told."""
        self.feed.take_in()
        if self._pace.is_due():
            began = perf_counter()
            self.draw()
            self._pace.spent(perf_counter() - began)

    def know(self, measurements: Iterable[Measurement] = (), predictions: Iterable[Prediction] = ()) -> None:
        """Take in what was measured and foretold elsewhere."""
        with self._lock:
            self.feed.know(measurements)
            self._predictions |= {each.plan: each for each in predictions}

    def _watch(self, session: Session, meter: Meter, activity: Activity) -> None:
        self._meter = meter
        is_beside = threading.current_thread() is not threading.main_thread()
        self.world = "the cell trains in the background: clicks are applied at the next step" if is_beside else ""
        self.capacity_bytes = meter.device.capacity_bytes
        self._title = f"memfit · {session.workload.describe().rpartition(' · ')[0]} · {meter.device.name}"
        self._is_cancelled = False
        self._go.set()
        self._activity = activity
        self.feed.begin(meter, session.steps)
        self._pace = Pace()
        self.draw()

    def _rest(self) -> None:
        self.feed.end()
        self._meter = None
        self.world = ""
        self._is_cancelled = False
        self._go.set()
        self._activity = Activity.IDLE
        self.draw()
        session = self.session
        if session is not None and session.pending is not None:
            # asked for after the last step
            self.stage.when_idle(self._apply_waiting)

    # -- observer: on the training thread ------------------------------------------------------

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer, for the session after this one."""
        self._optimizers.append(weakref.ref(optimizer))

    def step_boundary(self) -> None:
        """Stand still, or end, where that was asked for."""
        if not self._go.is_set() and not self._is_cancelled:
            self._stand_still()
        if self._is_cancelled:
            self._is_cancelled = False
            raise Cancelled(f"cancelled from the panel after step {self.feed.step}")

    def _stand_still(self) -> None:
        if self._meter is not None:
            self._meter.pause()
        activity, self._activity = self._activity, Activity.PAUSED
        self.draw()
        try:
            while not self._go.wait(_LOOK_SECONDS):  # short, so that Ctrl-C is noticed everywhere
                pass
        finally:
            self._activity = activity
        self.draw()

    def plan_changed(self, plan: Plan) -> None:
        """Tell which settings have come into force."""
        with self._lock:
            before, self._plan = self._plan, plan
            session = self.session
            step = (session.steps if session is not None else self.feed.step) + 1
            self.feed.plan_changed(plan, step)
            for spec in FIELDS:
                value = spec.text(getattr(plan, spec.name))
                toggle = self._toggles.get(spec.name)
                was_asked = toggle is not None and toggle.asked is Asked.PENDING and toggle.wanted == value
                if was_asked or getattr(plan, spec.name) != getattr(before, spec.name):
                    self._toggles[spec.name] = Toggle(spec.name, value, value, Asked.APPLIED, step)
            if self._target == plan:
                self._target = None
            self._event(f"step {step}: {before.label} → {plan.label}")
            self._pace.hurry()

    def plan_refused(self, plan: Plan, refusal: MemlabError) -> None:
        """Tell which settings were refused, and why."""
        with self._lock:
            self._refuse(plan, str(refusal))

    # -- what views see ------------------------------------------------------------------------

    def moment(self) -> Moment:
        """The run at this moment."""
        with self._lock:
            self.feed.measure()
            session = self.session
            activity = self._activity if self._model() is not None else Activity.GONE
            return Moment(
                title=self._title,
                activity=activity,
                step=self.feed.step,
                plan=self._plan,
                pending=self._target,
                toggles=tuple(self._toggle(spec.name) for spec in FIELDS),
                points=self.feed.points,
                changes=tuple(self.feed.changes),
                measurements=tuple(self.feed.measurements.values()),
                predictions=tuple(self._predictions.values()),
                budget_bytes=self._budget_bytes,
                capacity_bytes=self.capacity_bytes,
                events=tuple(self._events),
                rescues=tuple(session.rescuer.rescues) if session is not None and session.rescuer is not None else (),
                status=self._status(activity),
                world=self.world,
                errors=tuple(self._errors),
                frame=self._frame,
            )

    def can(self) -> Can:
        """What may be asked for now."""
        if self._model() is None:
            return Can.NOTHING
        if self._activity is Activity.IDLE:
            return Can.SWITCH | Can.UNDO | (Can.NOTHING if self.is_taken() else Can.RUN | Can.PREDICT | Can.FIND)
        paused = Can.RESUME if not self._go.is_set() else Can.PAUSE
        return Can.SWITCH | Can.CANCEL | Can.UNDO | paused

    def watch(self, drawn: Drawn) -> Callable[[], None]:
        """Have a view drawn when something has changed; returns what ends that."""
        view: Callable[[], Drawn | None]
        view = weakref.WeakMethod(drawn) if ismethod(drawn) else lambda: drawn
        self._views.append(view)
        return lambda: self._views.remove(view) if view in self._views else None

    @property
    def is_watched(self) -> bool:
        """Whether a view is open."""
        return any(view() is not None for view in self._views)

    def draw(self, *, figures: bool = True) -> None:
        """Draw every view.

        Args:
            figures: with new figures; without, what is cheap: settings and the status.
        """
        if not self._views:
            return
        if figures:
            self._frame += 1
        moment = self.moment()
        for view in tuple(self._views):
            drawn = view()
            if drawn is None:
                self._views.remove(view)
                continue
            try:
                drawn(moment)
            except Exception as error:  # noqa: BLE001 - training must not fail for the sake of a picture
                self.report(error)

    def report(self, error: BaseException) -> None:
        """Tell an error of a callback or of a view; views show it."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if text not in self._errors:
            self._errors.append(text)

    # -- what views ask ------------------------------------------------------------------------

    def ask(self, field: str, text: str) -> None:
        """Ask for one setting."""
        with self._lock:
            beside = self._target or self._plan
            if self._toggle(field).asked is Asked.REFUSED:
                del self._toggles[field]  # what was refused is past: this is another wish
            try:
                plan = beside.with_setting(field, text)
            except PlanError as error:
                value = self._toggle(field).value
                self._toggles[field] = Toggle(field, value, text, Asked.REFUSED, reason=str(error))
                plan = None
        if plan is not None:
            self.ask_plan(plan)
        else:
            self._changed()

    def ask_plan(self, plan: Plan) -> None:
        """Ask for a whole plan."""
        with self._lock:
            self._target = plan if plan != self._plan else None
            for spec in FIELDS:
                value, wanted = (spec.text(getattr(each, spec.name)) for each in (self._plan, plan))
                known = self._toggle(spec.name)
                if wanted != value:
                    self._toggles[spec.name] = Toggle(spec.name, value, wanted, Asked.PENDING)
                elif known.asked is Asked.PENDING:
                    self._toggles[spec.name] = Toggle(spec.name, value, value)
        self._request(plan)
        self._changed()

    def set_budget(self, budget_bytes: int | None) -> None:
        """Move the budget line."""
        self._budget_bytes = budget_bytes
        self._pace.hurry()
        self._changed()

    def run(self, *, keep: bool) -> None:
        """Train on the batch at hand until cancelled; steps that are not kept leave nothing behind."""
        self.stage.when_idle(lambda: self._told(lambda: self._run(keep=keep)))

    def pause(self) -> None:
        """Hold the run before its next step."""
        if self._activity in _RUNNING:
            self._go.clear()
            if self._playing is not None:
                self._playing.pause()
                self._activity = Activity.PAUSED
            self._changed()

    def resume(self) -> None:
        """Go on."""
        self._go.set()
        if self._playing is not None and self._activity is Activity.PAUSED:
            if self._meter is not None:
                self._meter.pause()
            self._activity = Activity.MEASURING
            self._playing.resume()
        self._changed()

    def cancel(self) -> None:
        """End the run before its next step."""
        if self._playing is not None:
            playing = self._playing
            self.stage.when_idle(playing.cancel)
        elif self._activity is not Activity.IDLE:
            self._is_cancelled = True
            self._go.set()
        self._changed()

    def predict(self) -> None:
        """Foretell what each setting would change, while no cell runs."""
        self.stage.when_idle(lambda: self._told(self._predict))

    def find(self) -> None:
        """Ask for the fastest plan that is predicted to fit the budget; what is not foretold yet is foretold first."""
        self.stage.when_idle(lambda: self._told(lambda: self._predict(then_choose=True)))

    def undo(self) -> None:
        """Give the workload back as it was; while it trains, take every setting off."""
        if self._activity is Activity.TRAINING:
            self.ask_plan(Plan())
            return
        if self._playing is not None:
            self.stage.when_idle(self._playing.cancel)
        self.stage.when_idle(lambda: self._told(self._undo))

    # -- doing it ------------------------------------------------------------------------------

    def _request(self, plan: Plan) -> None:
        session = self.session
        if session is None:
            self.stage.when_idle(lambda: self._told(lambda: self._begin(plan)))
        elif self._activity is Activity.IDLE:
            session.ask(plan)
            self.stage.when_idle(self._apply_waiting)
        else:
            session.ask(plan)
            if self._playing is not None:
                self._pace.hurry()

    def _begin(self, plan: Plan) -> None:
        """Apply a plan to a model that has no session."""
        if self._target != plan:
            return
        session = self.session or self._attached()
        session.ask(plan)
        self._apply_waiting()

    def _apply_waiting(self) -> None:
        """Apply what was asked for, on the main thread, unless something trains."""
        session = self.session
        if session is None or session.pending is None or self._activity is not Activity.IDLE:
            return
        plan = session.pending
        try:
            session.switch(plan, now=True)
        except MemlabError as refusal:
            with self._lock:
                session.ask(None)
                self._refuse(plan, str(refusal))
        except torch.OutOfMemoryError as error:
            with self._lock:
                session.ask(None)
                self._refuse(plan, str(error).splitlines()[0])
        self.draw()
        self.predict()

    def _model_gone(self, _model: object) -> None:
        self.batch, self.loss_fn = None, None
        # called by whatever thread collects the model: views are drawn where that does no harm
        with suppress(MemlabError):
            self.stage.when_idle(self.draw)

    def _refuse(self, plan: Plan, reason: str) -> None:
        for spec in FIELDS:
            value, wanted = (spec.text(getattr(each, spec.name)) for each in (self._plan, plan))
            if value != wanted:
                self._toggles[spec.name] = Toggle(spec.name, value, wanted, Asked.REFUSED, reason=reason)
        self._target = None
        self._event(f"refused {plan.label}: {reason}")
        self._pace.hurry()

    def _attached(self) -> Session:
        """A session on the model, made if there is none."""
        model = self._model()
        if model is None:
            raise MemlabError(f"{self._name} is deleted")
        session = session_of(model)
        if session is None:
            optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
            session = fit(Workload(model, optimizers, name=self._name))
        self.follow(session)
        return session

    def _workload(self) -> Workload:
        """The live objects with the batch at hand.

        Raises:
            WorkloadError: there is none yet.
        """
        live = self._attached().workload
        if self.batch is None:
            raise WorkloadError(
                "no batch is known yet: run the cell that trains with %%memfit first, or name one, as in "
                "%memfit panel --batch NAME"
            )
        return Workload(live.model, live.optimizers, self.batch, self.loss_fn, live.scheduler, live.name)

    def _run(self, *, keep: bool) -> None:
        if self._playing is not None or Can.RUN not in self.can():
            return
        self._stop_predicting()
        workload, session = self._workload(), self._attached()
        device = device_for(workload.device, self.capacity_bytes)
        steps = self._measured(workload, session, Meter(workload.model, session.workload.optimizers, device), keep=keep)
        self._playing = self.stage.play(steps, self._run_ended)

    def _measured(self, workload: Workload, session: Session, meter: Meter, *, keep: bool) -> Iterator[float]:
        """Steps of the panel's own, measured and rescued as those of a cell."""
        with ExitStack() as undo:
            undo.callback(meter.device.close)
            undo.callback(meter.close)
            session.observers.append(meter)
            undo.callback(_leave, session, meter)
            meter.plan_changed(session.plan)
            if session.rescuer is None:
                session.accept(Rescuer(capacity_bytes=meter.device.capacity_bytes))
                undo.callback(session.dismiss)
            self._watch(session, meter, Activity.MEASURING)
            undo.callback(self._rest)
            for loss in steps_of(workload, session, keep=keep):
                self.stepped()
                yield loss

    def _run_ended(self, error: BaseException | None) -> None:
        self._playing = None
        self._activity = Activity.IDLE
        if error is not None:
            self.report(error)
        self.draw()
        self._request_waiting()
        if self.is_watched:
            self.predict()
        if self.run_ended is not None and self.feed.step:
            self.run_ended(self.moment())

    def _request_waiting(self) -> None:
        session = self.session
        if session is not None and session.pending is not None:
            self.stage.when_idle(self._apply_waiting)

    def _undo(self) -> None:
        session = self.session
        if session is not None:
            session.undo()
        with self._lock:
            self._target, self._plan = None, Plan()
            self._toggles.clear()
            self._event("everything is as it was")
        self.draw()

    # -- foretelling ---------------------------------------------------------------------------

    def _predict(self, *, then_choose: bool = False) -> None:
        if Can.PREDICT not in self.can():
            return
        self._stop_predicting()
        self._has_more_to_foretell = True
        self._predicting = self.stage.play(self._foretold(then_choose=then_choose), self._predictions_ended)

    def _stop_predicting(self) -> None:
        self._has_more_to_foretell = False
        if self._predicting is not None:
            self._predicting.cancel()

    def _foretold(self, *, then_choose: bool) -> Iterator[None]:
        workload = self._workload()
        self._forget_other_batches(workload)
        wanted = [*settings_beside(self._plan), *settings_beside(Plan())]
        if then_choose:
            wanted += considered(workload, None)
        missing = [plan for plan in dict.fromkeys(wanted) if plan.label not in self._predictions]
        for number, prediction in enumerate(predict_each(workload, plans=missing), 1):
            with self._lock:
                self._predictions[prediction.plan] = prediction
            self._doing = f"predicting, {number} of {len(missing)}"
            if self._pace.is_due():
                self.draw(figures=False)
            yield
        self._has_more_to_foretell = False
        if then_choose:
            self._choose()

    def _forget_other_batches(self, workload: Workload) -> None:
        """What was foretold for a batch of another size is wrong for this one."""
        shapes = shapes_of(workload.batch)
        if self._foretold_for not in (None, shapes):
            self._predictions.clear()
        self._foretold_for = shapes

    def _choose(self) -> None:
        budget_bytes = self._budget_bytes
        if budget_bytes is None:
            raise MemlabError("find a plan: set a budget first")
        fitting = [each for each in self._predictions.values() if each.verdict(budget_bytes).fit is Fit.YES]
        if not fitting:
            smallest = min(
                (each for each in self._predictions.values() if not each.refused),
                key=lambda each: each.needed_bytes,
            )
            raise MemlabError(
                f"no plan is predicted to fit {format_bytes(budget_bytes)}; the smallest, {smallest.plan}, needs "
                f"{format_bytes(smallest.needed_bytes)}"
            )
        best = max(fitting, key=lambda each: (each.samples_per_second, -each.needed_bytes))
        self.ask_plan(Plan.parse("" if best.plan == Plan().label else best.plan))

    def _predictions_ended(self, error: BaseException | None) -> None:
        self._predicting = None
        self._doing = ""
        if error is not None:
            self.report(error)
        elif self._has_more_to_foretell:
            # a cell came in between: the rest is foretold when it has ended
            self.predict()
        self.draw()

    # -- words ---------------------------------------------------------------------------------

    def _status(self, activity: Activity) -> str:
        if activity is Activity.GONE:
            return f"{self._name} is deleted: this panel is over"
        parts = [_ACTIVITY_WORDS[activity]]
        newest = self.feed.newest
        if newest is not None:
            parts[0] += f", step {self.feed.step}"
            parts.append(self._plan.label)
            parts.append(f"{format_seconds(newest.seconds)} a step")
        measured = self.feed.measurements.get(self._plan.label)
        if measured is not None and measured.peak_allocated_bytes:
            parts.append(f"peak {format_bytes(measured.peak_allocated_bytes)}")
        parts += [
            f"{spec.title.lower()} {self._toggle(spec.name).text}" for spec in FIELDS if self._is_under_way(spec.name)
        ]
        if self._doing:
            parts.append(self._doing)
        return " · ".join(parts)

    def _is_under_way(self, field: str) -> bool:
        return self._toggle(field).asked is Asked.PENDING

    def _toggle(self, field: str) -> Toggle:
        spec = next(each for each in FIELDS if each.name == field)
        value = spec.text(getattr(self._plan, field))
        return self._toggles.get(field) or Toggle(field, value, value)

    def _event(self, text: str) -> None:
        self._events.append(text)

    def _changed(self) -> None:
        """Show what was asked: figures as well where no steps come to draw them."""
        try:
            self.draw(figures=self._activity not in _RUNNING)
        except Exception as error:  # noqa: BLE001 - whoever asks is a widget's callback, which swallows errors
            self.report(error)

    def _told(self, work: Callable[[], None]) -> None:
        """Do something and tell what goes wrong."""
        try:
            work()
        except MemlabError as error:
            self._target = None
            self.report(error)
            self.draw()


_ACTIVITY_WORDS = {
    Activity.IDLE: "idle",
    Activity.TRAINING: "training",
    Activity.MEASURING: "measuring",
    Activity.PAUSED: "paused",
    Activity.REPLAYING: "replaying",
}


def _leave(session: Session, observer: Any) -> None:
    session.observers[:] = [one for one in session.observers if one is not observer]
