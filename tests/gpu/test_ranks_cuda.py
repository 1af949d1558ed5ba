"""What is predicted for a rank beside one on a GPU: every engine in a process of its own, NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memlab import Workload, launch, predict_ranks
from tests.helpers.needs import needs
from tests.scaleout.ranks import gpt2, steps

pytestmark = [needs(gpu=1), pytest.mark.memory]


@pytest.mark.parametrize(
    "flags",
    [
        "ddp",
        "fsdp2",
        "fsdp2 --offload optimizer",
        *(pytest.param(f"zero{stage}", marks=needs(extra="deepspeed")) for stage in (1, 2, 3)),
    ],
)
def test_a_rank_on_a_gpu_needs_what_was_predicted(flags: Any) -> None:
    torch.manual_seed(0)
    model, batch = gpt2(1024)
    model = model.cuda().train()
    there = {name: value.cuda() for name, value in batch.items()}
    workload = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=there, name="gpt2")
    steps(workload, 1)
    predicted = predict_ranks(workload, f"--scale {flags}", nproc=1)
    launched = launch(lambda rank: steps(rank, 4), workload, f"--scale {flags}", nproc=1)
    assert launched.comparison is not None
    (measured,) = launched.comparison.measurements
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.05)
