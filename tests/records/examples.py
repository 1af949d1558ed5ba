"""Records to begin with: a measurement, a prediction and a moment of a step, each with what a test is about replaced."""

from __future__ import annotations

from dataclasses import replace

from memlab.records import Measurement, Phase, Prediction, TimelinePoint


def measured(plan: str = "as written", peak_bytes: int = 1000, **more: object) -> Measurement:
    base = Measurement(plan, "cpu", peak_bytes, None, 0, {"activations": 700, "parameters": 300}, (), (0.5, 1.0, 0.5, 0.5, 0.5),
                       4, 40)  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def point(total_bytes: int, phase: Phase = Phase.FORWARD, seconds: float = 0.0) -> TimelinePoint:
    return TimelinePoint(seconds, phase, {"activations": total_bytes})


def predicted(plan: str = "as written", peak_bytes: int = 990, **more: object) -> Prediction:
    base = Prediction(plan, "cpu", peak_bytes, None, 0, {"activations": 690, "parameters": 300}, (point(5),), 0.5, 4, 40,
                      (980, 1000), (0.4, 0.6))  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]
