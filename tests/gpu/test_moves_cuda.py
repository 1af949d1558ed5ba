"""A loop that moves its model to the host in the middle of training, and back."""

from __future__ import annotations

import pytest
import torch

from memlab import Workload, fit
from tests.driving import mlp
from tests.helpers.needs import needs

pytestmark = needs(gpu=1)

_PLANS = {
    "": 0.0,
    "--offload optimizer,activations": 1e-5,
    "--adam8bit": 1e-2,
    "--fp16": 1e-2,
    "--precision pure-bf16": 2e-2,
}


def _trained(plan: str) -> list[float]:
    torch.manual_seed(0)
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    with fit(Workload(model, optimizer), plan):
        for step in range(4):
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            loss = model(inputs.cuda()).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            if step == 1:
                model.cpu()
                assert {p.device.type for p in model.parameters()} == {"cpu"}
                assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
                with torch.no_grad():
                    seen.append(model(inputs).square().mean().item())
                model.cuda()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("plan", _PLANS)
def test_it_trains_as_ever(plan: str) -> None:
    assert _trained(plan) == pytest.approx(_trained(""), rel=_PLANS[plan])
