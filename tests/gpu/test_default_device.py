"""A notebook that has set its default device to the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memlab import Workload, fit, measure, predict
from tests.helpers.needs import needs
from tests.loops.cases import CASES, Case
from tests.loops.running import deviation, plain_loop

pytestmark = needs(gpu=1)

_PLANS = {
    "--offload optimizer": 1e-6,
    "--offload activations": 1e-6,
    "--offload params": 1e-6,
    "--accumulate 2 --checkpoint --release-grads": 1e-5,
    "--precision pure-bf16": 1e-2,
    "--fp16": 1e-3,
}


@pytest.fixture
def case() -> Iterator[Case]:
    case = CASES["tied"].on("cuda")
    batches = [case.batch(step) for step in range(3)]
    torch.set_default_device("cuda")
    yield Case(**{**vars(case), "batch": batches.__getitem__})
    torch.set_default_device(None)


@pytest.mark.parametrize("plan", _PLANS)
def test_it_trains_as_ever(case: Case, plan: str) -> None:
    model = case.model()
    expected = plain_loop(model, case.optimizer(model), case, 3)
    model = case.model()
    optimizer = case.optimizer(model)
    with fit(Workload(model, optimizer), plan):
        found = plain_loop(model, optimizer, case, 3)
    assert deviation(found, expected) <= _PLANS[plan]


def test_it_is_measured_and_predicted(case: Case) -> None:
    model = case.model()
    workload = Workload(model, case.optimizer(model), batch=case.batch(0))
    assert measure(workload, steps=2).peak_allocated_bytes > 0
    assert predict(workload, "--checkpoint --bf16").peak_allocated_bytes > 0
