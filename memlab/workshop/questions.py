"""`Question` and `Check`: exercises that say whether an answer is right, with a hint and a solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from memlab.errors import MemlabError

NOT_ATTEMPTED, NOT_YET, RIGHT = "not attempted", "not yet", "right"
# None where an answer is right, else what is wrong with it
Judge = Callable[[Any], str | None]


@dataclass(frozen=True)
class Reply:
    """Reply to an answer."""

    question: str
    state: str
    words: str

    def __str__(self) -> str:
        return f"{self.question}: {self.state}. {self.words}"

    __repr__ = __str__


@dataclass(frozen=True)
class Question:
    """One exercise."""

    name: str  # as the notebook calls it, such as "q1"
    judge: Judge
    because: str  # said when the answer is right
    clue: str  # what to think of
    answer: str  # the solution, in words or code

    def __call__(self, given: Any = ...) -> Reply:
        """Check an answer."""
        if isinstance(given, EllipsisType):
            return Reply(self.name, NOT_ATTEMPTED, "Put your answer in place of ... and run the cell again.")
        fault = self._fault(given)
        if fault is None:
            return Reply(self.name, RIGHT, self.because)
        return Reply(self.name, NOT_YET, f"{fault} Stuck? check.{self.name}.hint()")

    def hint(self) -> Text:
        """Return what to think of."""
        return Text(f"{self.name}, a hint: {self.clue} The solution: check.{self.name}.solution()")

    def solution(self) -> Text:
        """The answer."""
        return Text(f"{self.name}, a solution:\n{self.answer}")

    def _fault(self, given: Any) -> str | None:
        try:
            return self.judge(given)
        except NotImplementedError:
            return "It still raises NotImplementedError."
        except Exception as error:  # noqa: BLE001 - it is the reader's code
            return f"It raised {type(error).__name__}: {error}."


class Text(str):
    """A text that a cell shows as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Check:
    """The exercises of a chapter, as attributes.

    Example:
        >>> check = Check([Question("q1", number(16), "4 + 4 + 8.", "Count the copies.", "16")])
        >>> check.q1(...)
        q1: not attempted. Put your answer in place of ... and run the cell again.
        >>> check.q1(12)
        q1: not yet. 12 is too low. Stuck? check.q1.hint()
        >>> check.q1(16)
        q1: right. 4 + 4 + 8.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = {each.name: each for each in questions}

    def __getattr__(self, name: str) -> Question:
        questions: dict[str, Question] = self.__dict__.get("questions", {})
        if name in questions:
            return questions[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownQuestionError(f"check.{name}: this chapter has {', '.join(questions)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.questions]


class UnknownQuestionError(MemlabError, AttributeError):
    """A question that the chapter does not have."""


# --- kinds of answers -----------------------------------------------------------------------------


def number(value: float, *, within: float = 0.01) -> Judge:
    """Judge a number, which may be off by a share of it."""

    def judge(given: Any) -> str | None:
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            return f"{given!r} is no number."
        if abs(given - value) <= within * abs(value):
            return None
        return f"{given:g} is too {'high' if given > value else 'low'}."

    return judge


def choice(options: str, value: str) -> Judge:
    """Judge one of some letters."""

    def judge(given: Any) -> str | None:
        said = str(given).strip().upper()
        if said not in options:
            return f"{given!r} is none of {', '.join(options)}."
        return None if said == value else f"It is not {said}."

    return judge


def function(cases: Sequence[tuple[tuple[Any, ...], float]]) -> Judge:
    """Judge a function by what it gives for some arguments."""

    def judge(given: Any) -> str | None:
        if not callable(given):
            return f"{given!r} is no function."
        for arguments, wanted in cases:
            got = given(*arguments)
            if got is None:
                return "It returns nothing."
            if abs(float(got) - wanted) > 0.01 * abs(wanted):
                said = ", ".join(map(repr, arguments))
                return f"For ({said}) it gives {float(got):g}, and {wanted:g} is wanted."
        return None

    return judge
