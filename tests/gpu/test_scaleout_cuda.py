"""Ranks beside a kernel that has a CUDA context already: they are spawned, so theirs are their own."""

from __future__ import annotations

import pytest
import torch

from memlab import launch
from memlab.errors import ScaleError
from tests.helpers.needs import needs
from tests.scaleout.runs import llama, texts, trained


@needs(gpu=1)
@pytest.mark.parametrize("flags", ["fsdp2", "tp", "ddp --accumulate 2"])
def test_a_context_in_the_kernel_is_no_obstacle(flags: str) -> None:
    workload, untouched = llama(), llama()
    workload.model.cuda()
    untouched.model.cuda()
    batches = [ids.cuda() for ids in texts(3)]
    expected = trained(untouched, batches)
    assert torch.cuda.is_initialized()
    losses = launch(lambda: trained(workload, batches), workload, f"--scale {flags}", nproc=1).value
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(parameter.is_cuda for parameter in workload.model.parameters())
    with pytest.raises(ScaleError, match=r"^nproc 99: this machine has \d+ GPUs"):
        launch(lambda: trained(workload, batches), workload, f"--scale {flags}", nproc=99)
