"""Every exercise accepts what is right, refuses what is wrong, and helps."""

from __future__ import annotations

from typing import Any

import pytest

from memlab.errors import MemlabError, PlanError
from memlab.workshop import Question, chapter
from memlab.workshop.exercises import QUESTIONS as CHAPTERS
from tests.workshop.answers import ANSWERS, right_of, wrong_of

QUESTIONS = {(at, name): question for at in CHAPTERS for name, question in chapter(at).questions.items()}


@pytest.mark.parametrize(("at", "question"), [(at, question) for (at, _), question in QUESTIONS.items()],
                         ids=[f"{at}-{name}" for at, name in QUESTIONS])  # fmt: skip
class TestEveryQuestion:
    def test_accepts_right_answers(self, at: int, question: Question) -> None:
        for answer in right_of(at, question.name):
            assert str(question(answer)) == f"{question.name}: right. {question.because}"

    def test_refuses_wrong_answers_and_says_where_help_is(self, at: int, question: Question) -> None:
        for answer in wrong_of(at, question.name):
            said = str(question(answer))
            assert said.startswith(f"{question.name}: not yet. "), answer
            assert said.endswith(f"Stuck? check.{question.name}.hint()")

    def test_has_a_state_of_its_own_before_it_is_attempted(self, at: int, question: Question) -> None:
        assert (
            str(question(...))
            == str(question())
            == (f"{question.name}: not attempted. Put your answer in place of ... and run the cell again.")
        )

    def test_has_a_hint_and_a_solution(self, at: int, question: Question) -> None:
        assert repr(question.hint()).endswith(f"The solution: check.{question.name}.solution()")
        assert question.answer in repr(question.solution())
        assert question.answer not in repr(question.hint())

    def test_solutions_in_code_are_right(self, at: int, question: Question) -> None:
        if not question.answer.startswith("def "):
            return
        names: dict[str, Any] = {}
        exec(question.answer, names)
        written = [value for key, value in names.items() if not key.startswith("__")]
        assert str(question(written[-1])).startswith(f"{question.name}: right.")


def test_every_question_has_answers_here() -> None:
    assert ANSWERS.keys() == QUESTIONS.keys()


def test_code_that_fails_is_not_yet_right() -> None:
    asked = chapter(1).q2
    assert "It raised TypeError: " in str(asked(lambda: 1))

    def unfinished(*_: Any) -> None:
        raise NotImplementedError

    assert "It still raises NotImplementedError." in str(asked(unfinished))
    assert "For (64, 4, 3072) it gives 1, and" in str(asked(lambda *_: 1))


def test_names_that_are_none_say_which_there_are() -> None:
    check = chapter(1)
    assert {"q1", "q2"} <= set(dir(check))
    with pytest.raises(MemlabError, match=r"check.q9: this chapter has q1, q2"):
        _ = check.q9
    with pytest.raises(PlanError, match=r"chapter 99: the chapters with exercises are 0, 1"):
        chapter(99)
