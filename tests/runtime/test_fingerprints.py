"""Fingerprints of what a run has given."""

from __future__ import annotations

import pytest
import torch

from memlab.runtime.fingerprints import _SAMPLE, Fingerprint, _sample


@pytest.mark.parametrize("dims", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_the_layout_of_a_large_tensor_makes_no_difference(dims: tuple[int, ...]) -> None:
    tensor = torch.randn(30, 40, 50, generator=torch.Generator().manual_seed(0)).permute(dims)
    one, other = Fingerprint.of(tensor), Fingerprint.of(tensor.contiguous())
    assert one is not None
    assert one.is_like(other)
    assert not one.is_like(Fingerprint.of(tensor + 1))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(8 * 64 * 4 * 32.0).view(8, 64, 4, 32).transpose(1, 2),
        torch.arange(64 * 128.0).view(64, 128).expand(8, 64, 128)[:, 1:],
        torch.arange(100 * 50 * 3.0).view(100, 50, 3)[::2, 5:],
    ],
    ids=["transposed", "expanded", "part"],
)
def test_the_numbers_looked_at_follow_one_another_evenly(tensor: torch.Tensor) -> None:
    assert torch.equal(_sample(tensor), tensor.reshape(-1)[:: tensor.numel() // _SAMPLE | 1])
