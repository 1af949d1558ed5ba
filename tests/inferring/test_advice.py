"""The largest batch that fits: from one size, and from two."""

from __future__ import annotations

import pytest
import torch

from memlab.inferring.inference import inference
from memlab.measuring.device import Device
from memlab.records.inference import advice_from
from memlab.units import KIB, MIB
from tests.inferring.small_models import PROMPT, generate, gpt2, plain


def peak_of(model: torch.nn.Module, rows: int) -> int:
    """Peak of a generation with so many rows, measured by itself."""
    with inference(model) as run:
        generate(model, PROMPT[:1].repeat(rows, 1))
    return run.record.peak_allocated_bytes


def test_advice_from_one_size_is_on_the_safe_side_and_from_two_exact() -> None:
    model = gpt2()
    with inference(model) as run:
        generate(model)
        from_one = run.record.advise(MIB)
        generate(model, PROMPT.repeat(3, 1))
        from_two = run.record.advise(MIB)
    assert (from_one.sizes, from_two.sizes) == ((2,), (2, 6))
    assert peak_of(model, from_one.rows) <= MIB
    assert peak_of(model, from_two.rows) <= MIB < peak_of(model, from_two.rows + 1)
    assert from_two.expected_bytes == pytest.approx(peak_of(model, from_two.rows), rel=0.005)


def test_a_device_has_a_size_to_fit_into() -> None:
    model = plain()
    with inference(model, device=Device(64 * KIB)) as run:
        model(torch.randn(4, 16))
        assert run.capacity_bytes == 64 * KIB


def test_where_nothing_grows_there_is_no_advice() -> None:
    assert advice_from({2: 100, 4: 100}, 0, 1000) is None
    assert advice_from({2: 100}, 100, 1000) is None
    assert advice_from({2: 300}, 100, 50).rows == 0
