"""`Observers`: who watches a session, and telling them what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from memlab.errors import MemlabError, first_line
from memlab.runtime.observer import Observer
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.own_steps import is_own_step


class Observers:
    """Observers in the order in which they are told.

    One of memlab's own that fails is told no more: it must not end the user's loop.
    """

    def __init__(self, said: Callable[[str], None]) -> None:
        self.failure = ""  # what of memlab's own failed and no longer watches, in words; empty for nothing
        self._said = said
        self.all: tuple[Observer, ...] = ()  # the observers
        # who does something at a moment, and what: most moments of a step are nothing to most observers
        self._hearers: dict[str, list[tuple[Observer, Callable[..., None]]]] = {}

    def only(self, observers: Iterable[Observer]) -> None:
        """Replace all of them."""
        self.all = tuple(observers)
        self._hearers = {}

    def add(self, observer: Observer, *, first: bool = False) -> None:
        """Add one, by default as the last to be told."""
        self.only((observer, *self.all) if first else (*self.all, observer))

    def remove(self, observer: Observer) -> None:
        """Remove one; do nothing when it is not there."""
        self.only(one for one in self.all if one is not observer)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Tell nobody meanwhile."""
        before = self.all
        self.only(())
        try:
            yield
        finally:
            self.only(before)

    def tell(self, moment: str, *args: Any) -> None:
        """Tell all of them of a moment."""
        hearers = self._hearers.get(moment)
        if hearers is None:
            nothing = getattr(Observer, moment)
            concerned = (one for one in self.all if getattr(type(one), moment) is not nothing)
            hearers = self._hearers[moment] = [(one, getattr(one, moment)) for one in concerned]
        for observer, hear in hearers:
            self.tell_one(observer, hear, *args)

    def tell_one(self, observer: Observer, hear: Callable[..., None], *args: Any) -> None:
        """Tell one of them alone, as in `tell`, by a method of its own."""
        try:
            hear(*args)
        except Exception as error:
            if not self._steps_aside(observer, error):
                raise

    def _steps_aside(self, observer: Observer, error: Exception) -> bool:
        is_own = type(observer).__module__.partition(".")[0] == "memlab" and not is_own_step()
        if not is_own or isinstance(error, MemlabError) or is_out_of_memory(error):
            return False
        self.remove(observer)
        self.failure = f"{type(observer).__name__} of memlab failed and sees no more of this run ({first_line(error)})"
        self._said(self.failure)
        with suppress(Exception):  # it may be in the middle of a step
            observer.interrupted()
        return True
