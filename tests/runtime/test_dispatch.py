"""Modes that watch operators, beside the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.measuring.ledger import Ledger


@pytest.mark.full
def test_a_mode_is_never_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model.compile(backend="eager")
    with Ledger():
        for rows in (2, 3, 4):
            model(torch.ones(rows, 4)).square().mean().backward()
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(Ledger.__torch_dispatch__.__code__)
    assert entries == []
    torch.compiler.reset()
