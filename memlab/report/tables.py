"""Tables of records: what stands in them, before it is text or HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from memlab.records import Measurement, Prediction, prediction_of, speed_of
from memlab.records.comparison import Comparison, FoundPlan, has_left_interval, is_of_other_speed
from memlab.records.comparison import Row as Compared
from memlab.report.ranking import Ranking, counts, rank, refusals, shown, verdict_words
from memlab.report.segments import ordered, segments
from memlab.report.table import Bar, BarLook, Column, ColumnKind, Table, row, wanted
from memlab.report.wording import NOTHING, bytes_or_nothing, change, drift, mark_means, predicted, rate, speed
from memlab.units import format_bytes, format_seconds

FRONT_MARK = "•"
_FRONT_MEANS = f"{FRONT_MARK} no other plan needs less memory at this speed, or is faster in this memory"
_MOST_NOTES = 6
# an interval wider than this share is printed as a range
_NARROW = 0.3


def comparison(compared: Comparison) -> Table:
    """Reduce a comparison to the table that people read: the columns that say something about it."""
    measurements, rows = compared.measurements, compared.rows
    ranks = compared.are_ranks

    def of_others(write: Callable[[Compared], str]) -> Callable[[Compared], str]:
        return lambda each: NOTHING if each is rows[0] else write(each)

    reserved = any(m.peak_reserved_bytes is not None for m in measurements)
    columns = wanted(
        Column[Compared]("plan", lambda each: each.measurement.plan, ColumnKind.PLAN),
        Column("device", lambda each: each.measurement.device, ColumnKind.WORDS,
               is_wanted=len({m.device for m in measurements}) > 1),
        Column("peak allocated", lambda each: each.measurement.peak_text, bar=lambda each: Bar(segments(each.measurement))),
        Column("predicted", lambda each: predicted_peak(each.prediction, each.measurement),
               is_wanted=any(each.prediction for each in rows)),
        Column("vs first", of_others(lambda each: change(each.memory_ratio)), is_wanted=not ranks),
        Column("peak reserved", lambda each: bytes_or_nothing(each.measurement.peak_reserved_bytes), is_wanted=reserved),
        Column("offloaded", lambda each: bytes_or_nothing(each.measurement.host_bytes or None),
               is_wanted=any(m.host_bytes for m in measurements)),
        Column("samples/s", lambda each: speed(each.measurement)),
        Column("vs first", of_others(lambda each: change(each.speed_ratio)), is_wanted=not ranks),
        Column("tokens/s", lambda each: rate(each.measurement.tokens_per_second or math.nan),
               is_wanted=any(m.tokens_per_step for m in measurements)),
        Column("loss drift", of_others(lambda each: drift(each.loss_drift)),
               is_wanted=not ranks and any(m.losses for m in measurements)),
        Column("note", lambda each: each.verdict, ColumnKind.NOTE, is_wanted=any(each.verdict for each in rows)),
    )  # fmt: skip
    new = {each.plan for each in measurements if each.plan in compared.latest}
    marked = new if len(new) < len(rows) else set()
    written = tuple(row(columns, each, is_new=each.measurement.plan in marked) for each in rows)
    return Table(compared.title, columns, written, compared.events, _of_models(measurements))


def predicted_peak(prediction: Prediction | None, measurement: Measurement | None) -> str:
    """Write the peak that was predicted; marked where the measured one is outside of the interval."""
    if prediction is None:
        return NOTHING
    is_off = measurement is not None and has_left_interval(measurement, prediction)
    return predicted(format_bytes(prediction.peak_allocated_bytes), came_otherwise=is_off)


def _of_models(measurements: Sequence[Measurement]) -> tuple[Table, ...]:
    """Return a table of what each of several models holds at the peak, for every plan; None where one model trained."""
    measured = [each for each in measurements if each.models]
    if not measured:
        return ()
    names = ordered({name for each in measured for parts in each.models.values() for name in parts})
    rows = [
        (each.plan if number == 0 else "", model, *(bytes_or_nothing(parts.get(name)) for name in names))
        for each in measured
        for number, (model, parts) in enumerate(each.models.items())
    ]
    return (of_texts("", ("plan", "at the peak", *names), rows, words=("at the peak",)),)


def of_texts(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str], foot: tuple[str, ...] = ()
) -> Table:
    """Make a table of texts that are ready."""
    kinds = {"plan": ColumnKind.PLAN} | dict.fromkeys(words, ColumnKind.WORDS)
    columns = tuple(
        Column[Sequence[str]](head, itemgetter(number), kinds.get(head, ColumnKind.NUMBER))
        for number, head in enumerate(heads)
    )
    return Table(title, columns, tuple(row(columns, texts) for texts in rows), foot)


def predictions(
    given: Sequence[Prediction],  # in any order; the plan as written is what the others are compared with
    budget_bytes: int | None = None,  # what they are to fit into; None leaves out the verdicts
    *,
    title: str = "",  # what was predicted; by default the device
    # show every row; otherwise a long list keeps the plan as written, the Pareto-optimal plans and the best of each
    # verdict
    every: bool = False,
    how_to_see_all: str = "every=True shows them",  # said where rows are left out
    measurements: Sequence[Measurement] = (),  # of plans that ran already
) -> Table:
    """Reduce predictions to the table that people read, the best first."""
    ranking = rank(given, budget_bytes)
    heading = _heading(given, budget_bytes, title)
    if ranking is None:
        return Table(heading, foot=_refused_lines(given) or ("no plan was predicted",))
    measured = {each.plan: each for each in measurements if each.fits}
    rows = shown(ranking, {*measured}, every=every)
    columns = _columns(ranking, rows, measured)
    left_out = [each for each in ranking.every if each not in rows]
    foot = [_FRONT_MEANS] if _marks_front(ranking) else []
    if left_out:
        _, _, fits = counts(left_out, budget_bytes).partition(": ")
        foot.append(f"… and {len(left_out)} more{f' ({fits})' if fits else ''}; {how_to_see_all}")
    written = tuple(row(columns, each) for each in rows)
    means = mark_means(each.texts for each in written)
    return Table(heading, columns, written, (*foot, *means, *_refused_lines(given), *_note_lines(rows)))


def found(result: FoundPlan) -> Table:
    """Reduce a found plan to its evidence: every trial, predicted beside measured, and what was considered."""
    rows = []
    for number, each in enumerate(result.trials, 1):
        before = prediction_of(each.plan, result.predictions)
        needed, expected = NOTHING, NOTHING
        if before is not None:
            is_off = has_left_interval(each, before) and not _ran_out(each)
            needed = predicted(format_bytes(before.needed_bytes), came_otherwise=is_off)
            expected = predicted_speed(before, each, interval_speed(before))
        rows.append((str(number), each.plan, needed, _needed(each), _off_by(each, before), expected, speed(each),
                     _outcome(result, each)))  # fmt: skip
    has_reserved = any(each.peak_reserved_bytes is not None for each in result.trials)
    memory = "peak reserved" if has_reserved else "peak allocated"
    known = [each for each in result.predictions if not each.refused]
    refused = len(result.predictions) - len(known)
    considered = counts(known, result.budget_bytes) + (f", {refused} refused" if refused else "")
    return of_texts(
        f"{result.title} · budget {format_bytes(result.budget_bytes)}",
        ("trial", "plan", "predicted", "measured", "off by", "predicted samples/s", "measured samples/s", "outcome"),
        rows,
        words=("outcome",),
        foot=(
            found_sentence(result),
            *mark_means(rows),
            f"predicted and measured are the {memory}; considered: {considered}",
            *_refused_lines(result.predictions),
        ),
    )


def found_sentence(found: FoundPlan) -> str:
    """The answer in one sentence."""
    measured = found.measurement
    spare = format_bytes(max(0, found.budget_bytes - measured.needed_bytes))
    runs = len(found.trials)
    return (
        f"found {found.plan.label}: {_needed(measured)} of {format_bytes(found.budget_bytes)}, {spare} to spare, "
        f"{speed(measured)} samples/s, verified in {runs} trial{'' if runs == 1 else 's'}"
    )


def predictions_sentence(predictions: Sequence[Prediction], budget_bytes: int | None = None) -> str:
    """One sentence for status lines, screen readers and the alternative text of pictures."""
    ranking = rank(predictions, budget_bytes)
    if ranking is None:
        return "No plan can be predicted."
    said, _, fits = counts(ranking.every, budget_bytes).partition(": ")
    named = [("", ranking.first), *(("best is ", each) for each in ranking.others[:1])]
    needs = "; ".join(
        f"{before}{each.plan}{' with' if before else ' needs'} {format_bytes(each.needed_bytes)}"
        + (f" at {rate(speed_of(each))} samples per second" if speed_of(each) and each.samples_per_step else "")
        for before, each in named
    )
    return f"{said} predicted for {ranking.first.device}: {f'{fits}; ' if fits else ''}{needs}."


def interval_speed(prediction: Prediction) -> str:
    """Samples per second with the interval; the time of a step where no samples are counted.

    Example:
        >>> p = Prediction("--fp16", "T4", 2**30, None, 0, {}, (), 0.5, 8, 0, (2**30, 2**30), (0.45, 0.55))
        >>> interval_speed(p)
        '16.0 ± 11 %'
    """
    seconds = prediction.step_seconds
    if not math.isfinite(seconds) or seconds <= 0:
        return NOTHING
    shortest, longest = prediction.interval_seconds
    samples = prediction.samples_per_step
    if not samples:
        return _with_interval(format_seconds, seconds, shortest, longest)
    return _with_interval(rate, samples / seconds, samples / longest if longest else 0, samples / max(shortest, 1e-12))


def _with_interval(write: Callable[[float], str], value: float, low: float, high: float) -> str:
    text = write(value)
    if not (math.isfinite(low) and math.isfinite(high)):
        return text
    share = max(value - low, high - value) / value if value else 0.0
    if share > _NARROW:
        return f"{text} ({write(low)}–{write(high)})"
    return f"{text} ± {round(share * 100)} %" if round(share * 100) else text


def _heading(predictions: Sequence[Prediction], budget_bytes: int | None, title: str) -> str:
    device = predictions[0].device if predictions else ""
    budget = f"budget {format_bytes(budget_bytes)}" if budget_bytes is not None else ""
    refused = sum(bool(each.refused) for each in predictions)
    applying = counts((each for each in predictions if not each.refused), None) if len(predictions) > 1 else ""
    said = [title or f"predicted for {device}", applying, f"{refused} refused" if refused else "", budget]
    return " · ".join(part for part in said if part)


def _marks_front(ranking: Ranking) -> bool:
    """Return whether the front is marked: of two plans everybody sees which is better in what."""
    return len(ranking.others) > 1


def predicted_speed(prediction: Prediction, measurement: Measurement | None, text: str) -> str:
    """Write a predicted speed beside what was measured of its plan."""
    return predicted(text, came_otherwise=measurement is not None and is_of_other_speed(measurement, prediction))


def _measured_speed(measurement: Measurement | None, prediction: Prediction) -> str:
    if measurement is None:
        return NOTHING
    return speed(measurement) if prediction.samples_per_step else format_seconds(measurement.median_step_seconds)


def _columns(
    ranking: Ranking, rows: Sequence[Prediction], measured: Mapping[str, Measurement]
) -> tuple[Column[Prediction], ...]:
    first, budget_bytes = ranking.first, ranking.budget_bytes
    speeds = any(map(speed_of, rows))
    unit = "samples/s" if any(each.samples_per_step for each in rows) else "step time"
    reserved = any(each.peak_reserved_bytes is not None for each in rows)
    return wanted(
        Column[Prediction]("plan", lambda each: each.plan, ColumnKind.PLAN),
        Column(FRONT_MARK, lambda each: FRONT_MARK if each.plan in ranking.front else "", ColumnKind.WORDS,
               is_wanted=_marks_front(ranking)),
        Column("peak allocated", lambda each: _peak(each, is_needed=each.peak_reserved_bytes is None),
               bar=lambda each: Bar(segments(each), BarLook.PREDICTED)),
        Column("peak reserved", lambda each: _peak(each, is_needed=True), is_wanted=reserved),
        Column("vs first", lambda each: _versus(each.needed_bytes, first.needed_bytes, each is first)),
        Column("offloaded", lambda each: bytes_or_nothing(each.host_bytes or None),
               is_wanted=any(each.host_bytes for each in rows)),
        Column(unit, lambda each: predicted_speed(each, measured.get(each.plan), interval_speed(each)), is_wanted=speeds),
        Column("measured", lambda each: _measured_speed(measured.get(each.plan), each),
               is_wanted=speeds and any(each.plan in measured for each in rows)),
        Column("vs first", lambda each: _versus(speed_of(each), speed_of(first), each is first), is_wanted=speeds),
        Column("verdict", lambda each: verdict_words(each, budget_bytes or 0), ColumnKind.WORDS,
               is_wanted=budget_bytes is not None),
    )  # fmt: skip


def _peak(prediction: Prediction, *, is_needed: bool) -> str:
    """A peak; the one that a budget must hold comes with its interval."""
    if not is_needed:
        return format_bytes(prediction.peak_allocated_bytes)
    low, high = prediction.interval_bytes
    return _with_interval(format_bytes, prediction.needed_bytes, low, high)


def _versus(value: float, first: float, is_first: bool) -> str:
    return NOTHING if is_first or not first or not value else change(value / first)


def _needed(measurement: Measurement) -> str:
    return measurement.peak_text if _ran_out(measurement) else format_bytes(measurement.needed_bytes)


def _ran_out(measurement: Measurement) -> bool:
    """Return whether memory ran out in a trial; one that was measured may still need more than the budget."""
    return not measurement.fits and not measurement.step_seconds


def _off_by(measurement: Measurement, prediction: Prediction | None) -> str:
    """Return how far the measured peak is from the predicted one; nothing where memory ran out."""
    if prediction is None or _ran_out(measurement) or not prediction.needed_bytes:
        return NOTHING
    share = measurement.needed_bytes / prediction.needed_bytes - 1
    return "0.0 %" if abs(share) < 0.0005 else f"{'+' if share > 0 else '−'}{abs(share) * 100:.1f} %"


def _outcome(found: FoundPlan, measurement: Measurement) -> str:
    if _ran_out(measurement):
        return "; ".join(measurement.notes) or "ran out of memory"
    spare = found.budget_bytes - measurement.needed_bytes
    by = f"{format_bytes(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    words = f"fits, {by}" if spare >= 0 else f"does not fit, {by}"
    return f"{words}; found" if measurement.plan == found.plan.label else words


def _refused_lines(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    lines = []
    for reason, plans in refusals(predictions).items():
        shortest = min(plans, key=len)
        which = shortest if len(plans) == 1 else f"{len(plans)} plans, such as {shortest}"
        lines.append(f"refused: {which}: {reason}")
    return _limited(lines, "reasons for refusals")


def _note_lines(rows: Sequence[Prediction]) -> tuple[str, ...]:
    """Distinct notes, with how many of the shown plans they are about."""
    about: dict[str, list[str]] = {}
    for each in rows:
        for note in each.notes:
            about.setdefault(note, []).append(each.plan)
    lines = []
    for note, plans in about.items():
        which = plans[0] if len(plans) == 1 else f"{len(plans)} plans"
        lines.append(f"note: {note}" if len(plans) == len(rows) else f"note on {which}: {note}")
    return _limited(lines, "notes")


def _limited(lines: list[str], what: str) -> tuple[str, ...]:
    more = len(lines) - _MOST_NOTES
    return (*lines[:_MOST_NOTES], f"… and {more} more {what}") if more > 0 else tuple(lines)
