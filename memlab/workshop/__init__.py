"""Tools that the course's notebooks share: guesses before measurements, exercises that check themselves, and work of a size for this machine.

from memlab import workshop

guesses, check, here = workshop.Guesses(), workshop.chapter(1), workshop.here()
"""

from __future__ import annotations

from memlab.workshop.exercises import chapter
from memlab.workshop.guesses import Guesses
from memlab.workshop.material import Here, here
from memlab.workshop.pictures import picture, steps
from memlab.workshop.questions import Check, Question
from memlab.workshop.watched import Film, film, held_by, watched

__all__ = [
    "Check",
    "Film",
    "Guesses",
    "Here",
    "Question",
    "chapter",
    "film",
    "held_by",
    "here",
    "picture",
    "steps",
    "watched",
]
