"""Models that factories make, in every shape that needs care."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memlab.building.gradual as gradual


@pytest.fixture(params=[0, gradual.WIDE_BYTES], ids=["one at a time", "as set"])
def wide_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes stay in full precision: none, so that small models behave as large ones; and as it is set."""
    monkeypatch.setattr(gradual, "WIDE_BYTES", request.param)
    return request.param


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models behave as large ones."""
    monkeypatch.setattr(gradual, "WIDE_BYTES", 0)


class Rotary(nn.Module):
    """Buffers of every kind: frequencies in fp32 by choice, by default, integer, mask, not saved."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        positions = torch.arange(0, width, 2, dtype=torch.int64).float()
        self.register_buffer("frequencies", 1.0 / (10_000 ** (positions / width)), persistent=False)
        self.register_buffer("scale", torch.linspace(0.1, 1, width))
        self.register_buffer("positions", torch.arange(600.0))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.router = nn.Linear(width, 4, dtype=torch.float32)
        self.mix = nn.Parameter(torch.randn(width, width) * 0.02)
        self.norm = nn.BatchNorm1d(width)


class Tied(nn.Module):
    """An embedding that is the head too, and a row of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._draw)

    @staticmethod
    def _draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0).uniform_(0.9, 1.1)


class WritesLate(nn.Module):
    """Keeps views of its weights, and fills them after all have been made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        rows = [layer.weight.data[2:] for layer in self.layers]
        self.extra = nn.Parameter(torch.empty(64, 64))
        for row in rows:
            row.normal_()
        nn.init.orthogonal_(self.extra)


class LooksAtValues(nn.Module):
    """Decides by what its weights are, and by where and in which format they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        assert self.first.weight.dtype == torch.float32
        assert self.first.weight.device == torch.device("cpu")
        like_first = torch.zeros(6, device=self.first.weight.device)
        self.sign = 1 if float(self.first.weight.detach().sum()) > 0 else -1
        self.register_buffer("largest", (self.second.weight.detach().abs().max() + like_first).clone())
        for parameter in self.parameters():
            parameter.requires_grad_(False)


def plain() -> nn.Module:
    """Layers of several kinds, without anything special."""
    return nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.Flatten(), nn.Linear(24, 20), nn.BatchNorm1d(20), nn.PReLU(), nn.Linear(20, 2)
    )


def copied_layers() -> nn.Module:
    """Layers that torch makes by copying one."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)


def recurrent() -> nn.Module:
    """Weights that the module keeps in a second list."""
    return nn.LSTM(6, 10, num_layers=2, bidirectional=True)
