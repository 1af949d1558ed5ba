"""ZeRO-3 with what is off the device: in host memory, and in files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from memlab import Workload, launch
from memlab.session.snapshot import Snapshot
from tests.helpers.needs import needs
from tests.helpers.snapshots import changed_between
from tests.scaleout.handing import handed_over
from tests.scaleout.runs import regressed


def wide() -> Workload:
    """Layers large enough for DeepSpeed to put their state into files; shards of the second end within a block of a disk."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.ReLU(), nn.Linear(1100, 3))
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def rows(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 768, generator=generator) for _ in range(steps)]


def trained_with_files(workload: Workload, batches: Sequence[torch.Tensor]) -> list[float]:
    losses = regressed(workload, batches)
    if "RANK" in os.environ:
        files = {path.name for path in (Path(sys.argv[1]) / "offloaded").rglob("*.swp")}
        assert any(name.startswith("exp_avg-") for name in files), files
    return losses


@pytest.mark.full
@needs(extra="deepspeed")
def test_parameters_in_host_memory_train_as_ever() -> None:
    expected, losses, _, _ = handed_over("zero3 --offload params,optimizer", 2, rows(6), regressed, wide)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
@needs(extra="deepspeed", file_operators=True)
@pytest.mark.timeout(1200)
def test_optimizer_state_in_files_trains_as_ever() -> None:
    expected, losses, _, _ = handed_over("zero3 --offload optimizer:nvme,params", 2, rows(6), trained_with_files, wide)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
@needs(extra="deepspeed", file_operators=True)
@pytest.mark.timeout(1200)
def test_to_files_and_back_without_a_step_changes_nothing() -> None:
    workload = wide()
    regressed(workload, rows(2))
    before = Snapshot(workload)
    launch(lambda: None, workload, "--scale zero3 --offload optimizer:nvme,params", nproc=2)
    assert changed_between(before, Snapshot(workload)) == []
