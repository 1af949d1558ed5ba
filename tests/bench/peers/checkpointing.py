"""Activation checkpointing against Transformers' own, of every block and of every second one."""

from __future__ import annotations

from functools import partial

from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import gpt2
from tests.bench.peers.records import Contest, Contestant, Measured
from tests.bench.peers.watching import Job


def _memlab(plan: str, job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device), plan)


def _transformers(every: int, job: Job) -> Measured:
    work = gpt2(job.scale, job.device)
    work.model.activation_checkpointing_enable(every_n_layers=every)
    return by_hand(job, work)


def _contest(name: str, title: str, flags: str, every: int) -> Contest:
    return Contest(
        name,
        f"Checkpointing, GPT-2, {title}",
        (
            Contestant("memlab", f"`{flags}`", partial(_memlab, flags)),
            Contestant("transformers", f"Transformers, every_n_layers={every}", partial(_transformers, every)),
        ),
        same_result=1e-5,
    )


CONTESTS = (
    _contest("checkpointing", "every block", "--checkpoint", 1),
    _contest("checkpointing-every-2", "every second block", "--checkpoint every:2", 2),
)
