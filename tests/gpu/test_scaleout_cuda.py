"""Ranks beside a kernel that has a CUDA context already: they are spawned, so theirs are their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memlab import launch
from memlab.errors import ScaleError
from tests.helpers.needs import needs
from tests.jupyter.conftest import Cell, cell, shell  # noqa: F401 - fixtures
from tests.scaleout.runs import gpt2, llama, texts, trained

_SETUP = """
import torch
from tests.scaleout.runs import gpt2, texts
workload = gpt2()
model, optimizer, scheduler = workload.model.cuda(), workload.optimizers[0], workload.scheduler
batches = [ids.cuda() for ids in texts(6)]
losses = []
"""
_LOOP = """
for ids in batches[{part}]:
    labels = ids.clone()
    labels[0, 3:] = -100
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""


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


@needs(gpu=2, extra="deepspeed")
@pytest.mark.parametrize("flags", ["fsdp2 --checkpoint --offload optimizer", "ddp --accumulate 2", "zero2", "zero3"])
def test_a_cell_on_two_gpus_has_the_losses_of_the_cpu(flags: str, cell: Cell, shell: Any) -> None:  # noqa: F811
    expected = trained(gpt2(), texts(6))
    assert cell(_SETUP).error is None
    for line, part in ((f"%%memfit --nproc 2 --scale {flags}", ":3"), ("%%memfit", "3:")):
        ran = cell(line + _LOOP.format(part=part))
        assert ran.error is None, ran.err
    assert shell.user_ns["losses"] == pytest.approx(expected, rel=1e-5)
    assert all(parameter.is_cuda for parameter in shell.user_ns["model"].parameters())
