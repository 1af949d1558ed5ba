"""The exercises of each chapter, apart from the notebooks, so that nobody reads a solution by accident."""

from __future__ import annotations

import importlib
from pathlib import Path

from memlab.errors import PlanError
from memlab.workshop.questions import Check


def chapter(number: int) -> Check:
    """The exercises of a chapter.

    Raises:
        PlanError: there is no such chapter, or it has no exercises.

    Example:
        >>> sorted(chapter(1).questions)[0]
        'q1'
    """
    if number not in numbers():
        raise PlanError(f"chapter {number!r}: the chapters with exercises are {', '.join(map(str, numbers()))}")
    module = importlib.import_module(f"memlab.workshop.chapters.chapter_{number:02}")
    return Check(module.QUESTIONS)


def numbers() -> list[int]:
    """Chapters that have exercises."""
    return sorted(int(path.stem.removeprefix("chapter_")) for path in Path(__file__).parent.glob("chapter_*.py"))
