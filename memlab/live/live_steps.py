"""`LiveSteps`: the steps of a model while a meter measures them. `OwnRun`: those that a panel runs by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import islice

import torch

from memlab.errors import WorkloadError
from memlab.live.feed import Feed
from memlab.live.live_loop import LiveLoop
from memlab.live.live_model import steps_of
from memlab.live.live_predictions import Predicting
from memlab.live.source import NEEDS_LOSS, Can
from memlab.live.steering import Steering
from memlab.measuring.device import device_for
from memlab.measuring.loop_meter import meter_of
from memlab.measuring.steps import Meter
from memlab.records.live_state import Activity, Moment
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload
from memlab.session import Session


class LiveSteps(Observer):
    """Steps of a cell or a panel: taken in for views by their pace, and held or ended between two of them."""

    def __init__(self, loop: LiveLoop, feed: Feed, steering: Steering) -> None:
        self.title = f"memfit · {loop.model.name}"  # what trains, and where
        self.world = ""  # how clicks reach the run, in words, where that is not for the panel to find out
        self.capacity_bytes: int | None = None
        self._loop = loop
        self._feed = feed
        self._steering = steering

    @contextmanager
    def measured(self, session: Session) -> Iterator[Meter]:
        """A meter that is told of the session's steps."""
        with ExitStack() as undo:
            device = undo.enter_context(closing(device_for(session.workload.device, self.capacity_bytes)))
            meter = undo.enter_context(closing(meter_of(lambda: [session], device)))
            session.observers.add(meter)
            undo.callback(session.observers.remove, meter)
            meter.plan_changed(session.plan)
            yield meter

    def begin(self, session: Session, meter: Meter, activity: Activity) -> None:
        """Follow a meter, and show that steps are made."""
        is_beside = threading.current_thread() is not threading.main_thread()
        self.world = "the cell trains in the background: clicks are applied at the next step" if is_beside else ""
        self.capacity_bytes = meter.device.capacity_bytes
        self.title = f"memfit · {session.workload.describe().rpartition(' · ')[0]} · {meter.device.name}"
        if not self._loop.is_beside:
            self._loop.hold.reset(activity)
        with self._loop.lock:
            self._feed.begin(meter, session.steps)
        self._loop.views.begin_anew()
        self._loop.views.draw()

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self.stepped()

    def stepped(self) -> None:
        """Have views drawn when it is time; on the training thread, after the meter has been told of a step."""
        if not self._loop.views.due():
            return  # the meter keeps the steps until somebody looks
        with self._loop.lock:
            self._feed.take_in()
        self._loop.views.draw_when_due()

    def end(self) -> None:
        """Let go of the meter; what was asked for after the last step is applied when no cell runs."""
        with self._loop.lock:
            self._feed.end()
        self.world = ""
        self._loop.end()
        self._loop.views.draw()
        self._steering.apply_waiting_when_idle()

    def boundary(self) -> None:
        """Stand still, or end, where that was asked for. Raises `Cancelled`: the loop is to end between two steps."""
        hold = self._loop.hold
        if hold.is_off:
            return
        session = self._loop.model.session if self._loop.is_beside else None
        if session is not None and any(each.position.is_within_step for each in session.companions):
            return  # another model of the loop has been called and not stepped: it is not between two steps
        with self._loop.lock:
            # many short steps are taken in together
            self._feed.take_in()
        # steps of its own are not advanced while they are paused: a cell that is run meanwhile must not wait for them
        if not hold.is_cancelled and self._loop.playing is None:
            self._stand_still()
        hold.end_if_cancelled(self._feed.step)

    def _stand_still(self) -> None:
        if self._feed.meter is not None:
            self._feed.meter.pause()
        with self._loop.hold.at_rest():
            self._loop.draw_all()
            self._loop.hold.wait()
        self._loop.draw_all()


class OwnRun:
    """Training steps on the batch at hand, measured and rescued as those of a cell."""

    def __init__(self, loop: LiveLoop, steps: LiveSteps, steering: Steering, predicting: Predicting) -> None:
        # called when one has ended, with what was measured
        self.ended: Callable[[Moment], None] | None = None
        self.doing = ""  # how far a run of so many steps is, in words; empty for others
        self._loop = loop
        self._steps = steps
        self._steering = steering
        self._predicting = predicting

    def begin(self, *, keep: bool, steps: int | None = None) -> None:
        """Run so many steps, or until cancelled; unless they are kept, what they change is put back.

        Raises:
            WorkloadError: there is no batch, or no loss to train on it.
        """
        model = self._loop.model
        workload = model.workload()
        if not model.has_loss and (keep or not model.has_own_step):
            raise WorkloadError(NEEDS_LOSS)
        if self._loop.playing is not None or Can.RUN not in self._loop.can():
            return
        self._predicting.stop()
        played = self._measured_steps(workload, model.attached(), steps, keep=keep)
        self._loop.playing = self._loop.stage.play(played, self._ended)

    def _measured_steps(
        self, workload: Workload, session: Session, steps: int | None, *, keep: bool
    ) -> Iterator[float]:
        """Steps as of `steps_of`, at most so many."""
        with self._steps.measured(session) as meter, ExitStack() as undo:
            if session.rescuer is None:
                session.accept(Rescuer(capacity_bytes=meter.device.capacity_bytes))
                undo.callback(session.dismiss)
            self._steps.begin(session, meter, Activity.MEASURING)
            undo.callback(self._steps.end)
            # last in, first out: what the steps changed is put back while everything else still stands
            every = undo.enter_context(closing(steps_of(workload, session, keep=keep)))
            for number, loss in enumerate(islice(every, steps), 1):
                self.doing = f"{number} of {steps} steps" if steps is not None else ""
                self._steps.stepped()
                yield loss

    def _ended(self, error: BaseException | None) -> None:
        self._loop.playing, self.doing = None, ""
        self._loop.hold.reset(Activity.IDLE)
        if error is not None:
            self._loop.views.report(error)
        self._loop.views.draw()
        self._steering.apply_waiting_when_idle()
        self._predicting.go_on()
        if self.ended is not None and (moment := self._loop.views.moment()).step:
            self.ended(moment)
