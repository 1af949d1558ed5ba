"""The ablation as a record: techniques added one after another, and what each of them gave.

Rules of the ablation:

1. The first row is the loop as written, or with the settings it was asked to keep.
2. Each further row adds one technique to the rows that were kept. It is *kept* when the peak got lower by a percent or
   more, or when training got faster than its spread (of as many steps as speeds are compared by) and the peak no higher.
   What gave nothing is *left out* of the rows below, so that nobody pays for it, and its row says where the peak is.
3. *Before* is the row that a technique was added to: the last one kept. *First* is the first row that ran.
4. A row that ran out of memory has no peak. It is left out where the row before it ran. Where that one ran out too,
   what was predicted decides; where nothing was, it is kept, since only more techniques can make the loop fit.
5. Techniques overlap: one that gave nothing while the peak was elsewhere may give something once others have moved it.
   Those predicted to help by now are tried *again* at the end, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memlab.errors import MemlabError
from memlab.plan import Plan, PlanField
from memlab.plan.plan import BY_NAME
from memlab.records import Measurement, Prediction, Profile, ratio
from memlab.records.comparison import NO_GAIN, speed_ratio, where_the_peak_is
from memlab.records.measurement import Shown
from memlab.units import format_bytes

# steps of one plan differ by this share between two runs, whatever their spread within one
_LEAST_FASTER = 0.05


@dataclass(frozen=True)
class AblationRow:
    """One row of an ablation."""

    technique: str  # flags this row adds; empty for the first one
    plan: str  # label of the whole plan that was run
    what: str  # the technique in words
    # what was measured, or that memory ran out; None where the technique was refused
    measurement: Measurement | None = None
    prediction: Prediction | None = None  # what was predicted for the plan; None where nothing was
    refused: str = ""  # why the technique does not apply here; empty when it does
    kept: bool = True  # whether the rows below stand on this one
    again: bool = False  # whether the technique had been left out before, and was tried a second time

    @property
    def label(self) -> str:
        """Return how tables and pictures call it: "+ --checkpoint"."""
        return f"+ {self.technique}{' (again)' if self.again else ''}" if self.technique else self.plan

    @property
    def ran(self) -> Measurement | None:
        """The measurement; None where memory ran out or the technique was refused."""
        return self.measurement if self.measurement is not None and self.measurement.fits else None

    @property
    def ran_out(self) -> bool:
        """Return whether memory ran out."""
        return self.measurement is not None and not self.measurement.fits


@dataclass(frozen=True)
class Step:
    """A row against the others; ratios are NaN where there is nothing to compare with."""

    row: AblationRow
    memory_before: float  # its peak allocated as a share of that of the row before
    memory_first: float  # likewise, of the first row that ran
    speed_before: float  # its throughput as a share of that of the row before
    speed_first: float  # likewise, of the first row that ran
    is_first_to_fit: bool  # whether it is the first that fits the budget
    verdict: str  # what is to be said about it


@dataclass(frozen=True)
class Ablation(Shown):
    """Techniques added one after another, each measured.

    Args:
        title: what was trained, on what.
        rows: its rows, at least one; the first adds no technique.
        budget_bytes: what the plan was to fit into, or None.
        events: further notes: techniques that were not tried, predictions that could not be made.
    """

    title: str
    rows: tuple[AblationRow, ...]
    budget_bytes: int | None = None
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.rows:
            raise MemlabError("an ablation needs at least one row; run some steps first")

    @property
    def plan(self) -> str:
        """Label of the final plan, with every technique that was kept."""
        return self.last.plan

    @property
    def fitting(self) -> AblationRow | None:
        """The first row that fits the budget; None without one."""
        budget_bytes = self.budget_bytes
        if budget_bytes is None:
            return None
        return next((row for row in self.rows if row.ran is not None and row.ran.needed_bytes <= budget_bytes), None)

    @property
    def first(self) -> AblationRow:
        """Return what "vs first" compares with: the first row that ran, or the first one where none did."""
        return next((row for row in self.rows if row.ran), self.rows[0])

    @property
    def last(self) -> AblationRow:
        """The last row that was kept; the first one stands in any case."""
        return next((row for row in reversed(self.rows[1:]) if row.kept), self.rows[0])

    @property
    def counts_tokens(self) -> bool:
        """Return whether throughput is in tokens; in samples where the inputs are no token ids."""
        return all(row.ran.tokens_per_step for row in self.rows if row.ran)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every row against the one before and the first."""
        found: list[Step] = []
        before: AblationRow | None = None
        said: set[str] = set()
        for row in self.rows:
            notes = row.measurement.notes if row.measurement is not None else ()
            found.append(self._step(row, before, tuple(note for note in notes if note not in said)))
            said.update(notes)
            before = row if row.kept else before
        return tuple(found)

    def speed(self, profile: Measurement | Prediction) -> float:
        """Tokens per second, or samples per second where the inputs are no token ids."""
        return profile.tokens_per_second if self.counts_tokens else profile.samples_per_second

    def _step(self, row: AblationRow, before: AblationRow | None, notes: tuple[str, ...]) -> Step:
        memory_before, speed_before = _ratios(row, before)
        # where the first rows ran out of memory, the first one that ran has nothing before it either
        memory_first, speed_first = _ratios(row, None if row is self.first else self.first)
        is_first_to_fit = row is self.fitting
        verdict = _verdict(row, before, notes)
        if is_first_to_fit and self.budget_bytes is not None and row.ran is not None:
            spare = format_bytes(self.budget_bytes - row.ran.needed_bytes)
            verdict = f"fits {format_bytes(self.budget_bytes)}, {spare} to spare; {verdict}"
        return Step(row, memory_before, memory_first, speed_before, speed_first, is_first_to_fit, verdict)


