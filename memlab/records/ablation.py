"""The ladder as a record: levers added one after another, and what each of them gave.

Rules of the ladder:

1. The first rung is the loop as written, or with the settings it was asked to keep.
2. Each further rung adds one lever to the rungs that were kept. It is *kept* when the peak got lower by a percent or
   more, or when training got faster than its spread (of two steps or more) and the peak no higher. What gave nothing
   is *left out* of the rungs below, so that nobody pays for it, and its row says where the peak is.
3. *Before* is the rung that a lever was added to: the last one kept. *First* is the first rung that ran.
4. A rung that ran out of memory has no peak. It is left out where the rung before it ran. Where that one ran out too,
   what was predicted decides; where nothing was, it is kept, since only more levers can make the loop fit.
5. Levers overlap: one that gave nothing while the peak was elsewhere may give something once others have moved it.
   Those predicted to help by now are tried *again* at the end, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memlab.errors import MemlabError
from memlab.plan import FIELDS, Plan, PlanField
from memlab.records import Measurement, Prediction, ratio
from memlab.records.comparison import Comparison, speed_ratio, where_the_peak_is
from memlab.records.shown import Shown
from memlab.units import format_bytes

# a change of the peak below this share is no gain
NO_GAIN = 0.01
# steps of one plan differ by this share between two runs, whatever their spread within one
_LEAST_FASTER = 0.05


@dataclass(frozen=True)
class Rung:
    """One row of a ladder.

    Args:
        lever: flags this rung adds; empty for the first one.
        plan: label of the whole plan that was run.
        what: the lever in words.
        measurement: what was measured, or that memory ran out; None where the lever was refused.
        prediction: what was predicted for the plan; None where nothing was.
        refused: why the lever does not apply here; empty when it does.
        kept: whether the rungs below stand on this one.
        again: whether the lever had been left out before, and was tried a second time.
    """

    lever: str
    plan: str
    what: str
    measurement: Measurement | None = None
    prediction: Prediction | None = None
    refused: str = ""
    kept: bool = True
    again: bool = False

    @property
    def label(self) -> str:
        """Return how tables and pictures call it: "+ --checkpoint"."""
        return f"+ {self.lever}{' (again)' if self.again else ''}" if self.lever else self.plan

    @property
    def ran(self) -> Measurement | None:
        """The measurement; None where memory ran out or the lever was refused."""
        return self.measurement if self.measurement is not None and self.measurement.fits else None

    @property
    def ran_out(self) -> bool:
        """Return whether memory ran out."""
        return self.measurement is not None and not self.measurement.fits


@dataclass(frozen=True)
class Step:
    """A rung against the others; ratios are NaN where there is nothing to compare with.

    Args:
        rung: the rung.
        memory_before: its peak allocated as a share of that of the rung before.
        memory_first: likewise, of the first rung that ran.
        speed_before: its throughput as a share of that of the rung before.
        speed_first: likewise, of the first rung that ran.
        is_first_to_fit: whether it is the first that fits the budget.
        verdict: what is to be said about it.
    """

    rung: Rung
    memory_before: float
    memory_first: float
    speed_before: float
    speed_first: float
    is_first_to_fit: bool
    verdict: str


@dataclass(frozen=True)
class Ladder(Shown):
    """Techniques added one after another, each measured.

    Args:
        title: what was trained, on what.
        rungs: its rows, at least one; the first adds no technique.
        budget_bytes: what the plan was to fit into, or None.
        order: "documented" or "gain"; see `memlab.ladder`.
        events: further notes: techniques that were not tried, predictions that could not be made.
    """

    title: str
    rungs: tuple[Rung, ...]
    budget_bytes: int | None = None
    order: str = "documented"
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.rungs:
            raise MemlabError("a ladder needs at least one row; run some steps first")

    @property
    def plan(self) -> str:
        """Label of the final plan, with every technique that was kept."""
        return self._kept[-1].plan

    @property
    def fitting(self) -> Rung | None:
        """The first row that fits the budget; None without one."""
        return next((rung for rung in self.rungs if self._fits(rung)), None)

    @property
    def first(self) -> Rung:
        """Return what "vs first" compares with: the first row that ran, or the first one where none did."""
        return next((rung for rung in self.rungs if rung.ran), self.rungs[0])

    @property
    def last(self) -> Rung:
        """The last row that was kept."""
        return self._kept[-1]

    @property
    def counts_tokens(self) -> bool:
        """Return whether throughput is in tokens; in samples where the inputs are no token ids."""
        return all(rung.ran.tokens_per_step for rung in self.rungs if rung.ran)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every row against the one before and the first."""
        found: list[Step] = []
        before: Rung | None = None
        said: set[str] = set()
        for rung in self.rungs:
            notes = rung.measurement.notes if rung.measurement is not None else ()
            found.append(self._step(rung, before, tuple(note for note in notes if note not in said)))
            said.update(notes)
            before = rung if rung.kept else before
        return tuple(found)

    @property
    def comparison(self) -> Comparison:
        """The rows that were run, side by side, named by their techniques; for figures of comparisons."""
        named = [(rung.label, rung) for rung in self.rungs if rung.measurement is not None]
        return Comparison(
            self.title,
            tuple(replace(rung.measurement, plan=name) for name, rung in named if rung.measurement is not None),
            self.events,
            tuple(replace(rung.prediction, plan=name) for name, rung in named if rung.prediction is not None),
        )

    def speed(self, profile: Measurement | Prediction) -> float:
        """Tokens per second, or samples per second where the inputs are no token ids."""
        return profile.tokens_per_second if self.counts_tokens else profile.samples_per_second

    @property
    def _kept(self) -> list[Rung]:
        return [self.rungs[0], *(rung for rung in self.rungs[1:] if rung.kept)]

    def _fits(self, rung: Rung) -> bool:
        return self.budget_bytes is not None and rung.ran is not None and rung.ran.needed_bytes <= self.budget_bytes

    def _step(self, rung: Rung, before: Rung | None, notes: tuple[str, ...]) -> Step:
        first = self.first
        # where the first rungs ran out of memory, the first one that ran has nothing before it either
        against = None if rung is first else first
        is_first_to_fit = rung is self.fitting
        verdict = _verdict(rung, before, notes)
        if is_first_to_fit and self.budget_bytes is not None and rung.ran is not None:
            spare = format_bytes(self.budget_bytes - rung.ran.needed_bytes)
            verdict = f"fits {format_bytes(self.budget_bytes)}, {spare} to spare; {verdict}"
        return Step(
            rung,
            _memory_ratio(rung, before),
            _memory_ratio(rung, against),
            self._speed_ratio(rung, before),
            self._speed_ratio(rung, against),
            is_first_to_fit,
            verdict,
        )

    def _speed_ratio(self, rung: Rung, other: Rung | None) -> float:
        if other is None or rung.ran is None or other.ran is None:
            return math.nan
        return speed_ratio(rung.ran, other.ran)


