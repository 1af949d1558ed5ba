"""Runs on ranks whose memory and collectives are counted, beside what is predicted for them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from memlab import Workload, launch
from memlab.units import GIB

_STEPS = 5
# of collectives: the argument whose bytes go round, and how often they do
_MOVED = {
    "c10d::allreduce_": (0, 2),
    "c10d::_allgather_base_": (0, 1),
    "c10d::allgather_": (0, 1),
    "c10d::allgather_into_tensor_coalesced_": (0, 1),
    "c10d::_reduce_scatter_base_": (1, 1),
    "c10d::reduce_scatter_": (1, 1),
    "c10d::broadcast_": (0, 1),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.relu(self.wide(hidden)))


class Perceptron(nn.Module):
    """Blocks and a head, which returns its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = pixels
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), labels)


def gpt2(width: int = 128) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A decoder with a tied head."""
    config = GPT2Config(
        n_embd=width, n_layer=3, n_head=4, vocab_size=16 * width, n_positions=64, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (8, 48))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def bert(width: int = 128) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """An encoder with a classifier."""
    config = BertConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=3, num_attention_heads=4, vocab_size=2048,
        num_labels=2,
    )  # fmt: skip
    ids = torch.randint(0, config.vocab_size, (8, 48))
    return BertForSequenceClassification(config), {"input_ids": ids, "labels": torch.arange(8) % 2}


def perceptron(width: int = 256) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A net of linear layers, whose batch is small beside it."""
    return Perceptron(width), {"pixels": torch.randn(32, width), "labels": torch.arange(32) % 10}


def small(width: int = 32) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The same, so small that buffers are most of it."""
    return perceptron(width)


def workload_of(make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]) -> Workload:
    """A model that has trained a step."""
    torch.manual_seed(0)
    model, batch = make()
    workload = Workload(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch, name=make.__name__)
    steps(workload, 1)
    return workload


def steps(workload: Workload, count: int) -> None:
    """Train, without holding on to outputs."""
    (optimizer,) = workload.optimizers
    for _ in range(count):
        _loss_of(workload.model(**workload.batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


class Moved(TorchDispatchMode):
    """Counts the bytes that collectives move."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _MOVED:
            place, times = _MOVED[name]
            self.bytes[name] += times * sum(tensor.nbytes for tensor in _tensors(args[place]))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for item in value for tensor in _tensors(item)]


@dataclass(frozen=True)
class Run:
    """What ranks needed.

    Args:
        peak_bytes: of rank 0, in the middle one of its steps: what a thread of the backend still holds makes some of
            them higher.
        sent_bytes: that a rank sent in its last step.
    """

    peak_bytes: float
    sent_bytes: float


def run(workload: Workload, flags: str, nproc: int) -> Run:
    """Train on ranks."""

    def train(there: Workload) -> float:
        steps(there, _STEPS - 1)
        with Moved() as moved:
            steps(there, 1)
        ranks = dist.get_world_size()
        return sum(moved.bytes.values()) * (ranks - 1) / ranks

    launched = launch(train, workload, flags, nproc=nproc, capacity_bytes=8 * GIB)
    peaks = [step.peak_allocated_bytes for step in launched.steps if step.peak_allocated_bytes is not None]
    assert len(peaks) == _STEPS
    return Run(statistics.median(peaks[1:]), launched.value)
