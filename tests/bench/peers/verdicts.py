"""What records say: ratios of memlab's numbers to a peer's, with their spread, and a verdict. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.bench.peers.records import Contest, Contestant, Measure, Record, Status, newest

# a smaller difference is none, whatever the spread
FEWEST_ROUNDS = 3
_WRONG = 0.05  # of a first step's loss or gradient norm
LEAST_DIFFERENCE, LEAST_EXACT_DIFFERENCE = 0.02, 0.005


class Verdict(StrEnum):
    """Where memlab stands."""

    AHEAD = "ahead"
    LEVEL = "level"
    BEHIND = "behind"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Ratio:
    """One measure of memlab over the same of a peer.

    Args:
        measure: what.
        ours: median over rounds.
        theirs: median over rounds.
        median: of the ratios of the rounds.
        low: least of them.
        high: greatest of them.
        rounds: how many.
    """

    measure: Measure
    ours: float
    theirs: float
    median: float
    low: float
    high: float
    rounds: int

    @property
    def verdict(self) -> Verdict:
        """Ahead where memlab takes less in every round, behind where it takes more in every round, and else level.

        Two rounds tell little of the spread, so times of fewer than three are undecided. A median within 2 % (0.5 %
        where numbers repeat exactly) is level, however small the spread.
        """
        if self.rounds < FEWEST_ROUNDS and not self.measure.exact:
            return Verdict.UNDECIDED
        least = LEAST_EXACT_DIFFERENCE if self.measure.exact else LEAST_DIFFERENCE
        if self.low <= 1 <= self.high or abs(self.median - 1) <= least:
            return Verdict.LEVEL
        return Verdict.AHEAD if self.median < 1 else Verdict.BEHIND


@dataclass(frozen=True)
class Pairing:
    """memlab and one peer in a contest.

    Args:
        contest: which.
        peer: which of its contestants.
        ratios: one for each measure that both have; empty where one of them did not run.
        difference: relative difference of the loss after training; None where it is not compared.
        reason: why there are no ratios.
        notes: what else is to be said, such as losses that the loop saw wrong.
        date: of the last record.
        ours: memlab's records.
        theirs: the peer's.
    """

    contest: Contest
    peer: Contestant
    ratios: tuple[Ratio, ...] = ()
    difference: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    date: str = ""
    ours: tuple[Record, ...] = ()
    theirs: tuple[Record, ...] = ()

    @property
    def same_result(self) -> bool | None:
        """Whether both trained to the same loss; None where that is not compared."""
        if self.difference is None or self.contest.same_result is None:
            return None
        return self.difference <= self.contest.same_result

    @property
    def behind(self) -> tuple[Ratio, ...]:
        """What memlab takes more of."""
        return tuple(each for each in self.ratios if each.verdict is Verdict.BEHIND)

    @property
    def name(self) -> str:
        """Contest and peer in one word."""
        return f"{self.contest.name}/{self.peer.name}"


def pairings(contests: Iterable[Contest], records: Iterable[Record], scale: str, device: str) -> list[Pairing]:
    """memlab against each peer of each contest that has records at a scale on a device.

    Args:
        contests: in the order of the table.
        records: of any contest, scale and device.
        scale: which.
        device: which.
    """
    here = [each for each in newest(records) if each.key.scale == scale and each.key.device == device]
    found = []
    for contest in contests:
        own = [each for each in here if each.key.contest == contest.name]
        if own:
            found += [_pairing(contest, peer, own) for peer in contest.contestants[1:]]
    return found


def _pairing(contest: Contest, peer: Contestant, records: Sequence[Record]) -> Pairing:
    ours, theirs = (_of(each.name, records) for each in (contest.contestants[0], peer))
    date = max((each.date for each in (*ours, *theirs)), default="")
    for title, its in (("memlab", ours), (peer.title, theirs)):
        missing = _why_missing(title, its)
        if missing:
            return Pairing(contest, peer, reason=missing, date=date, ours=ours, theirs=theirs)
    ratios = tuple(filter(None, (_ratio(each, ours, theirs) for each in contest.measures)))
    return Pairing(
        contest, peer, ratios, _difference(ours[0], theirs[0]), notes=_notes(contest, ours[0], theirs[0]),
        date=date, ours=ours, theirs=theirs,
    )  # fmt: skip


def _of(name: str, records: Iterable[Record]) -> tuple[Record, ...]:
    return tuple(sorted((each for each in records if each.key.contestant == name), key=lambda each: each.key.round))


def _why_missing(title: str, records: Sequence[Record]) -> str:
    if any(each.status is Status.MEASURED for each in records):
        return ""
    if not records:
        return f"not run yet: {title}"
    return f"{records[-1].status}: {records[-1].reason}"


def _ratio(measure: Measure, ours: Sequence[Record], theirs: Sequence[Record]) -> Ratio | None:
    """Round by round, so that a machine that drifts cancels out."""
    mine, other = (_by_round(measure.key, each) for each in (ours, theirs))
    rounds = sorted(mine.keys() & other.keys())
    if not rounds:
        return None
    ratios = [mine[each] / other[each] for each in rounds]
    medians = [statistics.median(its[each] for each in rounds) for its in (mine, other)]
    return Ratio(measure, *medians, statistics.median(ratios), min(ratios), max(ratios), len(rounds))


def _by_round(key: str, records: Iterable[Record]) -> dict[int, float]:
    measured = ((each.key.round, each.measured) for each in records if each.measured is not None)
    return {number: each.numbers[key] for number, each in measured if each.numbers.get(key)}


def _difference(ours: Record, theirs: Record) -> float | None:
    losses = [None if each.measured is None else each.measured.result_loss for each in (ours, theirs)]
    if losses[0] is None or losses[1] is None:
        return None
    return abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-12)


def _notes(contest: Contest, ours: Record, theirs: Record) -> tuple[str, ...]:
    mine, other = ours.measured, theirs.measured
    if contest.same_result is None or mine is None or other is None:
        return ()
    reported = (("loss", mine.losses, other.losses), ("gradient norm", mine.gradient_norms, other.gradient_norms))
    factors = ((what, b[0] / a[0]) for what, a, b in reported if a and b and a[0])
    wrong = [f"{what} {factor:.2f} ×" for what, factor in factors if abs(factor - 1) > _WRONG]
    return (f"the peer reports {' and '.join(wrong)} memlab's",) if wrong else ()
