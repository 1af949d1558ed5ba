"""Updates inside the backward pass, against torch's `_apply_optimizer_in_backward`."""

from __future__ import annotations

import torch

from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import gpt2
from tests.bench.peers.records import Contest, Contestant, Measured
from tests.bench.peers.watching import Job


def _memlab(job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device), "--release-grads")


def _torch(job: Job) -> Measured:
    from torch.distributed.optim import _apply_optimizer_in_backward

    work = gpt2(job.scale, job.device)
    _apply_optimizer_in_backward(torch.optim.AdamW, list(work.model.parameters()), {"lr": 1e-4})

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = work.model(**batch).loss
        loss.backward()
        return loss.detach()

    return by_hand(job, work, step=step)


CONTESTS = (
    Contest(
        "release-grads",
        "Gradient release, GPT-2",
        (
            Contestant("memlab", "a plain loop under `--release-grads`", _memlab),
            Contestant("torch", "torch _apply_optimizer_in_backward", _torch),
        ),
        same_result=1e-5,
    ),
)
