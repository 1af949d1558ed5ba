"""The memory of a piece of code: its peak, and what it leaves."""

from __future__ import annotations

import pytest
import torch

from memlab.workshop import held_by, watched


def test_says_the_peak_and_what_is_left() -> None:
    with watched() as seen:
        kept = torch.zeros(1024)
        for _ in range(3):
            _ = torch.ones(4096).sum()
    assert seen.left_bytes == kept.nbytes + 4  # the sum of the last round
    assert 4 * (1024 + 4096) <= seen.peak_bytes <= 4 * (1024 + 4096) + 8


def test_what_lived_before_does_not_count() -> None:
    before = torch.zeros(10_000)
    with watched() as seen:
        before.add_(1)
        del before
    assert str(seen) == "peak 0 B, left behind 0 B"


def test_a_graph_that_is_kept_is_left_behind() -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64))
    with watched() as seen:
        kept = (weight @ torch.ones(64, 64)).exp().sum()
    held = sum(tensor.nbytes for tensor in held_by(kept))
    assert seen.left_bytes == held + kept.nbytes


def test_numbers_are_there_after_an_error() -> None:
    with pytest.raises(ValueError, match="on purpose"), watched() as seen:
        _ = torch.zeros(256)
        raise ValueError("on purpose")
    assert seen.peak_bytes == 1024


def test_laps_have_peaks_of_their_own() -> None:
    with watched() as seen:
        kept = torch.zeros(256)
        _ = torch.zeros(4096)
        del _
        first = seen.lap()
        kept = torch.cat([kept, kept])
        second = seen.lap()
    assert first == 4 * (256 + 4096)
    assert second == 4 * (256 + 512)
    assert (seen.peak_bytes, seen.left_bytes) == (first, 4 * 512)
    with pytest.raises(ValueError, match="what is watched has ended"):
        seen.lap()
    assert len(kept) == 512
