"""Numbers of calls: speed from the calls that no ledger watched, rows as of a receipt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from memlab.records.inference import CallKind, CallRecord, InferenceRecord

WATCHED = CallRecord(CallKind.GENERATE, 4, 16, 80, 20, 9.0, 5.0, 1000, None, 600, 100, observed=True)
PLAIN = replace(WATCHED, seconds=2.0, prefill_seconds=0.5, peak_allocated_bytes=None, observed=False)


def test_speed_is_that_of_calls_without_a_ledger() -> None:
    record = InferenceRecord("bf16", "cpu", (WATCHED, PLAIN, PLAIN))
    assert record.timed == (PLAIN, PLAIN)
    assert record.new_tokens_per_second == 40
    assert record.prefill_tokens_per_second == 4 * 16 / 0.5
    assert record.decode_tokens_per_second == pytest.approx((80 - 4) / 1.5)
    assert record.peak_allocated_bytes == 1000


def test_the_first_of_several_calls_warms_up() -> None:
    first = replace(PLAIN, seconds=60.0)
    assert InferenceRecord("keep", "gpu", (first, PLAIN)).timed == (PLAIN,)
    assert InferenceRecord("keep", "gpu", (first,)).timed == (first,)


def test_a_forward_has_no_speed_of_tokens_that_come_out() -> None:
    forward = CallRecord(CallKind.FORWARD, 4, 16, 0, 1, 0.5, 0.5)
    record = InferenceRecord("keep", "cpu", (forward,))
    speeds = (record.new_tokens_per_second, record.prefill_tokens_per_second, record.decode_tokens_per_second)
    assert all(math.isnan(speed) for speed in speeds)
    assert record.measurement.tokens_per_second == 4 * 16 / 0.5
    assert record.measurement.samples_per_second == 8
    assert record.advise(10**9) is None


def test_the_row_of_a_receipt() -> None:
    row = InferenceRecord("bf16", "cpu", (WATCHED, PLAIN), {"parameters": 600}, host_bytes=1200).measurement
    assert (row.plan, row.peak_allocated_bytes, row.host_bytes) == ("--inference --bf16", 1000, 1200)
    assert (row.samples_per_step, row.tokens_per_step, row.step_seconds) == (4, 80, (2.0,))


def test_advice_counts_calls_of_the_same_shape_only() -> None:
    longer = replace(WATCHED, tokens=64, rows=1, peak_allocated_bytes=900)
    record = InferenceRecord("keep", "cpu", (WATCHED, longer))
    assert record.advise(1600).sizes == (4,)
    larger = replace(WATCHED, rows=8, new_tokens=160, peak_allocated_bytes=1500)
    advice = InferenceRecord("keep", "cpu", (WATCHED, larger)).advise(1600)
    assert (advice.sizes, advice.fixed_bytes, advice.row_bytes, advice.rows) == ((4, 8), 500, 125, 8)
    assert advice.expected_bytes == 1500
