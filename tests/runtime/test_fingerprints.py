"""Fingerprints of what a run has given."""

from __future__ import annotations

import pytest
import torch

from memlab.runtime.fingerprints import Fingerprint


@pytest.mark.parametrize("dims", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_the_layout_of_a_large_tensor_makes_no_difference(dims: tuple[int, ...]) -> None:
    tensor = torch.randn(30, 40, 50, generator=torch.Generator().manual_seed(0)).permute(dims)
    one, other = Fingerprint.of(tensor), Fingerprint.of(tensor.contiguous())
    assert one is not None
    assert one.is_like(other)
    assert not one.is_like(Fingerprint.of(tensor + 1))
