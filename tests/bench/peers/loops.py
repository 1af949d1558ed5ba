"""The loops the work is done in: written by hand, and Transformers' Trainer. With a plan, memlab is put around them."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import memlab
from tests.bench.peers.models import Work, adamw, result_loss
from tests.bench.peers.records import Measured
from tests.bench.peers.watching import Job, Watch

Optimizer = torch.optim.Optimizer
# one step on a batch, with its update; returns the loss
Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def fitted(model: nn.Module, optimizer: Optimizer | None, plan: str | None) -> AbstractContextManager[Any]:
    """A session with a plan; without one nothing of memlab."""
    return nullcontext() if plan is None else memlab.fit(memlab.Workload(model, optimizer), plan)


def by_hand(
    job: Job,
    work: Work,
    plan: str | None = None,
    *,
    optimizer: Optimizer | None = None,
    step: Step | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Measured:
    """Train in a loop of four lines.

    Args:
        job: where, and how long.
        work: what to train.
        plan: flags of memlab, "" for a session that changes nothing, None for no session.
        optimizer: by default AdamW.
        step: what a peer does in place of forward, backward, step and zero_grad.
        around: context of forward and backward.
    """
    optimizer = optimizer or adamw(work.model)

    def four_lines(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with around():
            loss = work.model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    watch, losses = Watch(job, work.batch_rows), []
    torch.manual_seed(1)
    with fitted(work.model, optimizer, plan) as session:
        for number in range(watch.steps):
            losses.append((step or four_lines)(work.batch(number)))
            watch.step_ended()
        notes = () if session is None else session.notes
    return Measured(watch.numbers(), _read(losses), (), result_loss(work), tuple(notes))


def trainer(
    job: Job,
    work: Work,
    plan: str | None = None,
    *,
    optimizer: Optimizer | None = None,
    **settings: Any,
) -> Measured:
    """Train with an unchanged Trainer.

    Args:
        job: where, and how long.
        work: what to train.
        plan: as for `by_hand`.
        optimizer: handed to the Trainer; by default it makes its own.
        settings: further `TrainingArguments`, the peer's way of saying the same as a plan.
    """
    # here, because it takes seconds, and most contestants do without
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class StepsEnded(TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_ended()

    watch = Watch(job, work.batch_rows)
    micro_batches = settings.pop("gradient_accumulation_steps", 1)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        arguments = TrainingArguments(
            folder, max_steps=watch.steps, per_device_train_batch_size=work.batch_rows // micro_batches,
            gradient_accumulation_steps=micro_batches, learning_rate=1e-4, lr_scheduler_type="constant", logging_steps=1,
            report_to=[], disable_tqdm=True, use_cpu=not job.on_gpu, save_strategy="no", seed=1,
            dataloader_pin_memory=False, **settings,
        )  # fmt: skip
        training = Trainer(
            work.model, arguments, train_dataset=work.rows, optimizers=(optimizer, None), callbacks=[StepsEnded()]
        )
        with contextlib.redirect_stdout(None), fitted(work.model, optimizer, plan) as session:
            training.train()
            notes = () if session is None else session.notes
    history = training.state.log_history
    return Measured(
        watch.numbers(),
        tuple(each["loss"] for each in history if "loss" in each),
        tuple(float(each["grad_norm"]) for each in history if "grad_norm" in each),
        result_loss(work),
        tuple(notes),
    )


def _read(losses: list[torch.Tensor]) -> tuple[float, ...]:
    return tuple(float(each) for each in losses)


@contextlib.contextmanager
def _quiet() -> Any:
    """No warnings of the peers between the lines of progress."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
