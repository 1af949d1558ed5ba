"""Sizes, changes and durations: what is read is what is printed, and doubtful units are refused."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab import units
from memlab.errors import PlanError
from memlab.units import GIB, KIB, MIB, format_bytes, format_change, format_seconds, parse_bytes


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1B", 1),
        ("512 KiB", 512 * KIB),
        ("1.5gib", 3 * GIB // 2),
        ("  2 MIB ", 2 * MIB),
        ("1TiB", 2**40),
        ("8G", 2**33),
        ("8 GB", 8 * 10**9),
        (".5mb", 500_000),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["8", "8GX", "8 Gi", "GiB", "", "-1GiB", "1e3MiB", "1,5GiB"])
def test_doubtful_sizes_are_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_bytes(text)
    assert (
        str(caught.value)
        == f"size {text!r}: expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"
    )


def test_nothing_is_no_size() -> None:
    with pytest.raises(PlanError) as caught:
        parse_bytes("0GiB")
    assert str(caught.value) == "size '0GiB': must be one byte or more"


@given(st.integers(min_value=1, max_value=2**46))
def test_printed_sizes_read_back_to_within_their_digits(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051, abs=1)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (KIB, "1.0 KiB"), (MIB, "1.0 MiB"), (GIB, "1.00 GiB"), (-2 * GIB, "-2.00 GiB")],
)
def test_sizes_are_printed(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("ratio", "text"), [(1.004, "±0 %"), (0.996, "±0 %"), (0.0, "−100 %"), (3.0, "+200 %")])
def test_changes_are_printed(ratio: float, text: str) -> None:
    assert format_change(ratio) == text


@given(st.floats(min_value=0, max_value=1e6))
def test_changes_carry_the_right_sign(ratio: float) -> None:
    percent = int(format_change(ratio).replace("−", "-").replace("±", "").removesuffix(" %"))
    assert abs(percent - (ratio - 1) * 100) <= 0.5 + 1e-6 * ratio


@pytest.mark.parametrize(("seconds", "text"), [(0, "0.0 ms"), (1, "1.00 s"), (60, "1 min 0 s"), (3599, "59 min 59 s")])
def test_durations_are_printed(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
