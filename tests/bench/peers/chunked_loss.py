"""Cross-entropy over a large vocabulary in tiles: memlab, torch's `F.linear_cross_entropy` and Liger's fused one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import Work, adamw, gpt2
from tests.bench.peers.records import Contest, Contestant, Measured
from tests.bench.peers.watching import Job

# hidden states [n, d], the head's weight [v, d], targets [n] → the mean loss
FusedLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _work(job: Job) -> Work:
    return gpt2(job.scale, job.device, large_vocabulary=True)


def _memlab(job: Job) -> Measured:
    return by_hand(job, _work(job), "--chunk-loss")


def _as_written(job: Job) -> Measured:
    return by_hand(job, _work(job))


def _with(fused: FusedLoss, job: Job) -> Measured:
    """A loop that calls the model without its head, and the head's weight with the loss."""
    work = _work(job)
    model: Any = work.model
    optimizer = adamw(model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = model.transformer(batch["input_ids"]).last_hidden_state[:, :-1]  # [b, s - 1, d]
        targets = batch["labels"][:, 1:].reshape(-1)
        loss = fused(hidden.reshape(-1, hidden.shape[-1]), model.lm_head.weight, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return by_hand(job, work, optimizer=optimizer, step=step)


def _torch(job: Job) -> Measured:
    options = torch.nn.LinearCrossEntropyOptions()
    return _with(lambda hidden, weight, targets: F.linear_cross_entropy(hidden, weight, targets, options=options), job)


def _liger(job: Job) -> Measured:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return _with(lambda hidden, weight, targets: loss(weight, hidden, targets), job)


CONTESTS = (
    Contest(
        "chunk-loss",
        "Chunked loss, GPT-2 with a large vocabulary",
        (
            Contestant("memlab", "a plain loop under `--chunk-loss`", _memlab),
            Contestant("as-written", "the whole logits", _as_written),
            Contestant("torch", "F.linear_cross_entropy, default options", _torch),
            Contestant(
                "liger", "Liger's fused linear cross-entropy", _liger, ("liger_kernel",), "its kernels are Triton's"
            ),
        ),
        same_result=1e-4,
    ),
)
