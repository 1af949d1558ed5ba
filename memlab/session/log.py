"""`Log`: the actions of a session, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogEntry:
    """An action of a session, and the step in or before which it happened."""

    step: int  # the step that was under way, or that came next, counted from 1
    text: str  # what was done, in words
    is_answer: bool = False  # whether who asked for a change is to read it

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


class Log(list[LogEntry]):
    """Entries in order."""

    steps = 0  # optimizer steps that are over; an entry belongs to the step after them
    not_rescued = ""  # where memory that runs out is not rescued, as told last; empty for nowhere

    def note(self, text: str, step: int | None = None) -> None:
        """Add an entry, for a step or for now."""
        self.append(LogEntry(self.steps + 1 if step is None else step, text))

    def answer(self, text: str) -> None:
        """Add an entry that whoever asks for a change is to read."""
        self.append(LogEntry(self.steps + 1, text, is_answer=True))

    def answers(self, known: int) -> list[str]:
        """Return the answers after the first `known` entries."""
        return [entry.text for entry in self[known:] if entry.is_answer]

    def note_once(self, text: str) -> None:
        """Add an entry, unless it is there already."""
        if all(entry.text != text for entry in self):
            self.note(text)

    def note_not_rescued(self, text: str) -> None:
        """Add once where memory that runs out is not rescued, for the advice if it does."""
        self.not_rescued = text
        self.note_once(text)
