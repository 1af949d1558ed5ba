"""Engines in this process on a GPU: there and back, and what offload takes off the device."""

from __future__ import annotations

import gc

import pytest
import torch

from memlab import Workload, fit, measure
from tests.helpers.needs import needs
from tests.scaleout.live_runs import go
from tests.scaleout.runs import gpt2

FLAGS = (
    "--scale fsdp2", "--scale fsdp2 --offload optimizer", "--scale zero1", "--scale zero2 --offload optimizer", "--scale zero3",
    "--scale zero3 --offload optimizer,params",
)  # fmt: skip


def on_gpu() -> Workload:
    workload = gpt2()
    workload.model.cuda()
    return workload


@needs(gpu=1, extra="deepspeed")
@pytest.mark.parametrize("flags", FLAGS)
def test_there_and_back_trains_as_ever(flags: str) -> None:
    reference, workload = on_gpu(), on_gpu()
    expected = [each for first in (0, 3, 6) for each in go(reference, first, first + 3)]
    losses = go(workload, 0, 3)
    before = [(id(p), p.device) for p in workload.model.parameters()]
    with fit(workload, flags):
        losses += go(workload, 3, 6)
    assert [(id(p), p.device) for p in workload.model.parameters()] == before
    assert all(v.is_cuda for state in workload.optimizers[0].state.values() for v in state.values() if v.dim())
    losses += go(workload, 6, 9)
    # where the host updates, its arithmetic is another one in the last bits
    assert losses == pytest.approx(expected, rel=1e-5)
    for one, other in zip(reference.model.parameters(), workload.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@needs(gpu=1, extra="deepspeed")
@pytest.mark.parametrize("flags", ["--scale fsdp2 --offload optimizer", "--scale zero3 --offload optimizer,params"])
def test_offload_takes_parameters_and_moments_off_the_device(flags: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(16))
    ).cuda()
    batch = torch.randn(8, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    workload = Workload(model, optimizer, batch=(batch, batch), loss_fn=torch.nn.functional.mse_loss)
    as_written = measure(workload, steps=2)
    offloaded = measure(workload, flags, steps=2)
    assert offloaded.peak_allocated_bytes < 0.5 * as_written.peak_allocated_bytes
    gc.collect()
    torch.cuda.empty_cache()
    assert measure(workload, steps=2).peak_allocated_bytes < 1.02 * as_written.peak_allocated_bytes
