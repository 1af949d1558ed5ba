"""`Views`: who is drawn when something has changed, and what went wrong on the way. `Pace`: how often a view is drawn."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from inspect import ismethod
from time import monotonic, perf_counter

from memlab.records.live_state import Moment

_MOST_ERRORS = 5

Drawn = Callable[[Moment], None]
_LEAST_SECONDS_BETWEEN = 0.25
# shares of the time that drawing may take; settings and status are cheap: they follow sooner than figures can
_DRAWING_SHARE = 0.005
_STATUS_SHARE = 0.003


@dataclass(frozen=True)
class _View:
    """A view, if it still exists, and the time from which it is drawn."""

    drawn: Callable[[], Drawn | None]
    from_seconds: float


class Views:
    """Views of one run. Methods are held weakly: a view that is dropped is drawn no more."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self.moment = moment  # returns what is drawn
        self.frame = 0  # grows with every drawing that has new figures
        self.errors: deque[str] = deque(maxlen=_MOST_ERRORS)  # of views and callbacks, newest last, in words
        self._views: list[_View] = []
        self._paces: dict[bool, Pace] = {}  # of drawings with figures, and of those without
        self.begin_anew()

    def begin_anew(self, clock: Callable[[], float] = monotonic) -> None:
        """Draw from now on as of a run whose first step is still to come."""
        self._paces = {True: Pace(clock), False: Pace(clock, _STATUS_SHARE)}

    def watch(self, drawn: Drawn, after_seconds: float = 0.0) -> Callable[[], None]:
        """Have a view drawn from now on, or after a while; returns what ends that."""
        made: Callable[[], Drawn | None] = weakref.WeakMethod(drawn) if ismethod(drawn) else lambda: drawn
        view = _View(made, monotonic() + after_seconds)
        self._views.append(view)
        return lambda: self._views.remove(view) if view in self._views else None

    @property
    def any_open(self) -> bool:
        return any(view.drawn() is not None for view in self._views)

    def due(self) -> list[Drawn]:
        """Return what draws the views that are drawn by now."""
        now = monotonic()
        return [drawn for view in self._views if now >= view.from_seconds and (drawn := view.drawn()) is not None]

    def draw(self, *, figures: bool = True) -> None:
        self._views = [view for view in self._views if view.drawn() is not None]
        due = self.due()
        if not due:
            return
        self.frame += figures
        shown = self.moment()
        for drawn in due:
            try:
                drawn(shown)
            except Exception as error:  # noqa: BLE001 - training must not fail for the sake of a picture
                self.report(error)

    def draw_when_due(self) -> None:
        """Draw what it is time for; costs next to nothing where that is nothing."""
        for figures, pace in self._paces.items():
            if pace.is_due():
                began = perf_counter()
                self.draw(figures=figures)
                pace.spent(perf_counter() - began)

    def are_figures_due(self) -> bool:
        return self._paces[True].is_due()

    def hurry(self) -> None:
        """Draw figures as soon as may be: someone waits for them."""
        self._paces[True].hurry()

    def report(self, error: BaseException) -> None:
        """Take note of an error of a callback or of a view, once; the next drawing shows it."""
        self.say(f"{type(error).__name__}: {error}".splitlines()[0])

    def say(self, text: str) -> None:
        """Take note of what went wrong, in words, once."""
        if text not in self.errors:
            self.errors.append(text)


class Pace:
    """Says when to draw next: four times a second at most, and for at most half a percent of the time.

    The first drawing counts no more than a cheap one: it loads what the later ones only use, and would silence a view for
    minutes.
    """

    def __init__(self, clock: Callable[[], float] = monotonic, share: float = _DRAWING_SHARE) -> None:
        self._clock = clock  # tells the time, in seconds
        self._share = share  # of the time that drawing may take
        self._due_seconds = clock()
        self._last_seconds: float | None = None

    def is_due(self) -> bool:
        """Return whether it is time to draw; costs next to nothing."""
        return self._clock() >= self._due_seconds

    def spent(self, seconds: float) -> None:
        """Note that a drawing has just been done."""
        counted = 0.0 if self._last_seconds is None else seconds
        self._last_seconds = self._clock()
        self._due_seconds = self._last_seconds + max(_LEAST_SECONDS_BETWEEN, counted / self._share)

    def hurry(self) -> None:
        """Draw what someone waits for as soon as a quarter of a second has passed since the last drawing."""
        if self._last_seconds is not None:
            self._due_seconds = min(self._due_seconds, self._last_seconds + _LEAST_SECONDS_BETWEEN)
