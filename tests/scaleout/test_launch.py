"""A live run goes to other processes and comes home."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from IPython.lib.pretty import pretty
from torch import nn

from memlab import Plan, Workload, fit, launch
from memlab.errors import RefusalError, ScaleError
from memlab.session.snapshot import Snapshot
from tests.helpers.needs import needs
from tests.helpers.snapshots import changed_between
from tests.scaleout.handing import assert_alike, engines, handed_over
from tests.scaleout.runs import gpt2, texts, trained, trained_by_own_criterion

BATCHES = texts(9)
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@pytest.fixture
def no_process_left() -> Any:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 10
    while left := [
        c for c in psutil.Process().children(recursive=True) if c.pid not in before and c.status() != "zombie"
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.few(0, full=2)
@pytest.mark.parametrize(
    "flags", engines(*ENGINES, "fsdp2 --offload optimizer --checkpoint", "zero3 --offload optimizer")
)
def test_two_ranks_train_as_one_process_does(flags: str) -> None:
    expected, losses, reference, workload = handed_over(flags, 2, BATCHES)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_alike(reference.model, workload.model, rtol=1e-4, atol=2e-6)
    assert workload.model.lm_head.weight is workload.model.transformer.wte.weight
    for one, other in zip(reference.optimizers[0].param_groups, workload.optimizers[0].param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


@pytest.mark.few(0, full=1)
@pytest.mark.parametrize("flags", engines("fsdp2", "zero1", "zero3"))
def test_one_rank_makes_no_difference_at_all(flags: str) -> None:
    # engines add up the norm for clipping in another order
    expected, losses, reference, workload = handed_over(flags, 1, BATCHES, partial(trained, clips=False))
    assert losses == expected
    assert changed_between(Snapshot(reference), Snapshot(workload)) == []


@pytest.mark.few(0, full=1)
@pytest.mark.parametrize(
    "flags",
    engines(
        "ddp", "fsdp2 --offload optimizer,params", "zero1", "zero2 --offload optimizer",
        "zero3 --offload optimizer,params",
    ),
)  # fmt: skip
def test_there_and_back_without_a_step_changes_nothing(flags: str) -> None:
    workload = gpt2()
    trained(workload, BATCHES[:2])
    before = Snapshot(workload)
    assert launch(lambda: "there", workload, f"--scale {flags}", nproc=2).value == "there"
    assert changed_between(before, Snapshot(workload)) == []


@pytest.mark.few(0, full=1)
@pytest.mark.parametrize("flags", engines("fsdp2", "zero2"))
def test_a_loss_of_the_loops_own_gets_the_outputs_of_all_rows(flags: str) -> None:
    expected, losses, _, _ = handed_over(flags, 2, BATCHES, trained_by_own_criterion)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_each_rank_says_what_it_needed(capsys: pytest.CaptureFixture[str]) -> None:
    workload = gpt2()

    def train(there: Workload) -> int:
        print("hello")
        trained(there, BATCHES[:3])
        return os.getpid()

    lines: list[str] = []
    launched = launch(train, workload, "--scale fsdp2", nproc=2, progress=lines.append)
    assert capsys.readouterr().out == "hello\n"
    assert launched.value != os.getpid()
    assert launched.comparison is not None
    assert [each.plan for each in launched.comparison.measurements] == ["rank 0", "rank 1"]
    weights = sum(p.nbytes for p in workload.model.parameters())
    for rank in launched.comparison.measurements:
        assert rank.breakdown["parameters"] < 0.9 * weights
        assert rank.peak_allocated_bytes > rank.breakdown["parameters"]
    assert "rank 1" in str(launched)
    assert "vs first" not in str(launched)
    assert "no gain" not in str(launched)
    assert launched._repr_html_().count("<tr") >= 3
    assert pretty(launched) == str(launched)
    assert len(launched.losses) == 3
    assert lines[-1].startswith("step 3 on 2 processes · loss ")
    assert re.search(r" samples/s · peaks? [0-9.]+ [KM]iB", lines[-1]), lines[-1]


@pytest.mark.few(1, full=1)
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("how", ["raises", "dies", "hangs", "runs out"])
def test_a_rank_that_fails_is_named_and_nothing_has_changed(how: str) -> None:
    workload = gpt2()
    trained(workload, BATCHES[:2])
    before = Snapshot(workload)

    def train(there: Workload) -> None:
        trained(there, BATCHES[2:3])
        if int(os.environ["RANK"]) == 1:
            if how == "raises":
                raise ValueError("wrong turn")
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(1000)
            if how == "runs out":
                raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        trained(there, BATCHES[3:])

    with pytest.raises(ScaleError) as caught:
        launch(train, workload, "--scale ddp", nproc=2, hang_seconds=15 if how == "hangs" else 600)
    said = str(caught.value)
    assert said.endswith("nothing here has changed")
    expected = {
        "raises": "rank 1 of 2 failed in step 2: ValueError: wrong turn",
        "dies": "rank 1 of 2 was killed (SIGKILL: the system does so when host memory runs out) in step 2",
        "hangs": "all ranks have been silent for 15 s and were ended (steps done: rank 0: 1, rank 1: 1)",
        "runs out": "rank 1 of 2 ran out of memory in step 2: OutOfMemoryError: tried to allocate 1 TiB",
    }
    assert said.startswith(expected[how])
    if how == "raises":
        assert 'raise ValueError("wrong turn")' in caught.value.__notes__[0]
    assert changed_between(before, Snapshot(workload)) == []


@pytest.mark.full
def test_ranks_that_split_a_batch_refuse_a_key_value_cache() -> None:
    workload = gpt2()

    def train(there: Workload) -> None:
        there.model(BATCHES[0], use_cache=True)

    with pytest.raises(ScaleError, match=r"the loop asks GPT2\w* for a key-value cache"):
        launch(train, workload, "--scale ddp", nproc=2)


@pytest.mark.full
@pytest.mark.usefixtures("no_process_left")
def test_an_interrupt_ends_all_ranks() -> None:
    workload = gpt2()
    before = Snapshot(workload)
    reached = threading.Event()

    def train(there: Workload) -> None:
        for _ in range(10_000):
            trained(there, BATCHES[:1])

    def progress(_: str) -> None:
        if not reached.is_set():
            reached.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(train, workload, "--scale ddp", nproc=2, progress=progress)
    assert reached.is_set()
    assert changed_between(before, Snapshot(workload)) == []


_KILLED = """
import os, psutil, signal
from memlab import launch
from tests.scaleout.runs import gpt2, texts, trained

