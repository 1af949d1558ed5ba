"""A model whose layers lie on two GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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


class _DrawingOn(nn.Module):
    """Its first half on one device, its second half on another, with dropout in both."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32).to(first), nn.Linear(32, 32).to(second)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.first(inputs.to(self.first.weight.device)), 0.3)
        return F.dropout(self.second(hidden.to(self.second.weight.device)), 0.3)


def _trained_with_draws(places: tuple[str, str], plan: str) -> list[float]:
    torch.manual_seed(0)
    model = _DrawingOn(*places)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [torch.randn(16, 32) for _ in range(3)]
    losses = []
    with fit(Workload(model, optimizer), plan):
        for inputs in batches:
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return [*losses, *(torch.rand(1, device=device).item() for device in ("cpu", "cuda:0", OTHER))]


@pytest.mark.parametrize("plan", ["--offload activations", "--offload activations,optimizer"])
@pytest.mark.parametrize("places", [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_a_model_of_which_a_part_is_on_the_host_trains_as_ever(places: tuple[str, str], plan: str) -> None:
    assert _trained_with_draws(places, plan) == pytest.approx(_trained_with_draws(places, ""), rel=1e-5)


@pytest.mark.parametrize("places", [("cuda:0", OTHER), (OTHER, "cuda:0")])
def test_judging_a_split_moves_no_generator_on(places: tuple[str, str]) -> None:
    *_, here, there = _trained_with_draws(places, "--accumulate 2")
    assert here == there  # as many numbers were drawn on the one as on the other, from the same seed
