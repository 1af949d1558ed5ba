"""Micro-batches of a rank, and loops that gather gradients themselves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from memlab import Workload
from memlab.scaleout.engines.micro import SetAside
from memlab.techniques.accumulation import micro_outputs
from tests.scaleout.handing import assert_alike, engines, handed_over
from tests.scaleout.runs import texts, trained_in_odd_ways


def looked_at_late(workload: Workload, batches: Sequence[torch.Tensor]) -> list[float]:
    """Train in odd ways, with every output of a split call left out until it is looked at."""
    before, micro_outputs.LAZY_FROM_BYTES = micro_outputs.LAZY_FROM_BYTES, 0
    try:
        return trained_in_odd_ways(workload, batches)
    finally:
        micro_outputs.LAZY_FROM_BYTES = before


@pytest.mark.few(0, full=2)
@pytest.mark.parametrize(
    "flags",
    engines(
        *(f"{engine} --accumulate 2" for engine in ("ddp", "fsdp2", "zero1", "zero2 --offload optimizer", "zero3")),
        "zero3",
    ),
)
def test_gradients_add_up_to_those_of_whole_batches(flags: str) -> None:
    expected, losses, reference, workload = handed_over(flags, 2, texts(12), looked_at_late)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_alike(reference.model, workload.model, rtol=1e-4, atol=2e-6)


def test_what_is_set_aside_joins_in_when_it_is_asked_for() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    aside = SetAside([weight, frozen], torch.device("cpu"))
    with pytest.raises(ValueError, match="stop"), aside.in_place():
        (2 * weight).sum().backward()
        raise ValueError("stop")
    assert weight.grad is None
    with aside.in_place():
        (3 * weight).sum().backward()
    assert weight.grad is None
    assert aside.another().aliases[0].grad is None
    assert aside.take_gradients() == [None]
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0, 5.0]
    aside.take_gradients()
    assert weight.grad.tolist() == [5.0, 5.0]