def train(there):
    for _ in range(10_000):
        trained(there, texts(1))

def progress(_line):
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

launch(train, gpt2(), "--scale ddp", nproc=2, progress=progress)
"""


@pytest.mark.full
def test_ranks_end_with_a_kernel_that_is_killed() -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, check=False, timeout=120)
    ranks = [int(pid) for pid in killed.stdout.split()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in ranks):
        assert time.monotonic() < deadline, ranks
        time.sleep(0.1)


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def train() -> None:
        with lock:
            pass

    with pytest.raises(
        ScaleError, match=r"^train cannot be sent .*: its variable lock \(lock\) cannot be pickled .*make it inside"
    ):
        launch(train, gpt2(), "--scale ddp")


def test_bad_input_is_refused_before_anything_starts() -> None:
    workload = gpt2()
    with pytest.raises(ScaleError, match=r"^nproc 0: expected a whole number of processes, 1 or more"):
        launch(lambda: None, workload, "--scale ddp", nproc=0)
    with pytest.raises(
        ScaleError, match=r"^the training function takes a, b: expected no argument, or one, the workload"
    ):
        launch(lambda a, b: None, workload, "--scale ddp")
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(
        ScaleError, match=r"^Sequential has BatchNorm \(1\), whose statistics depend on the whole batch"
    ):
        launch(lambda: None, Workload(normed), "--scale ddp")
    strange = torch.optim.SGD([*workload.model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ScaleError, match=r"^SGD steps 1 parameters that are not in"):
        launch(lambda: None, Workload(workload.model, strange), "--scale ddp")
    with (
        fit(workload, Plan.parse("--accumulate 2")),
        pytest.raises(ScaleError, match=r"^--accumulate 2 is in force on .*: undo it first"),
    ):
        launch(lambda: None, workload, "--scale ddp")


@needs(extra="deepspeed")
def test_an_optimizer_that_zero_would_step_otherwise_is_refused_before_anything_starts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    adafactor = torch.optim.Adafactor(model.parameters())
    with pytest.raises(
        RefusalError, match=r"^scale: ZeRO updates many parameters as one, which Adafactor is not known"
    ):
        launch(lambda: None, Workload(model, adafactor), "--scale zero1")
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(
        RefusalError, match=r"ZeRO keeps one count of steps .* 1.weight was stepped 0 times, 0.weight 1 "
    ):
        launch(lambda: None, Workload(model, optimizer), "--scale zero3")


@pytest.mark.full
def test_a_run_without_a_step_comes_home_too() -> None:
    workload = gpt2()
    launched = launch(lambda: 3, workload, "--scale ddp", nproc=1)
    assert launched.value == 3
    assert launched.comparison is None
    assert str(launched) == "no optimizer step ended on the ranks, so nothing was measured"
