"""`%%memfit --scale fsdp2`: a cell under an engine, in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from memlab.runtime.workload import Workload
from memlab.session.snapshot import Snapshot
from tests.helpers.needs import needs
from tests.helpers.snapshots import changed_between
from tests.jupyter.conftest import MAKE, TRAIN, Cell


@pytest.mark.parametrize(
    "flags", ["--scale fsdp2", pytest.param("--scale zero3 --offload optimizer,params", marks=needs(extra="deepspeed"))]
)
def test_an_engine_on_a_cell_and_off_again(flags: str, cell: Cell, shell: Any) -> None:
    cell(MAKE)
    cell(TRAIN + TRAIN)
    expected = Snapshot(Workload(shell.user_ns["model"], shell.user_ns["optimizer"]))
    cell(MAKE)
    model = shell.user_ns["model"]
    ran = cell(f"%%memfit {flags}\n{TRAIN}")
    assert ran.error is None
    assert "4 steps" in ran.out
    assert flags.split()[1] in ran.out
    assert dist.is_initialized()
    assert "plan in force" in cell("%memfit").out
    failed = cell("%%memfit\nmodel(inputs); raise ValueError('x')")
    assert isinstance(failed.error, ValueError)
    assert cell("%memfit undo").out == "memfit: Sequential is as it was\n"
    assert not dist.is_initialized()
    cell(TRAIN)
    assert shell.user_ns["model"] is model
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert changed_between(expected, Snapshot(Workload(model, shell.user_ns["optimizer"]))) == []


def test_what_does_not_go_with_an_engine_is_one_line(cell: Cell) -> None:
    cell(MAKE)
    said = str(cell(f"%%memfit --scale fsdp2 --budget 1GiB\n{TRAIN}").error)
    assert said.startswith("--budget with --scale fsdp2: a plan is chosen for a budget by predictions")
    assert "exclude each other" in str(cell(f"%%memfit --scale fsdp2 --accumulate 2\n{TRAIN}").error)
    cell(f"%%memfit\n{TRAIN}")
    assert "--scale fsdp2 needs --nproc: engines are predicted for ranks" in str(
        cell("%memfit predict --scale fsdp2").error
    )
    said = str(cell("%memfit export deepspeed --scale fsdp2").error)
    assert said == "--scale fsdp2 to 'deepspeed': allowed are torch, trainer, accelerate, fsdp2"
