"""Data parallelism with converted moments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab import Workload, fit, launch
from tests.helpers.needs import needs
from tests.scaleout.runs import regressed


def workload() -> Workload:
    """Layers large enough for 8-bit moments, which small parameters do not get."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.mark.full
@needs(extra="bitsandbytes")
def test_8_bit_moments_are_those_of_one_process_and_come_home_as_they_went() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(6, 128, generator=generator) for _ in range(9)]
    reference, live = workload(), workload()
    expected = regressed(reference, batches[:3])
    with fit(reference, "--adam8bit"):
        expected += regressed(reference, batches[3:6])
    expected += regressed(reference, batches[6:])
    losses = regressed(live, batches[:3])
    launched = launch(lambda there: regressed(there, batches[3:6]), live, "--scale ddp --adam8bit")
    losses += launched.value + regressed(live, batches[6:])
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(state["exp_avg"].dtype is torch.float32 for state in live.optimizers[0].state.values())
    assert launched.comparison is not None
    for rank in launched.comparison.measurements:
        assert rank.breakdown["optimizer state"] < 0.3 * 2 * rank.breakdown["parameters"]
