"""What is kept of runs, and what is made of it: rules without torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.bench.peers.records import (
    MEMORY,
    TIME,
    Contest,
    Contestant,
    Key,
    Measured,
    Record,
    RecordFile,
    Status,
    newest,
)
from tests.bench.peers.verdicts import Pairing, Ratio, Verdict, pairings

FOLDER = Path(__file__).parent


def never(job: object) -> Measured:
    raise AssertionError("nothing runs here")


CONTEST = Contest("work", "Some work", (Contestant("memlab", "ours", never), Contestant("peer", "theirs", never)))


def record(
    contestant: str = "memlab",
    number: int = 0,
    code: str = "new",
    loss: float = 1.0,
    seconds: float = 1.0,
    **numbers: float,
) -> Record:
    measured = Measured({MEMORY.key: 1000.0, TIME.key: seconds, **numbers}, (loss,), (), loss)
    key = Key("work", contestant, number, "tiny", "cpu", code, {"torch": "2"})
    return Record(key, "2026-01-02", Status.MEASURED, measured=measured)


def pairing(*records: Record) -> Pairing:
    return pairings([CONTEST], records, "tiny", "cpu")[0]


@pytest.mark.parametrize(
    ("measure", "median", "low", "high", "verdict"),
    [
        (TIME, 0.90, 0.88, 0.92, Verdict.AHEAD),
        (TIME, 0.90, 0.80, 1.02, Verdict.LEVEL),  # not in every round
        (TIME, 1.015, 1.015, 1.015, Verdict.LEVEL),
        (TIME, 1.03, 1.02, 1.04, Verdict.BEHIND),
        (MEMORY, 1.004, 1.004, 1.004, Verdict.LEVEL),
        (MEMORY, 1.006, 1.006, 1.006, Verdict.BEHIND),
        (MEMORY, 0.994, 0.994, 0.994, Verdict.AHEAD),
    ],
)
def test_a_difference_counts_where_every_round_has_it(measure, median, low, high, verdict) -> None:
    assert Ratio(measure, 1, 1, median, low, high, 3).verdict is verdict


def test_two_rounds_decide_bytes_and_no_times() -> None:
    ours = [record(number=each, seconds=2.0, peak_allocated_bytes=900.0) for each in range(2)]
    memory, time = pairing(*ours, *(record("peer", number=each) for each in range(2))).ratios
    assert (memory.verdict, time.verdict) == (Verdict.AHEAD, Verdict.UNDECIDED)


def test_ratios_are_taken_round_by_round() -> None:
    machine = (1.0, 3.0, 2.0)  # it became slow, for both
    ours = [record(number=number, seconds=slow) for number, slow in enumerate(machine)]
    theirs = [record("peer", number=number, seconds=2 * slow) for number, slow in enumerate(machine)]
    time = pairing(*ours, *theirs).ratios[1]
    assert (time.median, time.low, time.high, time.ours, time.theirs) == (0.5, 0.5, 0.5, 2.0, 4.0)
    assert time.verdict is Verdict.AHEAD


def test_another_result_is_told() -> None:
    assert pairing(record(loss=1.0), record("peer", loss=1.00005)).same_result is True
    wrong = pairing(record(loss=1.0), record("peer", loss=1.01))
    assert wrong.same_result is False
    assert wrong.difference == pytest.approx(0.0099, rel=0.01)


def test_a_loss_that_a_peer_reports_too_large_becomes_a_note() -> None:
    their = record("peer", loss=1.0)
    assert their.measured is not None
    wrong = Record(their.key, their.date, their.status, measured=Measured(their.measured.numbers, (4.0,), (), 1.0))
    assert pairing(record(), wrong).notes == ("the peer reports loss 4.00 × memlab's",)


def test_a_contestant_that_did_not_run_has_a_reason_and_no_ratio() -> None:
    key = record("peer").key
    missing = pairing(record(), Record(key, "2026-01-02", Status.NOT_RUN, "torchao not installed"))
    assert (missing.ratios, missing.reason) == ((), "not run: torchao not installed")
    failed = pairing(record(), Record(key, "2026-01-02", Status.FAILED, "exit status 1"))
    assert failed.reason == "failed: exit status 1"
    assert pairing(record()).reason == "not run yet: theirs"


def test_only_the_newest_code_counts_and_of_it_the_last_run() -> None:
    old, new, again = record(code="old"), record(code="new"), record(code="new", seconds=9.0)
    peer_of_old = record("peer", code="old")
    assert newest([old, peer_of_old, new, again]) == [again]
    assert newest([new, again, peer_of_old, old]) == [peer_of_old, old]


def test_a_book_reads_what_it_wrote_and_survives_a_line_that_is_broken_off(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cpu.jsonl"
    stored = RecordFile.read(path)
    assert stored.records == []
    stored.add(record())
    with path.open("a") as file:
        file.write(record("peer").to_json()[:40])
    again = RecordFile.read(path)
    assert (again.records, again.damaged) == ([record()], 1)
    again.add(record("peer"))
    assert RecordFile.read(path).records == [record(), record("peer")]


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    stored = RecordFile(tmp_path / "cpu.jsonl")
    stored.add(Record(record().key, "2026-01-02", Status.FAILED, "exit status 1"))
    assert stored.done() == set()
    stored.add(record())
    assert len(stored.done()) == 1


def test_forgetting_and_tidying_rewrite_the_file(tmp_path: Path) -> None:
    stored = RecordFile(tmp_path / "cpu.jsonl")
    for each in (record(code="old"), record(), record("peer")):
        stored.add(each)
    stored.tidy()
    assert RecordFile.read(stored.path).records == [record(), record("peer")]
    stored.forget(["work"], "small")
    assert len(stored.records) == 2
    stored.forget(["work"], "tiny")
    assert RecordFile.read(stored.path).records == []


@pytest.mark.parametrize("name", ["records", "verdicts", "page", "picture", "causes"])
def test_what_is_pure_imports_no_torch(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    imported |= {alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names}
    own = {"memlab.units", *(f"tests.bench.peers.{each}" for each in ("records", "verdicts", "picture"))}
    outside = {each.partition(".")[0] for each in imported - own}
    assert outside <= {"__future__", "ast", "collections", "dataclasses", "enum", "html", "json", "math", "pathlib", "re", "statistics", "typing"}  # fmt: skip
