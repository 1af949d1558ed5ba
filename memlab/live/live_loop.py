"""`LiveLoop`: what goes on with a model, what may be asked for meanwhile, and showing it in every panel of the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn

from memlab.errors import MemlabError
from memlab.live.live_model import LiveModel
from memlab.live.pending_changes import PendingChanges
from memlab.live.source import Can
from memlab.live.stage import Hold, Playing, Stage
from memlab.live.views import Views
from memlab.records.live_state import Activity

RUNNING = (Activity.TRAINING, Activity.MEASURING)


class LiveLoop:
    """The loop that trains a model, or the steps that a panel runs in its place."""

    def __init__(
        self, model: LiveModel, views: Views, stage: Stage, loop_of: Callable[[nn.Module], LiveLoop | None]
    ) -> None:
        self.model = model
        self.views = views
        self.stage = stage  # as given; a panel that is opened later may bring its own
        self.lock = threading.RLock()  # of the pending changes, and of what is measured
        self.pending_changes = PendingChanges()
        # whether another cell runs beside the main thread, and may come to train this model
        self.is_taken: Callable[[], bool] = lambda: False
        self.playing: Playing | None = None  # steps that a panel runs
        self.hold = Hold()
        self.is_beside = False  # whether the hold is that of another model, whose loop trains this one as well
        self._loop_of = loop_of

    @property
    def is_idle(self) -> bool:
        return self.hold.activity is Activity.IDLE

    @property
    def together(self) -> list[LiveLoop]:
        """Loops of all models that train together, this one first."""
        session = self.model.session
        companions = session.companions if session is not None else ()
        others = (self._loop_of(each.workload.model) for each in companions)
        return [self, *(each for each in others if each is not None)]

    def can(self) -> Can:
        """Return what may be asked for now."""
        if self.model.is_gone:
            return Can.NOTHING
        if self.is_idle:
            is_free = self.stage.can_play and self.model.batch is not None and not self.is_taken()
            of_loop = Can.RUN | Can.AS_RECORDED if self.model.has_own_step else Can.NOTHING
            run = Can.RUN if self.model.has_loss else of_loop
            return Can.SWITCH | Can.UNDO | (run | Can.PREDICT | Can.FIND if is_free else Can.NOTHING)
        paused = Can.RESUME if self.hold.is_held else Can.PAUSE
        return Can.SWITCH | Can.CANCEL | Can.UNDO | paused

    def join(self, first: LiveLoop) -> None:
        """Share pauses and the end with the loop of another model, which trains this one as well."""
        self.hold, self.is_beside = first.hold, True

    def end(self) -> None:
        """Note that nothing trains any more."""
        if self.is_beside:
            self.hold, self.is_beside = Hold(), False
        self.hold.reset(Activity.IDLE)

    def when_idle(self, work: Callable[[], None]) -> None:
        """Do something as soon as no cell runs, and tell what goes wrong."""

        def told() -> None:
            try:
                work()
            except MemlabError as error:
                self.views.report(error)
                self.views.draw()

        self.stage.when_idle(told)

    def draw_all(self, *, figures: bool = True) -> None:
        """Draw the views of every model of the loop."""
        for each in self.together:
            if each.hold is self.hold:
                each.views.draw(figures=figures)

    def draw_soon(self) -> None:
        """Draw at the end of the step; at once where no steps are told of, as in cells without the magic."""
        self.views.hurry()
        if self.is_idle:
            self.views.draw()

    def show_asked(self) -> None:
        """Show what was asked, in every panel of the loop: figures as well where no steps come to draw them."""
        try:
            self.draw_all(figures=self.hold.activity not in RUNNING)
        except Exception as error:  # noqa: BLE001 - whoever asks is a widget's callback, which swallows errors
            self.views.report(error)
