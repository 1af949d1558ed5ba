"""The largest batch that fits: from one size, from two, and proven."""

from __future__ import annotations

import pytest
import torch

from memlab.errors import BudgetError, SessionError, WorkloadError
from memlab.inferring.batches import Call, proven
from memlab.inferring.inference import inference
from memlab.measuring.device import CpuDevice
from memlab.records.inference import CallKind, CallRecord, InferenceRecord, advice_from
from memlab.runtime.workload import Batch
from memlab.units import KIB, MIB
from tests.inferring.small_models import PROMPT, generate, gpt2, llama, plain


def peak_of(model: torch.nn.Module, rows: int) -> int:
    """Peak of a generation with so many rows, measured by itself."""
    with inference(model) as run:
        generate(model, PROMPT[:1].repeat(rows, 1))
    return run.record.peak_allocated_bytes


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_proven_batch_fits_and_one_more_row_does_not(make) -> None:
    model = make()
    before = torch.get_rng_state()
    with inference(model) as run:
        generate(model)
        advice = run.largest_batch("1MiB")
        assert len(run.record.calls) == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert advice.proven_bytes == peak_of(model, advice.rows) <= MIB < peak_of(model, advice.rows + 1)


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


def test_a_device_that_runs_full_is_found_out() -> None:
    model = plain()
    with inference(model, device=CpuDevice(64 * KIB)) as run:
        model(torch.randn(4, 16))
        assert run.capacity_bytes == 64 * KIB
        advice = run.largest_batch("1MiB")  # more than there is
    assert 0 < advice.proven_bytes <= 64 * KIB
    assert advice.rows > 4


def test_memory_that_runs_out_early_makes_the_batch_smaller() -> None:
    """As on a GPU, where room is lost between blocks."""
    call = CallRecord(CallKind.FORWARD, 4, 0, 0, 1, 1.0, 1.0, 500, None, 100)
    record = InferenceRecord("keep", "cpu", (call,))
    asked = []

    def peak_of(rows: int) -> int | None:
        asked.append(rows)
        return None if rows > 85 else 100 + 100 * rows

    advice = proven(record.advise(10_100), record, peak_of)
    assert asked == [100, 90, 81]
    assert (advice.rows, advice.proven_bytes) == (81, 8200)


def test_what_cannot_be_proven_is_told() -> None:
    model = plain()
    with inference(model) as run:
        with pytest.raises(WorkloadError, match="give a budget"):
            run.largest_batch()
        with pytest.raises(WorkloadError, match="no call of Sequential was seen"):
            run.largest_batch("1MiB")
        model(torch.randn(4, 16))
        with pytest.raises(BudgetError, match=r"not one row fits into 1\.0 KiB"):
            run.largest_batch("1KiB")
    with pytest.raises(SessionError, match="is over"):
        run.largest_batch("1MiB")


def test_a_loop_with_a_cache_of_its_own_cannot_be_repeated() -> None:
    model = gpt2()
    with inference(model) as run:
        past = model(PROMPT, use_cache=True).past_key_values
        model(PROMPT[:, :1], past_key_values=past)
        assert run.record.kind == "generate"
        with pytest.raises(WorkloadError, match="no call to repeat"):
            run.largest_batch("1MiB")


def test_rows_are_repeated_where_there_are_rows() -> None:
    batch = Batch((torch.arange(3),), {"x": torch.eye(3)[:, :2], "scale": torch.ones(4), "n": 3})
    more = Call.like("forward", batch, torch.device("cpu")).with_rows(5)
    assert more.args[0].tolist() == [0, 1, 2, 0, 1]
    assert (more.kwargs["x"].shape, more.kwargs["scale"].shape, more.kwargs["n"]) == ((5, 2), (4,), 3)


def test_where_nothing_grows_there_is_no_advice() -> None:
    assert advice_from({2: 100, 4: 100}, 0, 1000) is None
    assert advice_from({2: 100}, 100, 1000) is None
    assert advice_from({2: 300}, 100, 50).rows == 0
