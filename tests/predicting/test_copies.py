"""Predicted peaks where memlab, autograd or a model keep copies: of buffers, caches, gradients and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from memlab import Workload, measure
from memlab.predicting import predict
from tests.techniques.models import gpt2, ragged_batch


class _Net(nn.Module):
    """Layers over rows of 32 numbers, with what a test gives it."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        for name, value in given.items():
            setattr(self, name, value)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).square().mean()


def _with_buffer() -> nn.Module:
    model = _Net()
    model.register_buffer("table", torch.ones(120, 120))
    return model


class _HighInForward(_Net):
    """A model that takes most while it runs forward, through layers that do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(32, 4096), nn.Tanh(), nn.Linear(4096, 32)).requires_grad_(False)
        self.register_buffer("mask", torch.ones(120, 120, dtype=torch.bool))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(self.frozen(rows))


class _Skipping(_Net):
    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(rows)
        return (hidden if mask.all() else hidden * mask).square().mean()


class _Wrapped(nn.Module):
    """A model that fills a key-value cache, behind one that does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2(dropout=0.0)

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


class _TokensToPicture(nn.Module):
    """A convolution over tokens, which are laid out with their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 64), nn.Conv2d(64, 128, 3, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(tokens).transpose(1, 2).unflatten(2, (4, 4))).square().mean()


def _closed_over() -> nn.Module:
    layers = nn.Linear(32, 32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layers(rows).square().mean()

    return Model()


def _rows() -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, 32),)


_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "buffer that a split call copies": (_with_buffer, _rows, "--accumulate 2"),
    "attribute that a first call copies": (lambda: _Net(table=torch.ones(512, 64)), _rows, "--bf16"),
    "mask that a first call copies": (_HighInForward, _rows, "--bf16"),
    "model that its class refers to": (_closed_over, _rows, "--bf16"),
    "mask of floats": (_Skipping, lambda: (torch.randn(8, 32), torch.ones(8, 1)), ""),
    "cache behind a wrapper": (_Wrapped, ragged_batch, "--accumulate 2"),
    "gradient in another layout": (_TokensToPicture, lambda: (torch.randn(4, 16, 16),), "--accumulate 2"),
}


@pytest.mark.parametrize("case", _CASES)
def test_copies_are_predicted(case: str) -> None:
    torch.manual_seed(0)
    make, batch, flags = _CASES[case]
    model = make()
    workload = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch())
    measured = measure(workload, flags, steps=1)
    error = predict(workload, flags).peak_allocated_bytes / measured.peak_allocated_bytes - 1
    assert abs(error) <= 0.001, f"{error:+.3%}"


def test_a_sparse_buffer_is_put_back_after_measuring() -> None:
    class Counting(_Net):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.graph.add_(self.graph)
            return functional.relu(torch.sparse.mm(self.graph, self.layers(rows))).mean()

    model = Counting()
    model.register_buffer("graph", torch.eye(8).to_sparse())
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch=_rows())
    measure(workload, steps=1)
    assert torch.equal(model.graph.to_dense(), torch.eye(8))
