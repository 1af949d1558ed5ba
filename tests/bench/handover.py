"""A live run to two ranks and back, against saving it, restarting on two ranks, saving there and loading in a new kernel."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from memlab import Workload, launch
from tests.bench.figures import Figure
from tests.bench.restarted_run import BATCHES, HOME, OUT, ROOT, made, trained
from tests.bench.timing import paired

_ROUNDS = 3


def handover() -> list[Figure]:
    """Seconds of one step on two ranks under FSDP2, the way there and back included, against the way by hand."""
    model, optimizer = made()
    workload = Workload(model, optimizer)
    trained(model, optimizer, BATCHES[:2])
    spent: list[dict[str, float]] = []

    def handed_over() -> None:
        ran = launch(lambda: trained(model, optimizer, BATCHES[2:3]), workload, "--scale fsdp2", nproc=2)
        spent.append(dict(ran.seconds))

    with tempfile.TemporaryDirectory() as folder:

        def by_hand() -> None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / OUT)
            _python("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.bench.restarted_run", folder)
            _python("-m", "tests.bench.restarted_run", folder)  # the kernel that goes on
            (Path(folder) / HOME).unlink()

        ratio = paired(handed_over, by_hand, _ROUNDS, warmup=0)
    parts = {f"seconds {name}": min(each[name] for each in spent) for name in spent[0]}
    name = "a step on two ranks, there and back, against save, restart and load (time)"
    return [Figure(name, ratio.median, None, {**asdict(ratio), **parts})]


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, timeout=300)
