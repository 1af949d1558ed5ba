"""Values taken apart, lent and put together again."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import pytest
import torch

from memlab.runtime.tree import Lent, flatten


def _lent(tensors: list[torch.Tensor]) -> None:
    with Lent(torch.Tensor.double, torch.Tensor.float) as lent:
        assert [lent.own(tensor) for tensor in lent.lend(tensors)] == tensors


def _put(tensors: list[torch.Tensor]) -> None:
    leaves, structure = flatten(tensors)
    assert structure.put(leaves) == tensors


@pytest.mark.parametrize("work", [_lent, _put])
def test_its_time_grows_as_the_number_of_tensors(work: Callable[[list[torch.Tensor]], None]) -> None:
    def seconds(count: int) -> float:
        tensors = [torch.ones(1) for _ in range(count)]
        began = process_time()
        work(tensors)
        return process_time() - began

    few, many = (min(seconds(count) for _ in range(3)) for count in (500, 4000))
    assert many < 24 * few
