"""Adapters, and losses of log-probabilities, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit, measure, predict
from tests.techniques.models import distance, gpt2, gradients

pytest.importorskip("peft", reason="adapters are peft's")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _load(width: int = 64) -> Workload:
    torch.manual_seed(0)
    model = gpt2(vocabulary=3000, width=width).cuda()
    words = torch.randint(3000, (8, 32)).cuda()
    return Workload(model, torch.optim.AdamW(model.parameters()), batch={"input_ids": words, "labels": words.clone()})


def _step(load: Workload) -> float:
    loss = load.model(**load.batch).loss
    loss.backward()
    load.optimizers[0].step()
    load.optimizers[0].zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("others", ["", "--checkpoint --bf16", "--offload params", "--adam8bit --offload optimizer"])
def test_adapters_train_and_leave_every_bit(others: str) -> None:
    load = _load()
    _step(load)
    state = load.optimizers[0].state
    before = {name: value.clone() for name, value in load.model.state_dict().items()}
    moments = [{key: value.clone() for key, value in state[p].items()} for p in load.model.parameters()]
    with fit(load, f"--lora r=4 {others}"):
        losses = [_step(load) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in load.model.state_dict().items())
    for parameter, kept in zip(load.model.parameters(), moments, strict=True):
        assert parameter.requires_grad
        assert all(torch.equal(state[parameter][key], value) for key, value in kept.items())
        assert all(state[parameter][key].device == value.device for key, value in kept.items())


@pytest.mark.memory
def test_adapters_lower_the_peak_as_predicted() -> None:
    load = _load(width=256)
    as_written, adapted = (measure(load, plan, steps=2).peak_allocated_bytes for plan in ("", "--lora r=4"))
    assert adapted < 0.8 * as_written
    assert predict(load, "--lora r=4").peak_allocated_bytes == pytest.approx(adapted, rel=0.03)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "log-probabilities": lambda x, y: -x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
    "smoothed": lambda x, y: F.cross_entropy(x.view(-1, 3000), y.view(-1), label_smoothing=0.1),
    "an entropy": lambda x, _: -(F.softmax(x / 0.7, -1) * F.log_softmax(x / 0.7, -1)).sum(-1).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_tiles_have_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3000)).cuda()
    x, y = torch.randn(4, 70, 8).cuda(), torch.randint(3000, (4, 70)).cuda()
    LOSSES[name](model(x), y).backward()
    expected = gradients(model)
    model.zero_grad()
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--chunk-loss"):
        LOSSES[name](model(x), y).backward()
    assert distance(gradients(model), expected) < 1e-5
