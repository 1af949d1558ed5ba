"""`%%memfit --nproc 2 --scale fsdp2`: a cell in two processes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.jupyter.conftest import Cell

SETUP = """
import torch
from tests.scaleout.runs import gpt2, texts
def fresh():
    workload = gpt2()
    return workload.model, workload.optimizers[0], workload.scheduler
batches = texts(6)
losses = []
def step(ids):
    return model(input_ids=ids, labels=ids).loss
"""

OFF = re.compile(r"predicted for a rank: [\d.]+ MiB, ([+−±]?\d+) % of the highest peak measured")
LOOP = """
for number, ids in enumerate(batches):
    loss = step(ids)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("trained", number + 1)
"""


def off_by(said: str) -> int:
    """By how many percent the prediction in a receipt is off; negative when too low."""
    found = OFF.search(said)
    assert found is not None, said
    return int(found[1].replace("−", "-").replace("±", ""))


def test_a_cell_in_two_processes_leaves_what_it_did(cell: Cell, shell: Any) -> None:
    shell.run_line_magic("config", "MemLab.predict = True")
    cell(SETUP)
    cell(f"model, optimizer, scheduler = fresh(){LOOP}{LOOP}\nexpected, rate = losses, scheduler.get_last_lr()")
    cell("model, optimizer, scheduler = fresh(); kept = losses = []")
    cell(f"%%memfit\n{LOOP}")
    model, kept = shell.user_ns["model"], shell.user_ns["kept"]
    ran = cell(f"%%memfit --nproc 2 --scale fsdp2\n{LOOP}")
    assert ran.error is None
    said = ran.out
    assert "trained 6\n" in said
    assert "memfit: 6 steps on 2 processes; " in said
    rows = [line.split()[0] for line in said.splitlines() if line.startswith(("one process", "rank "))]
    assert rows == ["one", "rank", "rank"]
    assert shell.user_ns["model"] is model
    assert shell.user_ns["losses"] is kept
    assert kept == pytest.approx(shell.user_ns["expected"], rel=1e-6)
    assert shell.user_ns["scheduler"].get_last_lr() == shell.user_ns["rate"]
    assert shell.user_ns["number"] == 5
    off = [off_by(said)]
    # what a thread of gloo has not let go of yet makes the highest peak of a run higher at times, and never lower
    while off[-1] < -2 and len(off) < 3:
        off.append(off_by(cell(f"%%memfit --nproc 2 --scale fsdp2\n{LOOP}").out))
    assert abs(off[-1]) <= 2, off
    predicted = shell.run_line_magic("memfit", "predict --scale fsdp2 --nproc 2")
    one, two = predicted.predictions
    assert predicted.measured(one) is None
    assert predicted.measured(two) == pytest.approx(two.peak_allocated_bytes, rel=0.03)


@pytest.mark.full
def test_a_rank_that_fails_shows_its_line_and_one_sentence(cell: Cell) -> None:
    cell(SETUP)
    cell("model, optimizer, scheduler = fresh()")
    ran = cell("%%memfit --nproc 2 --scale ddp\nstep(batches[0])\nraise ValueError('wrong turn')")
    assert "failed before its first step ended: ValueError: wrong turn; nothing here has changed" in str(ran.error)
    assert "    raise ValueError('wrong turn')" in ran.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nproc 2", "--nproc 2 needs --scale and one of ddp, fsdp2"),
        (
            "--scale ddp",
            "--scale ddp is of several processes: give it to a cell, as in '%%memfit --nproc 2 --scale ddp'",
        ),
        ("--nproc two --scale ddp", "--nproc two: expected a whole number of processes, 1 or more"),
        ("--nproc 2 --scale zero", "--scale zero: allowed are ddp, fsdp2, tp, zero1, zero2, zero3; did you mean"),
        (
            "--nproc 2 --scale ddp --budget 1GiB",
            "--budget with --nproc: plans are chosen for one process; leave it out",
        ),
        ("--nproc 2 --scale ddp --release-grads", "scale: --scale ddp and --release-grads exclude each other"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(cell: Cell, line: str, said: str) -> None:
    assert said in str(cell(f"%%memfit {line}\npass").error)


def test_cells_that_ranks_cannot_run_are_refused(cell: Cell) -> None:
    assert "no model found: a cell in several processes" in str(cell("%%memfit --nproc 2 --scale ddp\npass").error)
    cell(SETUP)
    cell("model, optimizer, scheduler = fresh()")
    refused = cell("%%memfit --nproc 2 --scale ddp\n!ls\nmodel")
    assert "the cell uses ! or %, which ranks do not know" in str(refused.error)
