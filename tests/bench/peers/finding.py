"""Making a batch fit: `find_plan` against accelerate's `find_executable_batch_size` and Lightning's BatchSizeFinder.

Everyone is asked to train batches of so many rows in a budget that a third of them fill. The budget is enforced: on a GPU by the
allocator, on a CPU by a ledger, whose out-of-memory error is put into the words that the peers look for. What was
found is then timed without the ledger. The peers give smaller batches, memlab keeps the batch.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

import memlab
from memlab.measuring.device import device_for
from memlab.records import Category
from memlab.units import MIB
from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import Work, adamw, gpt2
from tests.bench.peers.records import TIME, Contest, Contestant, Measure, Measured
from tests.bench.peers.watching import Job, living_tensors

ROWS = {"tiny": 16, "small": 32, "full": 64}
BUDGET_MIB = {"tiny": 2, "small": 80, "full": 8192}
STEPS = 3  # of a trial: what both peers' users and memlab run


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Args:
        rows: of a batch.
        trials: runs it took.
        seconds: time it took.
        note: its course in words.
        plan: flags of memlab; None for a peer.
    """

    rows: int
    trials: int
    seconds: float
    note: str
    plan: str | None = None


def _work(job: Job) -> Work:
    return gpt2(job.scale, job.device, batch_rows=ROWS[job.scale])


def _by_memlab(job: Job) -> Found:
    work = _work(job)
    workload = memlab.Workload(work.model, adamw(work.model), batch=work.batch(0))
    began = time.perf_counter()
    found = memlab.find_plan(workload, f"{BUDGET_MIB[job.scale]}MiB", steps=STEPS, progress=lambda line: None)
    seconds = time.perf_counter() - began
    plan = "" if found.plan == memlab.Plan() else found.plan.label
    return Found(work.batch_rows, len(found.trials), seconds, f"found: {found.plan.label}", plan)


def _by_accelerate(job: Job) -> Found:
    from accelerate.utils import find_executable_batch_size

    work, tried = _work(job), []

    @find_executable_batch_size(starting_batch_size=ROWS[job.scale])
    def training(batch_size: int) -> int:
        tried.append(batch_size)
        model_steps(work, batch_size)
        return batch_size

    began = time.perf_counter()
    with limited(job):
        rows = training()
    return Found(rows, len(tried), time.perf_counter() - began, f"tried: {tried}")


def model_steps(work: Work, rows: int) -> None:
    """A trial as users of accelerate write it: optimizer and loop inside the function."""
    optimizer = adamw(work.model)
    with speaking_of_cuda():
        for number in range(STEPS):
            work.model(**work.batch(number, rows)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _by_lightning(job: Job) -> Found:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    class Module(pl.LightningModule):  # type: ignore[misc] # lightning is an optional extra
        def __init__(self, work: Work) -> None:
            super().__init__()
            self.model, self.rows, self.batch_size = work.model, work.rows[: ROWS[job.scale]], 2
            self.tried: list[int] = []

        def train_dataloader(self) -> Any:
            self.tried.append(self.batch_size)
            return DataLoader(self.rows, batch_size=self.batch_size)  # type: ignore[arg-type]

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            with speaking_of_cuda():
                return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    module = Module(_work(job))
    accelerator = "gpu" if job.on_gpu else "cpu"
    trainer = pl.Trainer(
        accelerator=accelerator, devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    began = time.perf_counter()
    with limited(job), speaking_of_cuda():
        rows = Tuner(trainer).scale_batch_size(module, mode="binsearch", steps_per_trial=STEPS)
    seconds = time.perf_counter() - began
    return Found(rows or 0, len(module.tried), seconds, f"tried: {module.tried}")


@contextmanager
def limited(job: Job) -> Iterator[None]:
    """A budget for a loop that knows nothing of memlab."""
    device = device_for(job.device, BUDGET_MIB[job.scale] * MIB)
    ledger = device.ledger()
    if not job.on_gpu:
        ledger.begin((Category.TEMPORARIES, tensor) for tensor in living_tensors())
        ledger.start()
    try:
        yield
    finally:
        ledger.close()
        device.close()


@contextmanager
def speaking_of_cuda() -> Iterator[None]:
    """The ledger's error in the words that accelerate and Lightning look for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(f"CUDA out of memory. {error}") from None


def _searched(search: Callable[[Job], Found], job: Job) -> Measured:
    """Search, then time what was found on a fresh model, when that of the search is gone."""
    found = search(job)
    gc.collect()
    work = _work(job)
    measured = by_hand(job, Work(work.model, work.rows, found.rows), found.plan)
    told = {"find_seconds": found.seconds, "trials": found.trials, "rows": found.rows}
    kept = float(found.rows == ROWS[job.scale])
    return Measured(
        {**measured.numbers, **told, "batch_kept": kept}, measured.losses, notes=(found.note, *measured.notes)
    )


CONTESTS = (
    Contest(
        "finding",
        "A batch that does not fit, GPT-2",
        (
            Contestant("memlab", "find_plan", partial(_searched, _by_memlab)),
            Contestant("accelerate", "accelerate find_executable_batch_size", partial(_searched, _by_accelerate)),
            Contestant(
                "lightning",
                "Lightning BatchSizeFinder, binary search",
                partial(_searched, _by_lightning),
                ("lightning",),
            ),
        ),
        measures=(Measure("find_seconds", "time to find"), TIME),
        same_result=None,
        note="memlab keeps the batch and its gradient; the peers find a smaller batch, which is other training.",
    ),
)