def helps(before: AblationRow, after: AblationRow) -> bool:
    """Return whether a row is kept: rules 2 and 4."""
    if after.measurement is None:
        return False
    if before.ran is None:
        return after.ran is not None or _is_predicted_to_help(before, after)
    return after.ran is not None and (_needs_less(before.ran, after.ran) or _is_faster(before.ran, after.ran))


def technique_words(before: Plan, after: Plan) -> str:
    """Return what a technique does, in words.

    Example:
        >>> technique_words(Plan(), Plan.parse("--checkpoint"))
        'Checkpointing: every block; same gradient'
        >>> technique_words(Plan(), Plan.parse("--adam8bit"))
        'Optimizer: 8-bit Adam; changes numerics'
    """
    said = ", ".join(_setting_words(BY_NAME[name], before, after) for name in after.changes(before))
    return f"{said}; {'same gradient' if after.has_numbers_of(before) else 'changes numerics'}"


def _setting_words(spec: PlanField, before: Plan, after: Plan) -> str:
    value, earlier = getattr(after, spec.name), getattr(before, spec.name)
    if spec.is_list:
        value = tuple(pair for pair in value if pair not in earlier)
    text = spec.text(value)
    if len(spec.choices) == 2 and text not in spec.names:
        return spec.title  # its only value is its name
    instead = spec.text(earlier) if spec.name in before.changes() and not spec.is_list else ""
    return f"{spec.title}: {spec.names.get(text, text)}" + (f" instead of {instead}" if instead else "")


def _ratios(row: AblationRow, other: AblationRow | None) -> tuple[float, float]:
    """Return peak and throughput as shares of another row's."""
    if other is None or row.ran is None or other.ran is None:
        return math.nan, math.nan
    memory = ratio(row.ran.peak_allocated_bytes, other.ran.peak_allocated_bytes)
    return memory, speed_ratio(row.ran, other.ran)


def _needs_less(before: Profile, after: Profile) -> bool:
    return after.peak_allocated_bytes <= before.peak_allocated_bytes * (1 - NO_GAIN)


def _is_faster(before: Measurement, after: Measurement) -> bool:
    """Return whether a row is worth keeping for its speed alone; a few steps prove nothing."""
    faster = speed_ratio(after, before) - 1
    noise = max(_LEAST_FASTER, before.spread + after.spread)
    return faster > noise and after.peak_allocated_bytes <= before.peak_allocated_bytes * (1 + NO_GAIN)


def _is_predicted_to_help(before: AblationRow, after: AblationRow) -> bool:
    """Return whether the second of two rows that ran out of memory is predicted to need less."""
    if before.prediction is None or after.prediction is None:
        return True
    return _needs_less(before.prediction, after.prediction)


def _verdict(row: AblationRow, before: AblationRow | None, notes: tuple[str, ...]) -> str:
    if row.refused:
        return f"refused: {row.refused}"
    if row.measurement is None or row.ran_out:
        own = row.measurement.notes if row.measurement is not None else ()
        return "; ".join((*own, "left out below")) if not row.kept else "; ".join(own)
    where = where_the_peak_is(row.measurement)
    said = (_gain_words(row, before), where, *notes, "" if row.kept else "left out below")
    return "; ".join(filter(None, said))


def _gain_words(row: AblationRow, before: AblationRow | None) -> str:
    """Say that a row did not lower the peak; empty where it did, or where there is nothing to compare with."""
    if before is None or before.ran is None or row.ran is None or _needs_less(before.ran, row.ran):
        return ""
    if row.kept:
        return "no less memory, but faster"
    return "no gain, and more memory" if _ratios(row, before)[0] > 1 + NO_GAIN else "no gain"
