"""Data parallelism with converted moments."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from memlab import Workload, fit, launch
from tests.helpers.needs import needs


def workload() -> Workload:
    """Layers large enough for 8-bit moments, which small parameters do not get."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def trained(workload: Workload, batches: Sequence[torch.Tensor]) -> list[float]:
    (optimizer,) = workload.optimizers
    losses = []
    for batch in batches:
        loss = (workload.model(batch) - batch[:, :3]).square().mean()  # [b, 3]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs(extra="bitsandbytes")
def test_8_bit_moments_are_those_of_one_process_and_come_home_as_they_went() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(6, 128, generator=generator) for _ in range(9)]
    reference, live = workload(), workload()
    expected = trained(reference, batches[:3])
    with fit(reference, "--adam8bit"):
        expected += trained(reference, batches[3:6])
    expected += trained(reference, batches[6:])
    losses = trained(live, batches[:3])
    launched = launch(lambda there: trained(there, batches[3:6]), live, "--scale ddp --adam8bit")
    losses += launched.value + trained(live, batches[6:])
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(state["exp_avg"].dtype is torch.float32 for state in live.optimizers[0].state.values())
    assert launched.comparison is not None
    for rank in launched.comparison.measurements:
        assert rank.breakdown["optimizer state"] < 0.3 * 2 * rank.breakdown["parameters"]
