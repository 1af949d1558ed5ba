"""Parts of `docs/instructors_guide.md`: how guesses came out in the notebooks of the repository, and the answers to exercises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memlab.workshop.exercises import QUESTIONS, chapter
from memlab.workshop.questions import Question
from tests.docs.markdown import table

_UNGUESSED = re.compile(r"^(.+?): (.+?) · no guess was made")


def guesses(notebooks: Path) -> str:
    """What each guess was about and what was measured, chapter by chapter.

    Args:
        notebooks: the folder of the committed ones.
    """
    rows = [
        (path.stem.partition("_")[0], *found)
        for path in sorted(notebooks.glob("*.ipynb"))
        for found in guesses_in(json.loads(path.read_text(encoding="utf-8")))
    ]
    return table(("chapter", "the guess", "it was"), rows)


def guesses_in(notebook: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and outcomes of the guesses that a run without guesses has left in a notebook."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
            for line in text.splitlines():
                if named := _UNGUESSED.match(line):
                    yield named[1], named[2]


def answers() -> str:
    """Answers to the exercises of all chapters."""
    return "\n\n".join(map(_answers_of, QUESTIONS))


def _answers_of(number: int) -> str:
    lines = [_answer(question) for question in chapter(number).questions.values()]
    return f"**{number:02}**\n\n" + "\n".join(lines)


def _answer(question: Question) -> str:
    if "\n" not in question.answer:
        return f"- *{question.name}*: {question.answer.rstrip('.')}. {question.because}"
    code = "\n".join(f"  {line}".rstrip() for line in question.answer.splitlines())
    return f"- *{question.name}*: {question.because}\n\n  ```python\n{code}\n  ```\n"
