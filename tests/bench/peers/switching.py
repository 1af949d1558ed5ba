"""Changing a setting of a run: a switch on the live model against a new process that loads a checkpoint.

Timed until the first step under the new setting is over. The restart is timed from the start of its process: saving the
checkpoint and stopping the old one are not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import memlab
from tests.bench.peers.models import adamw, gpt2
from tests.bench.peers.records import Contest, Contestant, Measure, Measured
from tests.bench.peers.watching import Job

_PLAN = "--accumulate 4 --checkpoint"


def _live(job: Job) -> Measured:
    work = gpt2(job.scale, job.device)
    optimizer = adamw(work.model)
    with memlab.fit(memlab.Workload(work.model, optimizer)) as session:
        for number in range(3):
            one_step(work.model, optimizer, work.batch(number))
        step_seconds = min(_timed(job, lambda: one_step(work.model, optimizer, work.batch(3))) for _ in range(3))

        def switch_and_step() -> None:
            session.switch(_PLAN)
            one_step(work.model, optimizer, work.batch(4))

        seconds = _timed(job, switch_and_step)
    return Measured({"switch_seconds": seconds, "step_seconds": step_seconds, "steps": seconds / step_seconds})


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """Forward, backward, update."""
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _timed(job: Job, work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    if job.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _restart(job: Job) -> Measured:
    work = gpt2(job.scale, job.device)
    optimizer = adamw(work.model)
    one_step(work.model, optimizer, work.batch(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"model": work.model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        command = [sys.executable, "-m", "tests.bench.peers.restarted", str(path), job.scale, job.device.type]
        began = time.time()
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
    return Measured({"switch_seconds": float(said.split()[-1]) - began})


CONTESTS = (
    Contest(
        "switching",
        "Another setting, GPT-2, until its first step is over",
        (
            Contestant("memlab", "session.switch on the live model", _live),
            Contestant("restart", "a new process that loads the checkpoint", _restart),
        ),
        measures=(Measure("switch_seconds", "time"),),
        same_result=None,
    ),
)