def helps(before: Rung, after: Rung) -> bool:
    """Return whether a rung is kept: rules 2 and 4.

    Args:
        before: the last rung that was kept.
        after: the one that adds a lever to it.
    """
    if after.measurement is None:
        return False
    if before.ran is None:
        return after.ran is not None or _is_predicted_to_help(before, after)
    return after.ran is not None and (_needs_less(before.ran, after.ran) or _is_faster(before.ran, after.ran))


def lever_words(before: Plan, after: Plan) -> str:
    """Return what a lever does, in words.

    Example:
        >>> lever_words(Plan(), Plan.parse("--checkpoint"))
        'Checkpointing: every block; same gradient'
        >>> lever_words(Plan(), Plan.parse("--adam8bit"))
        'Optimizer: 8-bit Adam; changes numerics'
    """
    changed = [spec for spec in FIELDS if getattr(after, spec.name) != getattr(before, spec.name)]
    said = ", ".join(_setting_words(spec, before, after) for spec in changed)
    return f"{said}; {'same gradient' if after.has_numbers_of(before) else 'changes numerics'}"


def added(plan: Plan, lever: Plan) -> Plan:
    """A plan with one more lever; what is off the device already stays off it.

    Raises:
        PlanError: the two exclude each other.

    Example:
        >>> str(added(Plan.parse("--accumulate 2 --offload optimizer"), Plan.parse("--offload activations")))
        '--accumulate 2 --offload activations,optimizer'
        >>> str(added(Plan.parse("--checkpoint selective"), Plan.parse("--checkpoint")))
        '--checkpoint'
    """
    settings = {name: getattr(lever, name) for name in lever.changes()}
    if "offload" in settings:
        settings["offload"] = tuple((dict(plan.offload) | dict(lever.offload)).items())
    return replace(plan, **settings)


def _setting_words(spec: PlanField, before: Plan, after: Plan) -> str:
    value = getattr(after, spec.name)
    if spec.name == "offload":
        value = tuple(item for item in value if item not in before.offload)
    text = spec.text(value)
    if spec.name == "loss":
        return spec.title  # its only value is its name
    instead = spec.text(getattr(before, spec.name)) if spec.name in before.changes() and spec.name != "offload" else ""
    return f"{spec.title}: {spec.names.get(text, text)}" + (f" instead of {instead}" if instead else "")


def _memory_ratio(rung: Rung, other: Rung | None) -> float:
    if other is None or rung.ran is None or other.ran is None:
        return math.nan
    return ratio(rung.ran.peak_allocated_bytes, other.ran.peak_allocated_bytes)


def _needs_less(before: Measurement, after: Measurement) -> bool:
    return after.peak_allocated_bytes <= before.peak_allocated_bytes * (1 - NO_GAIN)


def _is_faster(before: Measurement, after: Measurement) -> bool:
    """Return whether a rung is worth keeping for its speed alone; a single step has no spread, and proves nothing."""
    if min(len(before.step_seconds), len(after.step_seconds)) < 2:
        return False
    faster = ratio(after.samples_per_second, before.samples_per_second) - 1
    noise = max(_LEAST_FASTER, before.spread + after.spread)
    return faster > noise and after.peak_allocated_bytes <= before.peak_allocated_bytes * (1 + NO_GAIN)


def _is_predicted_to_help(before: Rung, after: Rung) -> bool:
    """Of two rungs that ran out of memory."""
    if before.prediction is None or after.prediction is None:
        return True
    return after.prediction.peak_allocated_bytes <= before.prediction.peak_allocated_bytes * (1 - NO_GAIN)


def _verdict(rung: Rung, before: Rung | None, notes: tuple[str, ...]) -> str:
    if rung.refused:
        return f"refused: {rung.refused}"
    if rung.measurement is None or rung.ran_out:
        own = rung.measurement.notes if rung.measurement is not None else ()
        return "; ".join((*own, "left out below")) if not rung.kept else "; ".join(own)
    where = where_the_peak_is(rung.measurement)
    said = (_gain_words(rung, before), where, *notes, "" if rung.kept else "left out below")
    return "; ".join(filter(None, said))


def _gain_words(rung: Rung, before: Rung | None) -> str:
    """Say that a rung did not lower the peak; empty where it did, or where there is nothing to compare with."""
    if before is None or before.ran is None or rung.ran is None or _needs_less(before.ran, rung.ran):
        return ""
    if rung.kept:
        return "no less memory, but faster"
    return "no gain, and more memory" if _memory_ratio(rung, before) > 1 + NO_GAIN else "no gain"
