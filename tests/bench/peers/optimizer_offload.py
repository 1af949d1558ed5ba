"""Optimizer state off the device: torchao's `CPUOffloadOptimizer` and DeepSpeed's ZeRO-Offload."""

from __future__ import annotations

import os

import torch

from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import gpt2
from tests.bench.peers.records import Contest, Contestant, Measured
from tests.bench.peers.watching import Job

_HOST = "it moves to the host, which on a CPU is where the tensors are"


def _memlab(job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device), "--offload optimizer")


def _as_written(job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device))


def _torchao(job: Job) -> Measured:
    from torchao.optim import CPUOffloadOptimizer

    work = gpt2(job.scale, job.device)
    optimizer = CPUOffloadOptimizer(work.model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return by_hand(job, work, optimizer=optimizer)


def _zero_offload(job: Job) -> Measured:
    """One rank, fp32, and nothing else of DeepSpeed's."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29551",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    import deepspeed

    deepspeed.init_distributed("nccl" if job.on_gpu else "gloo", auto_mpi_discovery=False)
    work = gpt2(job.scale, job.device)
    engine, *_ = deepspeed.initialize(
        model=work.model,
        config={
            "train_micro_batch_size_per_gpu": work.batch_rows,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        },
    )

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return by_hand(job, work, step=step)


CONTESTS = (
    Contest(
        "offload-optimizer",
        "Optimizer offload, GPT-2",
        (
            Contestant("memlab", "a plain loop under `--offload optimizer`", _memlab),
            Contestant("as-written", "state on the device", _as_written),
            Contestant("torchao", "torchao CPUOffloadOptimizer", _torchao, ("torchao",), _HOST),
            Contestant("zero-offload", "DeepSpeed ZeRO-Offload", _zero_offload, ("deepspeed",), _HOST),
        ),
        same_result=1e-4,
    ),
)
