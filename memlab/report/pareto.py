"""Content of the picture of memory against throughput: the same points for the PNG and the plotly figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memlab.plan import Plan
from memlab.records import Fit, Measurement, Prediction, speed_of
from memlab.records.comparison import FoundPlan
from memlab.report.ranking import pareto_front, verdict_words
from memlab.report.segments import finite
from memlab.report.tables import FRONT_MARK, found_sentence, interval_speed, predictions_sentence
from memlab.report.wording import speed
from memlab.units import format_bytes

# more marks than this make a cloud: the front and a sample of the others are drawn
MOST_POINTS = 200
# what the vertical axis counts
SPEED_NAME = "throughput, samples/s"
# how far above the fastest plan an interval may reach in the picture
_MOST_OF_INTERVAL = 1.4


@dataclass(frozen=True)
class PointLook:
    """Style of points of one kind, by shape and by colour."""

    name: str
    colour: str
    marker: str
    symbol: str


LOOKS = {
    Fit.YES: PointLook("predicted to fit", "#1F83C4", "o", "circle-open"),
    Fit.UNCERTAIN: PointLook("uncertain", "#C77700", "D", "diamond-open"),
    Fit.NO: PointLook("predicted not to fit", "#7A7A7A", "s", "square-open"),
}
PLAIN = PointLook("predicted", "#1F83C4", "o", "circle-open")
# what fits is drawn over what does not
DRAWN_IN_ORDER = (LOOKS[Fit.NO], LOOKS[Fit.UNCERTAIN], LOOKS[Fit.YES], PLAIN)
MEASURED = PointLook("measured", "#CC4400", "o", "circle")
FOUND_RING = "#009E73"


@dataclass(frozen=True)
class Point:
    """A prediction in the picture."""

    plan: str
    memory_bytes: int
    per_second: float
    memory_interval: tuple[int, int]
    speed_interval: tuple[float, float]
    look: PointLook
    on_front: bool
    said: str


@dataclass(frozen=True)
class Trial:
    """A measurement in the picture, and the point that predicted it."""

    plan: str
    memory_bytes: int
    per_second: float
    predicted: Point | None
    is_found: bool
    ran_out: bool
    said: str

    @property
    def place(self) -> tuple[int, float]:
        """Return where its mark stands: bytes and samples per second."""
        if self.ran_out and self.predicted is not None:
            return self.predicted.memory_bytes, self.predicted.per_second
        return self.memory_bytes, self.per_second


@dataclass(frozen=True)
class Chart:
    """Memory against throughput."""

    title: str  # what was predicted, for what
    memory_name: str  # which memory it is
    points: tuple[Point, ...]  # predictions, the plan as written among them
    front: tuple[Point, ...]  # the Pareto-optimal points, from the smallest on
    trials: tuple[Trial, ...]  # what was measured
    labelled: tuple[str, ...]  # plans whose names stand beside their marks
    budget_bytes: int | None  # where the line of the budget is, or None
    description: str  # the alternative text

    @property
    def most_bytes(self) -> int:
        """The right end of the horizontal axis."""
        sizes = [point.memory_interval[1] for point in self.points] + [trial.memory_bytes for trial in self.trials]
        return max([1, self.budget_bytes or 0, *sizes])

    @property
    def most_per_second(self) -> float:
        """The upper end of the vertical axis: a wide interval may leave the picture, no mark does."""
        speeds = [point.per_second for point in self.points] + [trial.per_second for trial in self.trials]
        fastest = max([1e-12, *speeds])
        highest = max((point.speed_interval[1] for point in self.front), default=fastest)
        return max(fastest, min(highest, fastest * _MOST_OF_INTERVAL))


def chart(
    predictions: Sequence[Prediction],
    measurements: Sequence[Measurement] = (),
    budget_bytes: int | None = None,
    *,
    title: str = "",
    found: str = "",
) -> Chart:
    """Reduce predictions and trials to a picture."""
    known = [each for each in predictions if not each.refused and speed_of(each)]
    on_front = {each.plan for each in pareto_front(known)}
    drawn = _thinned(known, on_front | {each.plan for each in measurements} | {Plan().label})
    points = {each.plan: _point(each, budget_bytes, on_front) for each in drawn}
    reserved = any(each.peak_reserved_bytes is not None for each in known)
    trials = tuple(_trial(each, points.get(each.plan), found) for each in measurements)
    measured = f" {sum(not trial.ran_out for trial in trials)} of them measured." if trials else ""
    front = tuple(sorted((p for p in points.values() if p.on_front), key=lambda point: point.memory_bytes))
    return Chart(
        title=title or (f"predicted for {known[0].device}" if known else "nothing was predicted"),
        memory_name="peak memory reserved" if reserved else "peak memory allocated",
        points=tuple(points.values()),
        front=front,
        trials=trials,
        labelled=_labelled(front, budget_bytes, found),
        budget_bytes=budget_bytes,
        description=f"Memory against throughput. {predictions_sentence(predictions, budget_bytes)}{measured}",
    )


def found_chart(found: FoundPlan) -> Chart:
    """The picture of a found plan: what was predicted, what was run, and the plan."""
    drawn = chart(found.predictions, found.trials, found.budget_bytes, title=found.title, found=found.plan.label)
    said = found_sentence(found)
    return replace(drawn, description=f"{drawn.description} {said[0].upper()}{said[1:]}.")


def _point(prediction: Prediction, budget_bytes: int | None, on_front: set[str]) -> Point:
    look = PLAIN if budget_bytes is None else LOOKS[prediction.verdict(budget_bytes).fit]
    per_second = speed_of(prediction)
    shortest, longest = (finite(seconds) for seconds in prediction.interval_seconds)
    work = per_second * prediction.step_seconds
    low, high = prediction.interval_bytes
    said = f"predicted {format_bytes(prediction.needed_bytes)} ({format_bytes(low)} to {format_bytes(high)})"
    said += f", {interval_speed(prediction)}{' samples/s' if prediction.samples_per_step else ''}"
    if budget_bytes is not None:
        said += f"; {verdict_words(prediction, budget_bytes)}"
    return Point(
        plan=prediction.plan,
        memory_bytes=prediction.needed_bytes,
        per_second=per_second,
        memory_interval=(low, high),
        speed_interval=(work / longest if longest else per_second, work / shortest if shortest else per_second),
        look=look,
        on_front=prediction.plan in on_front,
        said=said,
    )


def _trial(measurement: Measurement, predicted: Point | None, found: str) -> Trial:
    needed_bytes = measurement.needed_bytes
    ran_out = not measurement.step_seconds
    said = "ran out of memory" if ran_out else f"measured {format_bytes(needed_bytes)}, {speed(measurement)} samples/s"
    per_second = finite(measurement.samples_per_second)
    return Trial(measurement.plan, needed_bytes, per_second, predicted, measurement.plan == found, ran_out, said)


def _thinned(predictions: Sequence[Prediction], kept: set[str]) -> list[Prediction]:
    """Return at most `MOST_POINTS`: those that are kept, and an even sample of the others."""
    others = [each for each in predictions if each.plan not in kept]
    room = MOST_POINTS - (len(predictions) - len(others))
    if len(others) <= room:
        return list(predictions)
    sample = {others[i * len(others) // max(1, room)].plan for i in range(max(0, room))}
    return [each for each in predictions if each.plan in kept or each.plan in sample]


def _labelled(front: Sequence[Point], budget_bytes: int | None, found: str) -> tuple[str, ...]:
    """The plan as written, the one found or the fastest that fits, and both ends of the front."""
    fitting = [point for point in front if budget_bytes is None or point.look is LOOKS[Fit.YES]]
    best = found or (fitting[-1].plan if fitting else "")
    ends = [point.plan for point in (*front[:1], *front[-1:])]
    return tuple(dict.fromkeys(plan for plan in (Plan().label, best, *ends) if plan))


def hover(point: Point | Trial) -> str:
    """Return what is said about one mark."""
    mark = f"{FRONT_MARK} " if isinstance(point, Point) and point.on_front else ""
    return f"{mark}{point.plan}: {point.said}"
