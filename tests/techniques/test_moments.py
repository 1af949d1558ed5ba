"""Splitting and rounding fp32, checked on bit patterns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.techniques.precision.moments import join_master, round_stochastically, split_master

SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    -1e-45,
    3.4028234663852886e38,
    -3.4028234663852886e38,
]


def of_bits(patterns: list[int]) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.dtype is torch.bfloat16 else torch.int32)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_the_halves_of_any_bit_pattern_join_to_it(patterns: list[int]) -> None:
    values = of_bits(patterns)
    high, low = split_master(values)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    joined, last = (
        join_master(high, low),
        (bits(values) & 0x7FFFFFFF) > 0x7FFF7FFF,
    )  # NaN, whose carry would be into the sign
    assert torch.equal(bits(joined)[~last], bits(values)[~last])
    assert bool(joined[last].isnan().all() and high[last].isnan().all())
    carried = bits(values).long() + 2**15
    assert torch.equal(bits(high).int()[~last], ((carried >> 16) & 0xFFFF).to(torch.int16).int()[~last])


def test_the_upper_part_is_the_nearest_bf16() -> None:
    values = torch.randn(4096)
    high, _ = split_master(values)
    assert float((high.float() - values).abs().max()) <= float((values.bfloat16().float() - values).abs().max())
    # no bias towards zero: truncation would shrink every weight
    assert abs(float((high.float().abs() - values.abs()).mean())) < 2e-4


@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_survive_in_any_shape(value: float) -> None:
    for shape in ((), (1,), (3, 5), (0, 2)):
        values = torch.full(shape, value)
        joined = join_master(*split_master(values))
        assert joined.shape == values.shape
        assert torch.equal(bits(joined.reshape(-1)), bits(values.reshape(-1)))


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7FFF8000, -(2**15)])
def test_not_a_number_stays_none(pattern: int) -> None:
    high, low = split_master(of_bits([pattern]))
    assert bool(high.isnan())
    assert bool(join_master(high, low).isnan())


def test_an_upper_half_that_was_set_to_zero_joins_to_zero() -> None:
    high, low = split_master(torch.randn(64))
    assert float(join_master(high.mul_(torch.tensor(0.0)), low).abs().max()) < 1e-40


def test_halves_keep_the_memory_layout() -> None:
    values = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    high, low = split_master(values)
    joined = join_master(high, low)
    assert high.stride() == low.stride() == joined.stride() == values.stride()
    assert torch.equal(joined, values)


def test_a_parameter_can_be_split() -> None:
    high, low = split_master(torch.nn.Parameter(torch.randn(4)))
    assert not high.requires_grad
    assert join_master(torch.nn.Parameter(high), low).dtype is torch.float32


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=64))
def test_what_bf16_represents_is_not_changed_by_rounding(patterns: list[int]) -> None:
    values = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16)
    rounded = round_stochastically(values.float())
    assert torch.equal(rounded.isnan(), values.isnan())
    assert torch.equal(bits(rounded[~values.isnan()]), bits(values[~values.isnan()]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_rounding_goes_to_one_of_the_two_neighbours(patterns: list[int]) -> None:
    values = of_bits(patterns)
    rounded = round_stochastically(values).float()
    assert torch.equal(rounded.isnan(), values.isnan())
    assert torch.equal(rounded.isinf(), values.isinf())
    finite = values.isfinite()
    below, above = bits(values) & ~0xFFFF, (bits(values) & ~0xFFFF) + 0x10000
    near = (bits(rounded) == below) | (bits(rounded) == above)
    assert bool(near[finite].all())


def test_rounding_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    for value in (1.0 + 1 / 512, -3.1415927, 1e-20, 1.0 + 1 / 65536):
        values = torch.full((200_000,), value)
        mean = round_stochastically(values, generator).double().mean().item()
        step = abs(value) / 128
        assert abs(mean - value) < 5 * step / 200_000**0.5


def test_rounding_is_repeatable_and_chunked() -> None:
    values = torch.randn(2**20 + 7)
    first, second = (round_stochastically(values, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert (first.float() - values).abs().max() < values.abs().max() / 64
    assert not torch.equal(first, values.to(torch.bfloat16))


def test_small_updates_do_not_vanish() -> None:
    generator = torch.Generator().manual_seed(0)
    nearest = stochastic = torch.ones(10_000, dtype=torch.bfloat16)
    for _ in range(50):
        nearest = (nearest.float() + 1e-4).to(torch.bfloat16)
        stochastic = round_stochastically(stochastic.float() + 1e-4, generator)
    assert nearest.float().mean() == 1.0
    assert abs(stochastic.float().mean().item() - 1.005) < 2e-4
