"""Answers to the exercises of the course, by chapter and name: those that are right, and those that only look so."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any


def _kept(parameters: float, stage: int, ranks: int) -> float:
    parts = ((2, 3), (2, 2), (12, 1))  # bytes, and the stage from which on they are divided
    return sum(parameters * size / (ranks if stage >= divided_from else 1) for size, divided_from in parts)


def _fastest_that_fits(peaks: Sequence[float], speeds: Sequence[float], budget: float) -> int:
    fitting = [at for at, peak in enumerate(peaks) if peak <= budget]
    return max(fitting, key=lambda at: speeds[at], default=-1)


ANSWERS: dict[tuple[int, str], tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    (0, "q1"): (("B",), ()),
    (0, "q2"): (
        (
            "--accumulate 4 --offload optimizer",
            "--checkpoint --offload optimizer",
            "--offload activations,optimizer:disk",
        ),
        (
            "--accumulate 4",
            "--offload optimizer",
            "--checkpoint --adam8bit",
            "--bf16 --offload optimizer,activations",
            "--checkpoint --optim sgd",
            "--accumulate none",
            4,
        ),
    ),
    (0, "q3"): ((12,), (3, 9)),
    (1, "q1"): ((16,), (12, 18)),
    (1, "q2"): (
        (lambda layers, heads, tokens: layers * heads * tokens * tokens * 4,),
        (
            lambda layers, heads, tokens: layers * heads * tokens * 4,
            lambda layers, _heads, tokens: layers * tokens**2 * 4,
            lambda layers, heads, tokens: layers * heads * tokens**2,
        ),
    ),
    (1, "q3"): (("C",), ()),
    (1, "q4"): (("B",), ()),
    (2, "q1"): ((4,), (16, 64)),
    (2, "q2"): (
        (lambda a, n, b, m: a * n / (n + m) + b * m / (n + m),),
        (lambda a, _n, b, _m: (a + b) / 2, lambda a, n, b, m: a * n + b * m),
    ),
    (2, "q3"): (("C",), ()),
    (2, "q4"): ((250,), (1000, 4000)),
    (3, "q1"): ((1 / 3,), (0.2, 1.33)),
    (3, "q2"): ((lambda layers: ceil(sqrt(layers)),), (lambda layers: layers, lambda layers: layers / 2)),
    (3, "q3"): (("B",), ()),
    (3, "q4"): (("A",), ()),
    (4, "q1"): ((1.0,), (1.003, 1.0078125)),
    (4, "q2"): ((8,), (10, 12)),
    (4, "q3"): (("B",), ()),
    (4, "q4"): ((lambda norm, scale: norm / scale,), (lambda norm, _scale: norm, lambda norm, scale: norm * scale)),
    (5, "q1"): ((52.2,), (26.1, 56.0)),
    (5, "q2"): (
        (lambda rows, columns: rows + columns,),
        (lambda rows, columns: rows * columns, lambda rows, _columns: rows),
    ),
    (5, "q3"): (("C",), ()),
    (5, "q4"): (("A",), ()),
    (6, "q1"): ((8 / 12e9 * 24e12 / 6,), (333, 16000)),
    (6, "q2"): (
        (lambda parameters: 16 * parameters,),
        (lambda parameters: 8 * parameters, lambda parameters: 4 * parameters),
    ),
    (6, "q3"): (("B",), ()),
    (6, "q4"): (("C",), ()),
    (6, "q5"): (("B",), ()),
    (7, "q1"): (("B",), ()),
    (7, "q2"): ((4,), (5, 6, 3)),
    (8, "q1"): ((2600,), (1400, 2000, 1000)),
    (8, "q2"): (("B",), ()),
    (8, "q3"): (("B",), ()),
    (8, "q4"): (
        (lambda rows, fit: 2 ** max(0, (ceil(rows / fit) - 1).bit_length()),),
        (lambda rows, fit: ceil(rows / fit), lambda rows, fit: 2 * rows / fit, lambda _rows, fit: fit),
    ),
    (9, "q1"): (
        (_kept,),
        (
            lambda parameters, _stage, ranks: 16 * parameters / ranks,
            lambda parameters, stage, ranks: parameters * (16 - 12 * (stage > 0)) + 0 * ranks,
            lambda parameters, stage, ranks: _kept(parameters, min(stage, 2), ranks),
        ),
    ),
    (9, "q2"): ((700,), (400, 800, 3200)),
    (9, "q3"): (("B",), ()),
    (9, "q4"): (("D",), ()),
    (9, "q5"): (("B",), ()),
    (10, "q1"): ((128,), (512, 131072)),
    (10, "q2"): (
        (
            lambda budget, weights, each, tokens: (budget - weights) // (each * tokens),
            lambda budget, weights, each, tokens: int((budget - weights) / (each * tokens)),
        ),
        (
            lambda budget, _weights, each, tokens: budget // (each * tokens),
            lambda budget, weights, each, tokens: budget // (weights + each * tokens),
            lambda budget, weights, each, tokens: (budget - weights) / (each * tokens),
        ),
    ),
    (10, "q3"): (("B",), ()),
    (10, "q4"): ((15.625,), (8, 128, 62.5)),
    (10, "q5"): (("C",), ()),
    (11, "q1"): (("C",), ()),
    (11, "q2"): (
        (_fastest_that_fits,),
        (
            lambda peaks, _speeds, _budget: peaks.index(min(peaks)),
            lambda _peaks, speeds, _budget: speeds.index(max(speeds)),
            lambda peaks, _speeds, budget: next((at for at, peak in enumerate(peaks) if peak <= budget), -1),
        ),
    ),
    (11, "q3"): ((250,), (0.125, 32)),
    (11, "q4"): (("B",), ()),
    (11, "q5"): (("B",), ()),
    (12, "q1"): ((3.0,), (3.5, 0.5)),
    (12, "q2"): (
        (lambda weights, activations: 3 * weights + activations,),
        (lambda weights, activations: weights + activations, lambda weights, activations: 4 * weights + activations),
    ),
    (12, "q3"): (("C",), ()),
    (13, "q1"): (
        (lambda inputs, outputs, rank: rank * inputs + rank * outputs,),
        (lambda inputs, outputs, rank: inputs * outputs, lambda inputs, outputs, rank: rank * inputs),
    ),
    (13, "q2"): ((14.64, 14.6), (112, 14.0)),
    (13, "q3"): (("C",), ()),
    (13, "q4"): (("B",), ()),
    (14, "q1"): (
        (lambda rows, tokens, vocabulary: 4 * rows * tokens * vocabulary,),
        (lambda rows, tokens, vocabulary: rows * tokens * vocabulary, lambda rows, tokens, vocabulary: 4 * tokens),
    ),
    (14, "q2"): (("B",), ()),
    (14, "q3"): ((10,), (3, 7)),
    (14, "q4"): ((36,), (12, 48)),
}


def right_of(chapter: int, name: str) -> tuple[Any, ...]:
    """Answers that are right; letters may be small as well."""
    right, _ = ANSWERS[chapter, name]
    return (*right, *(each.lower() for each in right if _is_letter(each)))


def wrong_of(chapter: int, name: str) -> tuple[Any, ...]:
    """Answers that are not, and what is no answer at all."""
    right, wrong = ANSWERS[chapter, name]
    for each in right:
        if _is_letter(each):
            return (*(letter for letter in "ABCDZ" if letter != each), 1)
        if callable(each):
            return (*wrong, 1, lambda *_: None)
        if not isinstance(each, str):
            return (*wrong, each * 2, each / 2, str(each), None)
    return wrong


def _is_letter(answer: Any) -> bool:
    return isinstance(answer, str) and len(answer) == 1
