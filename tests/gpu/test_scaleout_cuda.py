"""Ranks beside a kernel that has a CUDA context already: they are spawned, so theirs are their own."""

from __future__ import annotations

import pytest
import torch

from memlab import launch
from memlab.errors import ScaleError
from tests.helpers.needs import needs
from tests.scaleout.runs import llama, texts


@needs(gpu=1)
@pytest.mark.parametrize("flags", ["fsdp2", "tp", "ddp --accumulate 2"])
def test_a_context_in_the_kernel_is_no_obstacle(flags: str) -> None:
    workload = llama()
    workload.model.cuda()
    batches = [ids.cuda() for ids in texts(3)]
    assert torch.cuda.is_initialized()

    def train() -> list[float]:
        (optimizer,) = workload.optimizers
        losses = []
        for ids in batches:
            loss = workload.model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first, *_, last = launch(train, workload, f"--scale {flags}", nproc=1).value
    assert last < first
    assert all(parameter.is_cuda for parameter in workload.model.parameters())
    with pytest.raises(ScaleError, match=r"^nproc 99: this machine has \d+ GPUs"):
        launch(train, workload, f"--scale {flags}", nproc=99)
