"""The allocator of a GPU refuses the n-th allocation of a step: the loop notices nothing, and nothing is lost.

Without ``MEMLAB_LONG=1`` a sample of allocations is tried, spread over the step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.rescue.faults import LONG, Refusals, train
from tests.rescue.test_every_allocation import allocations, cases, wrong

# the tower's loop has a scaler of its own, which on a GPU unscales neither gradients at rest on the host nor those in bf16
_CASES = [case for case in cases() if not (case[0] == "tower" and ("params" in case[1] or "pure-bf16" in case[1]))]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = "cuda"
_SAMPLE = 5


@pytest.fixture(params=["default", "expandable"])
def allocator(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{request.param == 'expandable'}")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.few(4)
@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.filterwarnings("default:memlab. refused:RuntimeWarning")
@pytest.mark.parametrize(("family", "plan", "step"), _CASES)
def test_nothing_is_lost(family: str, plan: str, step: int, allocator: None) -> None:
    count = allocations(family, plan, step, CUDA)
    stride = 1 if LONG else max(1, count // _SAMPLE)
    refused, lost = 0, []
    for nth in range(1 + (sum(map(ord, family + plan)) % stride), count + 1, stride):
        refusals = Refusals([nth])
        found = train(family, plan, faults=refusals, step=step, device=CUDA)
        refused += len(refusals.failed)
        assert len(found.rescues) <= 1, (nth, found.rescues)
        lost += [f"{nth} ({refusals.failed}, {found.plan}): {line}" for line in wrong(found, family, plan, step, CUDA)]
    assert lost == []
    assert refused, count
