"""Gradient accumulation of a language model with ragged targets: by hand, each part weighted by its targets, and by Trainer."""

from __future__ import annotations

import torch

from tests.bench.peers.loops import by_hand, trainer
from tests.bench.peers.models import adamw, gpt2
from tests.bench.peers.records import Contest, Contestant, Measured
from tests.bench.peers.watching import Job

PARTS = 4


def _memlab(job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device), f"--accumulate {PARTS}")


def _by_hand(job: Job) -> Measured:
    work = gpt2(job.scale, job.device)
    optimizer = adamw(work.model)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [
            dict(zip(batch, each, strict=True)) for each in zip(*(v.chunk(PARTS) for v in batch.values()), strict=True)
        ]
        targets = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        total = torch.zeros((), device=work.device)
        for part, count in zip(parts, targets, strict=True):
            loss = work.model(**part).loss * (count / sum(targets))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return by_hand(job, work, optimizer=optimizer, step=step)


def _memlab_in_trainer(job: Job) -> Measured:
    return trainer(job, gpt2(job.scale, job.device), f"--accumulate {PARTS}")


def _trainer(job: Job) -> Measured:
    return trainer(job, gpt2(job.scale, job.device), gradient_accumulation_steps=PARTS)


CONTESTS = (
    Contest(
        "accumulation",
        "Accumulation, GPT-2, 4 micro-batches",
        (
            Contestant("memlab", "a plain loop under `--accumulate 4`", _memlab),
            Contestant("hand", "a loop that splits and weights by hand", _by_hand),
        ),
    ),
    Contest(
        "accumulation-trainer",
        "Accumulation, GPT-2 in a Trainer",
        (
            Contestant("memlab", "Trainer under `--accumulate 4`", _memlab_in_trainer),
            Contestant("trainer", "Trainer's own", _trainer),
        ),
    ),
)
