"""A model on a GPU that is not the current one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit, measure, predict
from memlab.rescue.loop_code import LoopCode
from memlab.rescue.retries import RetryWatch
from memlab.runtime.rng import drawn_on
from tests.helpers.needs import needs
from tests.loops.cases import CASES
from tests.loops.running import deviation, plain_loop
from tests.rescue.faults import Faults
from tests.rescue.test_loop_code import Freeing

pytestmark = needs(gpu=2)

OTHER = "cuda:1"
_PLANS = {
    "--accumulate 2 --checkpoint --offload activations,optimizer,params": 1e-5,
    "--adam8bit": 1e-3,
    "--bf16": 1e-3,
    "--release-grads": 1e-6,
}


@pytest.fixture(autouse=True)
def _nothing_on_the_current_one() -> Iterator[None]:
    assert torch.cuda.current_device() == 0
    before = torch.cuda.memory_allocated(0)
    yield
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.parametrize("plan", _PLANS)
def test_it_trains_as_ever(plan: str) -> None:
    case = CASES["tied"].on(OTHER)
    model = case.model()
    expected = plain_loop(model, case.optimizer(model), case, 4)
    model = case.model()
    optimizer = case.optimizer(model)
    with fit(Workload(model, optimizer), plan):
        found = plain_loop(model, optimizer, case, 4)
    assert deviation(found, expected) <= _PLANS[plan]


def test_it_is_measured_and_predicted() -> None:
    case = CASES["tied"].on(OTHER)
    model = case.model()
    workload = Workload(model, case.optimizer(model), batch=case.batch(0))
    assert measure(workload, steps=2).peak_allocated_bytes > 0
    assert predict(workload).device in torch.cuda.get_device_name(1)


class _DrawingTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.drop(self.first(inputs))))


def test_rows_are_compared_with_the_numbers_of_its_generator() -> None:
    torch.manual_seed(0)
    model = _DrawingTwice().to(OTHER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--accumulate 2") as session:
        model(torch.randn(8, 8, device=OTHER)).sum().backward()
        optimizer.step()
        assert session.plan.accumulation == 2
        assert [note for note in session.notes if "draws random" not in note] == []


def test_what_the_loop_draws_is_drawn_again() -> None:
    inputs = torch.zeros(64, device=OTHER)
    torch.manual_seed(3)
    expected, following = F.gumbel_softmax(inputs, dim=0), torch.rand(2, device=OTHER)
    watching = LoopCode(owner := Freeing())
    watching.begin()
    try:
        torch.manual_seed(3)
        with Faults([3]):
            found, after = F.gumbel_softmax(inputs, dim=0), torch.rand(2, device=OTHER)
    finally:
        watching.end()
    assert owner.attempts == [1]
    assert torch.equal(found, expected)
    assert torch.equal(after, following)


@pytest.mark.parametrize(
    "drawing", [lambda: ((torch.ones(2, device=OTHER),), {}), lambda: ((2,), {"device": OTHER})], ids=["tensor", "name"]
)
def test_the_generator_is_that_of_the_device(drawing: Any) -> None:
    assert drawn_on(*drawing()) == torch.device(OTHER)


def test_a_step_with_allocator_retries_is_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or {})
    case = CASES["tied"].on(OTHER)
    model = case.model()
    optimizer = case.optimizer(model)
    with fit(Workload(model, optimizer)) as session:
        session.observers.only([RetryWatch(print, device=session.workload.device)])
        plain_loop(model, optimizer, case, 2)
    assert asked == [torch.device(OTHER)] * 2
