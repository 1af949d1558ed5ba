"""Runs of the benchmark at its smallest: contestants in processes of their own, resumed after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.bench.peers import runner
from tests.bench.peers.__main__ import chosen, main, records_in
from tests.bench.peers.contests import BY_NAME, CONTESTS
from tests.bench.peers.loops import by_hand
from tests.bench.peers.records import Contest, Contestant, Measured, Record, RecordFile, Status
from tests.bench.peers.runner import Here, Turn, run_all, turns
from tests.bench.peers.watching import Job, living_tensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs small, on the CPU")
CPU = Job("tiny", torch.device("cpu"))
HERE = Here("tiny", "cpu", has_gpu=False, code="c0de")


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.version_of
    monkeypatch.setattr(runner, "version_of", lambda package: "" if package == "torchao" else real(package))


@pytest.mark.full
@pytest.mark.usefixtures("without_torchao")
def test_contests_run_from_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["bert-accumulation", "8bit"]
    assert main(["--only", *names, "--scale", "tiny", "--results", str(tmp_path)]) == 0
    found = {(each.key.contest, each.key.contestant): each for each in records_in(tmp_path)}
    assert {name for name, each in found.items() if each.status is Status.MEASURED} == {
        ("bert-accumulation", "memlab"),
        ("bert-accumulation", "trainer"),
        ("8bit", "memlab"),
        ("8bit", "bitsandbytes"),
    }
    missing = found["8bit", "torchao"]
    assert (missing.status, missing.reason) == (Status.NOT_RUN, "torchao not installed: pip install 'memlab[peers]'")
    said = capsys.readouterr()
    assert "bert-accumulation: memlab, round 1 (5 to go)" in said.err
    # Trainer's own accumulation is wrong on this model by the number of its parts
    assert "the peer reports loss 4.00 × and gradient norm" in said.out
    assert "8-bit Adam, GPT-2: torchao AdamW8bit: not run: torchao not installed" in said.out
    for each in found.values():
        if each.measured is not None:
            assert each.measured.numbers["peak_allocated_bytes"] > 10_000
            assert each.measured.numbers["sample_seconds"] > 0


@pytest.mark.few(0, full=0)
def test_a_run_that_is_killed_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        "-m",
        "tests.bench.peers",
        "--only",
        "switching",
        "checkpointing",
        "--scale",
        "tiny",
        "--results",
        str(tmp_path),
    ]
    # results belong to a device with so many threads, and this process may have been given fewer
    threads = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    run = subprocess.Popen(
        [sys.executable, *command], cwd=runner.ROOT, env=threads, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not records_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    before = records_in(tmp_path)
    assert before
    taken = []

    def take(turn: Turn, where: Here, process: object) -> Record:
        taken.append((turn.contest.name, turn.contestant.name))
        return Record(turn.key, "2026-01-02", Status.MEASURED, measured=Measured({"sample_seconds": 1.0}))

    monkeypatch.setattr(runner, "take", take)
    assert main(command[2:]) == 0
    everything = [(name, each.name) for name in ("switching", "checkpointing") for each in BY_NAME[name].contestants]
    assert [(each.key.contest, each.key.contestant) for each in before] + taken == everything
    assert main(command[2:]) == 0
    assert len(taken) == len(everything) - len(before)


def test_other_code_and_other_versions_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "take", lambda turn, where, process: Record(turn.key, "2026-01-02", Status.MEASURED))
    stored, contests = RecordFile(tmp_path / "cpu.jsonl"), [BY_NAME["checkpointing"]]
    for code, expected in (("one", 2), ("one", 2), ("two", 4)):
        run_all(contests, Here("tiny", "cpu", has_gpu=False, code=code), stored, lambda line: None)
        assert len(stored.records) == expected
    monkeypatch.setattr(runner, "version_of", lambda package: "9.9")
    run_all(contests, Here("tiny", "cpu", has_gpu=False, code="two"), stored, lambda line: None)
    assert len(stored.records) == 6


def test_it_stops_before_its_minutes_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    stored = RecordFile(tmp_path / "cpu.jsonl")
    remaining = run_all([BY_NAME["checkpointing"]], HERE, stored, said.append, minutes=0.5)
    # a contestant may take two minutes at this scale, half of which it is expected to
    assert remaining == 2
    assert said == ["stopped before time is over: 2 runs remain; the same command goes on with them"]
    assert stored.records == []


@pytest.mark.few(0, full=0)
@pytest.mark.parametrize("process", [runner.Fresh, runner.Forked])
def test_a_contestant_that_breaks_is_reported(process: type[runner.Fresh | runner.Forked]) -> None:
    broken = Contest("checkpointing", "", (Contestant("nobody", "", by_hand),))
    with closing(process(HERE)) as running:
        record = runner.take(turns([broken], HERE)[0], HERE, running)
    assert record.status is Status.FAILED
    assert record.reason.startswith("exit status 1: ")
    assert "StopIteration" in record.reason


def test_what_needs_a_gpu_is_not_run_without_one() -> None:
    turn = next(each for each in turns([BY_NAME["offload-activations"]], HERE) if each.contestant.name == "save_on_cpu")
    record = runner.take(turn, HERE, runner.Fresh(HERE))
    assert record.status is Status.NOT_RUN
    assert record.reason == "needs a GPU: it moves to the host, which on a CPU is where the tensors are"
    with_gpu = Here("tiny", "gpu", has_gpu=True, code="c0de")
    assert runner.why_not(turn, with_gpu) == ""


def test_rounds_alternate_who_begins() -> None:
    small = Here("small", "cpu", has_gpu=False, code="c0de")
    names = [each.contestant.name for each in turns([BY_NAME["accumulation"]], small)]
    assert names == ["memlab", "hand", "hand", "memlab", "memlab", "hand"]


def test_memlab_comes_first_and_always_runs() -> None:
    assert len(BY_NAME) == len(CONTESTS)
    for contest in CONTESTS:
        assert contest.contestants[0].name == "memlab"
        assert len(contest.contestants) >= 2
        assert contest.contestants[0].gpu_only == ""
    small, full = (chosen(None, scale) for scale in ("small", "full"))
    assert {each.name for each in full} - {each.name for each in small} == {
        f"bert-{row}-sdpa"
        for row in ("vanilla", "accumulation", "accumulation-checkpointing", "half", "all", "adafactor", "all-adafactor", "8bit", "all-8bit")
    }  # fmt: skip


_BOTH_COUNTS = """
import memlab
from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import adamw, gpt2
from tests.bench.peers.test_peers_runner import CPU
print(by_hand(CPU, gpt2("tiny", CPU.device)).numbers["peak_allocated_bytes"])
work = gpt2("tiny", CPU.device)
print(memlab.measure(memlab.Workload(work.model, adamw(work.model), batch=work.batch(0))).peak_allocated_bytes)
"""


@pytest.mark.few(0, full=0)
def test_a_peers_loop_is_counted_as_memlab_counts_its_own() -> None:
    # in a process of its own, as contestants are: what other tests have left here would be counted
    ran = subprocess.run(
        [sys.executable, "-c", _BOTH_COUNTS], cwd=runner.ROOT, check=True, capture_output=True, text=True
    )
    without, measured = map(int, ran.stdout.split())
    # the loop holds the losses of its steps, and a bench's batch is made while the one before is held
    assert without == pytest.approx(measured, rel=0.01)


def test_gradients_that_nobody_looked_at_are_found() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    (parameter * 2).sum().backward()
    found = {each.untyped_storage()._cdata for each in living_tensors()}
    assert parameter.grad is not None
    assert parameter.grad.untyped_storage()._cdata in found
