"""`%memfit bug`: it holds what a maintainer needs, and nothing that is the user's."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.jupyter.conftest import Cell

_SECRET = "Zanzibar"
_MAKE = """
import torch
from torch import nn
torch.manual_seed(0)
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    def forward(self, x):
        return self.layers(x)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.12345)
x = torch.full((8, 16), 77.25)
"""
_TRAIN = f"""%%memfit --accumulate 2
{_SECRET} = 0
for _ in range(16):
    loss = model(x).square().mean()
    {_SECRET} += loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_it_says_what_happened_and_nothing_of_the_users(cell: Cell, tmp_path: Path) -> None:
    assert cell(_MAKE).error is None
    assert cell(_TRAIN).error is None
    cell(f"open('/home/somebody/{_SECRET}.csv')")
    ran = cell(f"%memfit bug {tmp_path / 'report.txt'}")
    assert ran.error is None
    text = (tmp_path / "report.txt").read_text()
    assert text in ran.out
    for needed in (
        "memlab bug report",
        f"torch {metadata.version('torch')}",
        "model: Classifier, 676 parameters, 2.6 KiB, float32 on cpu",
        "1 × Linear (weight float32[32, 16], bias float32[32])",
        "optimizer: AdamW, 1 groups",
        "plan: --accumulate 2, after 16 steps",
        "batch: float32[8, 16]",
        "measured: --accumulate 2: ",
        "reaches the graphs of all steps (line ",
        "last error: FileNotFoundError\n  IPython/core/interactiveshell.py:",
    ):
        assert needed in text, needed
    for private in (f"{_SECRET} +=", "/home/somebody", ".csv", "77.25", "0.12345", str(tmp_path), str(Path.home())):
        assert private not in text, private


def test_it_shows_before_it_writes(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cell("%memfit bug")
    assert ran.error is None
    assert ran.out.startswith("memlab bug report")
    assert "this is all that %memfit bug FILE would write; nothing has been sent" in ran.out + ran.err
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_memlabs_is_told_with_its_words(cell: Cell) -> None:
    assert cell(_MAKE).error is None
    assert cell("%memfit --accumulate none").error is not None
    assert "last error: UsageError: --accumulate none: expected a whole number" in cell("%memfit bug").out
