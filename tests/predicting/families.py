"""Small models of many kinds, each as a workload ready to be measured and predicted."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload
from tests.loops.cases import CASES, Case
from tests.techniques.models import gpt2, ragged_batch


class GroupNormNet(nn.Module):
    """A convolution net that normalises each row by itself, so that its batch may be split."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(16) for _ in range(3))
        self.leave = nn.Linear(16, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(self.enter(pixels), 2)  # [b, c, h, w]
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden.mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.two(F.silu(self.one(self.norm(hidden))))


class BatchNormNet(nn.Module):
    """A network whose rows depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3),
            nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10),
        )  # fmt: skip

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


def _tokenwise(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def _of_case(case: Case, loss_fn: Callable[..., torch.Tensor] | None = None) -> Workload:
    model = case.model()
    batch = case.batch(0)
    if loss_fn is not None:
        inputs, targets = batch
        return Workload(model, case.optimizer(model), batch=((inputs,), targets), loss_fn=loss_fn)
    return Workload(model, case.optimizer(model), batch=batch)


def _images(model: nn.Module) -> Workload:
    batch = ((torch.randn(8, 3, 16, 16),), torch.arange(8))
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=F.cross_entropy)


def _gpt2(dropout: float = 0.0) -> Workload:
    model = gpt2(dropout=dropout)
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=ragged_batch())


class _LossSecond(nn.Module):
    """A language model as people write it by hand: it returns logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2100, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(32, 2100, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits, _tokenwise(logits, targets)


def _loss_second() -> Workload:
    model, (tokens, targets) = _LossSecond(), torch.randint(0, 2100, (2, 8, 16))
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=(tokens, targets))


def _mlp() -> Workload:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    batch = ((torch.randn(32, 64),), torch.randn(32, 8))
    return Workload(model, torch.optim.Adam(model.parameters()), batch=batch, loss_fn=F.mse_loss)


FAMILIES: dict[str, Callable[[], Workload]] = {
    "gpt2": _gpt2,
    "gpt2 with dropout": lambda: _gpt2(0.1),
    "llama": lambda: _of_case(CASES["llama"]),
    "bert classifier": lambda: _of_case(CASES["bert-classifier"]),
    "masked bert": lambda: _of_case(CASES["masked-bert"]),
    "t5": lambda: _of_case(CASES["t5"]),
    "vit": lambda: _of_case(CASES["vit"]),
    "frozen": lambda: _of_case(CASES["frozen"]),
    "tied": lambda: _of_case(CASES["tied"]),
    "tower": lambda: _of_case(CASES["module-logits"], F.cross_entropy),
    "lstm": lambda: _of_case(CASES["lstm"], _tokenwise),
    "loss second": _loss_second,
    "mlp": _mlp,
    "convolutions": lambda: _images(GroupNormNet()),
    "batch norm": lambda: _images(BatchNormNet()),
}

PLANS = (
    "",
    "--accumulate 2",
    "--accumulate 4",
    "--checkpoint",
    "--checkpoint selective",
    "--checkpoint every:2",
    "--checkpoint budget:96KiB",
    "--bf16",
    "--precision pure-bf16",
    "--adam8bit",
    "--optim adafactor",
    "--optim adamw4bit",
    "--optim apollo",
    "--offload optimizer",
    "--offload activations",
    "--chunk-loss",
    "--release-grads",
    "--tile 2",
    "--checkpoint --adam8bit --release-grads",
    "--accumulate 3 --bf16 --adam8bit",
    "--accumulate 3 --checkpoint budget:64KiB",
    "--accumulate 2 --checkpoint --bf16 --adam8bit --offload optimizer --chunk-loss",
    "--accumulate 4 --offload activations,optimizer",
)


def family(name: str) -> Workload:
    """The workload of a family, the same one every time."""
    random.seed(0)
    torch.manual_seed(0)
    return FAMILIES[name]()
