"""Activations off the device: torch's `save_on_cpu`, TRL's and Transformers' offload; on a CPU, hooks that save to files."""

from __future__ import annotations

import tempfile
import uuid
from functools import partial
from pathlib import Path

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.bench.peers.loops import by_hand
from tests.bench.peers.models import gpt2
from tests.bench.peers.records import Contest, Contestant, Measured
from tests.bench.peers.watching import Job

_HOST = "it moves to the host, which on a CPU is where the tensors are"


def _memlab(plan: str, job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device), plan)


class _Saved:
    """A saved tensor in a file, as in torch's tutorial on hooks for saved tensors; the file goes with it."""

    def __init__(self, tensor: torch.Tensor, folder: str) -> None:
        self.path = Path(folder) / uuid.uuid4().hex
        torch.save(tensor, self.path)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def _files(job: Job) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        hooks = partial(
            saved_tensors_hooks,
            # parameters stay where they are: the tutorial's model has none among its saved tensors
            lambda tensor: tensor if isinstance(tensor, torch.nn.Parameter) or tensor.numel() < 1000 else _Saved(tensor, folder),
            lambda saved: torch.load(saved.path, weights_only=True) if isinstance(saved, _Saved) else saved,
        )  # fmt: skip
        return by_hand(job, gpt2(job.scale, job.device), around=hooks)


def _save_on_cpu(job: Job) -> Measured:
    return by_hand(job, gpt2(job.scale, job.device), around=partial(save_on_cpu, pin_memory=job.on_gpu))


def _trl(job: Job) -> Measured:
    from trl.models.activation_offloading import OffloadActivations

    return by_hand(job, gpt2(job.scale, job.device), around=OffloadActivations)


def _transformers(job: Job) -> Measured:
    work = gpt2(job.scale, job.device)
    work.model.activation_checkpointing_enable(offload=True)
    return by_hand(job, work)


CONTESTS = (
    Contest(
        "offload-activations",
        "Activation offload, GPT-2",
        (
            Contestant("memlab", "a plain loop under `--offload activations`", partial(_memlab, "--offload activations")),
            Contestant("files", "torch's tutorial: hooks that save to files", _files),
            Contestant("save_on_cpu", "torch save_on_cpu", _save_on_cpu, (), _HOST),
            Contestant("trl", "TRL OffloadActivations", _trl, ("trl",), _HOST),
        ),
        same_result=1e-5,
    ),
    Contest(
        "offload-checkpoints",
        "Checkpointing with offload, GPT-2",
        (
            Contestant("memlab", "`--checkpoint --offload activations`", partial(_memlab, "--checkpoint --offload activations")),
            Contestant("transformers", "Transformers, offload=True", _transformers, (), _HOST),
        ),
        same_result=1e-5,
    ),
)  # fmt: skip
