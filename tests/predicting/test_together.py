"""Several models that train together: predicted each by itself, added up, and held against their steps in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, predict_all
from memlab.measuring.runs import measure
from memlab.plan import Plan
from memlab.records import LOOP
from memlab.search import choose_plan

PLANS = [Plan.parse(text) for text in ("", "--checkpoint", "--offload optimizer", "--accumulate 2 --offload optimizer")]


def workload(name: str, width: int, optimizer: torch.optim.Optimizer | None = None, rows: int = 256) -> Workload:
    torch.manual_seed(width)
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*layers, nn.Linear(width, 8))
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    return Workload(model, optimizer, (torch.randn(rows, width),), name=name)


def state_of(workloads: list[Workload]) -> list[torch.Tensor]:
    return [t.clone() for each in workloads for t in each.model.state_dict().values()]


def test_steps_in_turn_need_what_is_predicted_and_leave_nothing() -> None:
    both = [workload("actor", 64), workload("critic", 48)]
    before = state_of(both)
    for prediction, plan in zip(predict_all(both, plans=PLANS), PLANS, strict=True):
        measured = measure(both, plan, steps=1)
        assert not prediction.refused
        assert measured.peak_allocated_bytes == pytest.approx(prediction.peak_allocated_bytes, rel=0.1), plan
        assert measured.peak_allocated_bytes <= prediction.interval_bytes[1]
        assert list(measured.models) == ["actor", "critic", LOOP]
        assert any("actor, critic in turn" in note for note in prediction.notes)
    assert all(map(torch.equal, before, state_of(both)))
    assert all(not optimizer.state for each in both for optimizer in each.optimizers)


def test_the_parts_of_the_others_are_counted() -> None:
    both = [workload("actor", 64), workload("critic", 48)]
    together = predict_all(both, plans=[Plan()])[0]
    alone = [predict_all(each, plans=[Plan()])[0] for each in both]
    for name in ("parameters", "optimizer state"):
        assert together.breakdown[name] == sum(each.breakdown[name] for each in alone)
    assert max(p.peak_allocated_bytes for p in alone) < together.peak_allocated_bytes
    assert together.interval_bytes[1] == sum(each.interval_bytes[1] for each in alone)


def test_a_plan_is_chosen_for_all_of_them() -> None:
    both = [workload("actor", 64), workload("critic", 48)]
    plain = predict_all(both, plans=[Plan()])[0]
    chosen, predictions = choose_plan(both, plain.interval_bytes[1], lossless=True)
    assert chosen == Plan()
    chosen, predictions = choose_plan(both, int(plain.interval_bytes[1] * 0.8), lossless=True)
    (prediction,) = [each for each in predictions if each.plan == chosen.label]
    assert chosen != Plan()
    assert prediction.interval_bytes[1] <= plain.interval_bytes[1] * 0.8


def test_what_one_refuses_all_do() -> None:
    plain: Any = workload("actor", 64)
    model = nn.Linear(32, 8)
    odd = Workload(model, torch.optim.AdamW(model.parameters()), (torch.randn(256, 32),), name="linear")
    (prediction,) = predict_all([plain, odd], plans=["--checkpoint"])
    assert prediction.refused.startswith("checkpointing: no part of linear can be recomputed")
