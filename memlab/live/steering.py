"""`Steering`: plans that are asked for, from any thread, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable

from memlab.errors import MemlabError
from memlab.live.feed import Feed
from memlab.live.live_loop import LiveLoop
from memlab.live.live_predictions import Predicting
from memlab.plan import Plan
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.session import Session


class Steering:
    """Changes of the plan of one model, and of the others that train in its loop."""

    def __init__(self, loop: LiveLoop, feed: Feed, predicting: Predicting) -> None:
        self._loop = loop
        self._changes = loop.pending_changes
        self._feed = feed
        self._predicting = predicting
        self._is_undo_waiting = False  # until no cell runs, or something else is asked for

    # -- asking: on any thread -----------------------------------------------------------------

    def ask_plan(self, plan: Plan) -> None:
        """Ask for a whole plan."""
        self.ask(lambda: self._changes.ask_plan(plan))

    def ask(self, note: Callable[[], Plan | None]) -> None:
        """Note what is asked for, and request the plan that is wanted now."""
        self._loop.views.errors.clear()
        self._is_undo_waiting = False
        with self._loop.lock:
            plan = note()
        if plan is not None:
            # where nothing trains, it may be known already that it does not apply to the batch at hand
            known = self._predicting.known.refusal_of(plan) if self._loop.is_idle else ""
            if known:
                self.refuse(plan, known)
            else:
                self._request(plan)
        self._loop.show_asked()

    def undo(self) -> None:
        """Give the workload back as it was; while a cell trains it, take every setting off."""
        playing, session = self._loop.playing, self._loop.model.session
        if not self._loop.is_idle and playing is None:  # a cell trains, be it paused
            with self._loop.lock:
                self._changes.forget_past()
            self.ask_plan(Plan())
            return
        if playing is not None:
            self._loop.stage.when_idle(playing.cancel)
        elif session is not None:
            # for a loop that comes before this is done, or that trains without the magic
            session.switching.ask(Plan())
        self._is_undo_waiting = True
        self._loop.when_idle(self._undo)

    def _undo(self) -> None:
        if not self._is_undo_waiting:
            return
        self._is_undo_waiting = False
        session = self._loop.model.session
        if session is not None:
            session.undo()
        self.undone()

    def undone(self) -> None:
        """Note that the workload is as it was: of no setting is there anything to say."""
        with self._loop.lock:
            self._changes.forget(Plan())
            self._feed.events.append("everything is as it was")
        self._loop.views.draw()

    # -- applying, where nothing trains --------------------------------------------------------

    def _request(self, plan: Plan) -> None:
        session = self._loop.model.session
        if session is None:
            self._loop.when_idle(lambda: self._begin(plan))
            return
        session.switching.ask(plan)
        if not all(each.is_idle for each in self._loop.together):
            # the next click on any model of a loop that runs adds to this one
            for other in session.companions:
                other.switching.ask(plan)
        if self._loop.is_idle:
            self._loop.stage.when_idle(self._apply_waiting)
        elif self._loop.playing is not None:
            self._loop.views.hurry()

    def _begin(self, plan: Plan) -> None:
        """Apply a plan to a model that has no session."""
        if self._changes.target != plan:
            return
        try:
            session = self._loop.model.session or self._loop.model.attached()
        except MemlabError as error:
            self.refuse(plan, str(error))
            return
        session.switching.ask(plan)
        self._apply_waiting()

    def apply_waiting_when_idle(self) -> None:
        """Apply what still waits for a step, where none comes."""
        session = self._loop.model.session
        if session is not None and session.pending is not None:
            self._loop.stage.when_idle(self._apply_waiting)

    def _apply_waiting(self) -> None:
        """Apply what was asked for, on the main thread, unless something trains."""
        session = self._loop.model.session
        if session is None or session.pending is None or not self._loop.is_idle:
            return
        plan = session.pending
        try:
            session.switch(plan, now=True, on_trial=True)
        except Exception as error:
            if not isinstance(error, MemlabError) and not is_out_of_memory(error):
                raise
            session.switching.ask(None)
            self.refuse(plan, str(error).splitlines()[0])
        self._loop.views.draw()
        self._predicting.go_on()

    # -- what becomes of it --------------------------------------------------------------------

    def training_begins(self, session: Session) -> None:
        """Ask the session of a cell for what was asked for before it came."""
        self._is_undo_waiting = False  # it has asked for the plan that changes nothing, which comes with the first step
        with self._loop.lock:
            wanted = self._changes.ask_again(session.plan)
        if wanted is not None:
            session.switching.ask(wanted)

    def note_applied(self, plan: Plan) -> None:
        """Note that a plan has come into force, asked for or not."""
        with self._loop.lock:
            session, before = self._loop.model.session, self._changes.plan
            step = (session.steps if session is not None else self._feed.step) + 1
            self._changes.note_applied(plan, step)
            self._feed.take_in()
            self._feed.plan_changed(plan, step)
            if plan != before:
                self._feed.events.append(f"step {step}: {before.label} → {plan.label}")
        self._loop.draw_soon()

    def asked_elsewhere(self, plan: Plan) -> None:
        """Show what was asked for in another panel, of a model that trains in the same loop."""
        with self._loop.lock:
            if plan == (self._changes.target or self._changes.plan):
                return
            self._changes.ask_plan(plan)
        self._loop.views.draw(figures=False)

    def refuse(self, plan: Plan, reason: str) -> None:
        """Note that a plan does not apply, and go on to what else was asked for."""
        with self._loop.lock:
            waiting = self._changes.target
            wanted = self._changes.note_refused(plan, reason)
            self._feed.events.append(f"refused {plan.label}: {reason}")
        session = self._loop.model.session
        # what was asked for since holds the settings that are refused
        if session is None or session.pending in (None, waiting):
            if wanted is not None:
                self._request(wanted)
            elif session is not None:
                session.switching.ask(None)
        self._loop.draw_soon()
