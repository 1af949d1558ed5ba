"""8-bit Adam against torchao's and against bitsandbytes' own class, which memlab's kernels come from."""

from __future__ import annotations

from typing import Any

from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import gpt2
from tests.bench.peers.records import Contest, Contestant, Measured
from tests.bench.peers.watching import Job


def _memlab(job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device), "--adam8bit")


def _with(make: Any, job: Job) -> Measured:
    work = gpt2(job.scale, job.device)
    return by_hand(job, work, optimizer=make(work.model.parameters(), lr=1e-4))


def _torchao(job: Job) -> Measured:
    from torchao.optim import AdamW8bit

    return _with(AdamW8bit, job)


def _bitsandbytes(job: Job) -> Measured:
    from bitsandbytes.optim import AdamW8bit

    return _with(AdamW8bit, job)


CONTESTS = (
    Contest(
        "8bit",
        "8-bit Adam, GPT-2",
        (
            Contestant("memlab", "AdamW under `--adam8bit`", _memlab, ("bitsandbytes",)),
            Contestant("torchao", "torchao AdamW8bit", _torchao, ("torchao",)),
            Contestant("bitsandbytes", "bitsandbytes AdamW8bit", _bitsandbytes, ("bitsandbytes",)),
        ),
        same_result=0.02,
        note="torchao compiles its update: what that needs inside, a ledger of tensors does not see.",
    ),
)
