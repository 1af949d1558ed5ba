"""A model whose layers lie on two GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.techniques.offload.link import Link
from tests.helpers.needs import needs

pytestmark = needs(gpu=2)

OTHER = "cuda:1"
SLOW, FAST = Link(down=25e9, up=25e9, both=20e9, updated=3e9), Link(down=400e9, up=400e9, both=350e9, updated=3e9)


class _OverTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48)) for _ in range(3)).to(OTHER)
        self.here = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 48)) for _ in range(3)).to("cuda:0")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.there:
            inputs = inputs + block(inputs)
        inputs = inputs.to("cuda:0")
        for block in self.here:
            inputs = inputs + block(inputs)
        return inputs


def _trained_over_two(plan: str, link: Link | None) -> list[float]:
    torch.manual_seed(0)
    model = _OverTwo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with pytest.MonkeyPatch.context() as patch, torch.cuda.device(OTHER):
        patch.setattr("memlab.techniques.offload.link._known", {torch.device(OTHER): link})
        with fit(Workload(model, optimizer), plan):
            for seed in range(4):
                inputs = torch.randn(4, 48, generator=torch.Generator().manual_seed(seed)).to(OTHER)
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses


@pytest.mark.parametrize("link", [SLOW, FAST], ids=["host", "streamed"])
@pytest.mark.parametrize("plan", ["--offload optimizer", "--accumulate 2 --offload activations,optimizer,params"])
def test_a_model_over_two_trains_as_ever(plan: str, link: Link) -> None:
    assert _trained_over_two(plan, link) == pytest.approx(_trained_over_two("", link), rel=1e-5)
