"""What a contest is, and what one run of one contestant left behind: values that need neither torch nor the peers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

SCALES = ("tiny", "small", "full")


class Status(StrEnum):
    """How a run ended."""

    MEASURED = "measured"
    NOT_RUN = "not run"
    FAILED = "failed"


@dataclass(frozen=True)
class Measure:
    """One number that contestants are compared by; less is better.

    Args:
        key: its name in `Record.numbers`.
        title: column heading.
        exact: whether it repeats exactly, so that half a percent is a difference.
    """

    key: str
    title: str
    exact: bool = False


MEMORY = Measure("peak_allocated_bytes", "peak allocated", exact=True)
TIME = Measure("sample_seconds", "time per sample")


@dataclass(frozen=True)
class Contestant:
    """One way of doing the work of a contest.

    Args:
        name: short name, the same over versions.
        title: what it is, in a few words.
        run: does the work in this process and returns what was measured; called with a `Job`.
        needs: packages that are optional extras.
        gpu_only: why it has no meaning without a GPU; empty where it has.
    """

    name: str
    title: str
    run: Callable[..., Measured]
    needs: tuple[str, ...] = ()
    gpu_only: str = ""


@dataclass(frozen=True)
class Contest:
    """The same work done in several ways, memlab's first.

    Args:
        name: short name, the same over versions.
        title: what is compared.
        contestants: memlab's way, then its peers.
        measures: what is compared.
        same_result: relative difference of the loss after training up to which the result is the same; None where
            contestants do different work.
        note: what a reader must know about the work.
        scales: at which scales it is part of a run that names no contest.
    """

    name: str
    title: str
    contestants: tuple[Contestant, ...]
    measures: tuple[Measure, ...] = (MEMORY, TIME)
    same_result: float | None = 1e-4
    note: str = ""
    scales: tuple[str, ...] = SCALES

    def contestant(self, name: str) -> Contestant:
        """The contestant of this name."""
        return next(each for each in self.contestants if each.name == name)


@dataclass(frozen=True)
class Measured:
    """What a contestant's run measured.

    Args:
        numbers: by name; those of `Contest.measures` are compared, others are shown.
        losses: of every step, as the loop saw them.
        gradient_norms: of every step, where the loop computed them.
        result_loss: of the trained model on one batch, in eval mode.
        notes: what the contestant itself had to say.
    """

    numbers: Mapping[str, float]
    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    result_loss: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Key:
    """What a result belongs to: a run with the same key need not be done again.

    Args:
        contest: its name.
        contestant: its name.
        round: of the alternating rounds, from 0.
        scale: one of `SCALES`.
        device: what it ran on.
        code: digest of memlab's source.
        versions: of the packages it depends on.
    """

    contest: str
    contestant: str
    round: int
    scale: str
    device: str
    code: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """One run of one contestant.

    Args:
        key: what it belongs to.
        date: when it ended, as YYYY-MM-DD.
        status: how it ended.
        reason: why it was not run or failed.
        measured: what it measured, when it did.
        wall_seconds: how long its process took.
    """

    key: Key
    date: str
    status: Status
    reason: str = ""
    measured: Measured | None = None
    wall_seconds: float = 0.0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read what `to_json` wrote."""
        read: dict[str, Any] = json.loads(line)
        measured = read.pop("measured")
        key, status = Key(**read.pop("key")), Status(read.pop("status"))
        return cls(key, status=status, measured=None if measured is None else _measured(measured), **read)


def _measured(read: dict[str, Any]) -> Measured:
    lists = {name: tuple(read[name]) for name in ("losses", "gradient_norms", "notes")}
    return Measured(read["numbers"], result_loss=read["result_loss"], **lists)


@dataclass
class RecordFile:
    """Records in a file, one line each, appended as they are made.

    Args:
        path: of the file, which need not exist yet.

    Attributes:
        records: oldest first.
        damaged: lines that could not be read, such as one that a kill cut off.
    """

    path: Path
    records: list[Record] = field(default_factory=list)
    damaged: int = 0

    @classmethod
    def read(cls, path: Path) -> RecordFile:
        """Read a file; a line that is broken off is counted and left out."""
        stored = cls(path)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                stored.records.append(Record.from_json(line))
            except (ValueError, KeyError, TypeError):
                stored.damaged += 1
        return stored

    def add(self, record: Record) -> None:
        """Append a record, on a line of its own whatever stands before it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a") as file:
            file.write(("\n" if cut_off else "") + record.to_json() + "\n")
        self.records.append(record)

    def done(self) -> set[str]:
        """Keys that need not be run again; what failed is tried again."""
        return {key_text(each.key) for each in self.records if each.status is not Status.FAILED}

    def forget(self, contests: Iterable[str], scale: str) -> None:
        """Drop the records of contests at a scale."""
        named = set(contests)
        kept = [each for each in self.records if each.key.contest not in named or each.key.scale != scale]
        self.rewrite(kept)

    def tidy(self) -> None:
        """Keep only what is shown: of every contest and scale the newest code and versions, each run once."""
        self.rewrite(newest(self.records))

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the file by these records, at once."""
        self.records, self.damaged = list(records), 0
        if not self.path.parent.exists():
            return
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(each.to_json() + "\n" for each in self.records))
        fresh.replace(self.path)


def key_text(key: Key) -> str:
    """A key as text that can be compared.

    Example:
        >>> key_text(Key("a", "b", 0, "tiny", "cpu", "c0de", {"torch": "2.13.0"}))[:20]
        '{"code": "c0de", "co'
    """
    return json.dumps(asdict(key), sort_keys=True)


def newest(records: Iterable[Record]) -> list[Record]:
    """Of every contest, scale and device the records made with the code of its last record, the last of each run."""
    listed = list(records)
    code = {_place(each.key): each.key.code for each in listed}
    last = {
        (*_place(each.key), each.key.contestant, each.key.round): each
        for each in listed
        if each.key.code == code[_place(each.key)]
    }
    return list(last.values())


def _place(key: Key) -> tuple[str, str, str]:
    return key.contest, key.scale, key.device


def not_run(key: Key, date: str, reason: str) -> Record:
    """The record of a contestant that could not be asked."""
    return Record(key, date, Status.NOT_RUN, reason)


def at_round(record: Record, number: int) -> Record:
    """The same record as of another round."""
    return replace(record, key=replace(record.key, round=number))
