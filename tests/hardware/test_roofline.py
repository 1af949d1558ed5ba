"""The roofline: the longest part counts, unknown rates stay unknown, and a bill is the sum of its operators."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from memlab.hardware.gpus import Gpu, gpu, gpus
from memlab.hardware.roofline import Bill, Kind, Rates, Work, rates_of

HIDING = Rates(
    name="round numbers",
    flops_per_second={"fp32": 100.0, "bf16": 400.0},
    bytes_per_second=10.0,
    seconds_per_kernel=0.5,
    host_bytes_per_second=2.0,
    elements_per_second={Kind.TANH: 5.0},
)
EXPOSED = dataclasses.replace(
    HIDING, name="round numbers of a CPU", kept_bytes=100.0, mapped_bytes_per_second=1.0, overlaps=False
)
WORKS = [
    Work(flops=1000, moved_bytes=10, dtype="fp32", kind=Kind.PRODUCT),
    Work(flops=10, moved_bytes=100, dtype="bf16", kind=Kind.PRODUCT),
    Work(flops=20, moved_bytes=10, kind=Kind.TANH),
    Work(moved_bytes=300, made_bytes=150),
    Work(moved_bytes=300, kind=Kind.IN_PLACE),
    Work(moved_bytes=1, kernels=3),
    Work(host_bytes=8),
]


def seconds_of(work: Work, rates: Rates) -> float:
    return Bill.of([work]).seconds(rates)


@pytest.mark.parametrize(("work", "seconds"), list(zip(WORKS, [10, 10, 4, 30, 30, 1.5, 4.5], strict=True)))
def test_the_longest_part_counts_where_launches_are_hidden(work: Work, seconds: float) -> None:
    # the copy to the host is launched, too, and does not overlap
    assert seconds_of(work, HIDING) == pytest.approx(seconds)


@pytest.mark.parametrize(("work", "seconds"), list(zip(WORKS, [11.5, 10.525, 5.5, 80.5, 30.5, 1.6, 4.5], strict=True)))
def test_the_parts_add_up_on_the_cpu(work: Work, seconds: float) -> None:
    # of 150 bytes for new tensors, 50 more than are kept have to be mapped
    assert seconds_of(work, EXPOSED) == pytest.approx(seconds)


@pytest.mark.parametrize("rates", [HIDING, EXPOSED], ids=["gpu", "cpu"])
def test_a_bill_is_the_sum_of_its_operators(rates: Rates) -> None:
    assert Bill.of(WORKS).seconds(rates) == pytest.approx(sum(seconds_of(work, rates) for work in WORKS))
    assert Bill.of([]).seconds(rates) == 0


def test_copies_to_the_host_run_beside_a_longer_stretch_on_a_gpu() -> None:
    beside = dataclasses.replace(HIDING, copies_beside=True)
    copied, computed = Work(host_bytes=8, kernels=0), Work(moved_bytes=300)  # 4 and 30 seconds
    assert Bill.of([copied, computed]).seconds(beside) == pytest.approx(30)
    assert Bill.of([copied] * 10 + [computed]).seconds(beside) == pytest.approx(40)
    assert Bill.of([copied, computed]).seconds(HIDING) == pytest.approx(34)
    assert not EXPOSED.copies_beside


def test_efficiencies_divide_their_own_part_only() -> None:
    rates = rates_of(gpu("A100 80GB"))
    product = Work(flops=1e12, dtype="bf16", kind=Kind.PRODUCT)
    assert seconds_of(product, rates) == pytest.approx(1e12 / (312e12 * 0.75))
    attention = Work(flops=1e12, dtype="bf16", kind=Kind.ATTENTION)
    assert seconds_of(attention, rates) == pytest.approx(1e12 / (312e12 * 0.6))
    assert seconds_of(Work(moved_bytes=1e9), rates) == pytest.approx(1e9 / (2039e9 * 0.8))
    assert seconds_of(Work(host_bytes=1e9), rates) == pytest.approx(1e9 / (31.5e9 * 0.8))


def test_what_was_measured_for_itself_is_priced_by_its_arithmetic_and_its_parts_on_the_cpu() -> None:
    attention = Work(flops=1000, dtype="bf16", kind=Kind.ATTENTION_BACKWARD, kernels=0, parts=4)
    rerun = Work(kind=Kind.RERUN, kernels=0, parts=12)
    costs = {("bf16", Kind.ATTENTION_BACKWARD): (0.01, 3.0), ("other", Kind.RERUN): (0.0, 0.5)}
    measured = dataclasses.replace(EXPOSED, measured=lambda dtype, kind: costs.get((dtype, kind)))
    assert seconds_of(attention, measured) == pytest.approx(1000 * 0.01 + 4 * 3.0)
    assert seconds_of(rerun, measured) == pytest.approx(6)
    assert Bill.of([attention, rerun]).seconds(measured) == pytest.approx(28)
    # half the rows are half the tiles
    half = Bill.of([dataclasses.replace(attention, flops=500, parts=2)])
    assert half.towards(Bill.of([attention]), 2).seconds(measured) == pytest.approx(33)
    assert seconds_of(attention, EXPOSED) == pytest.approx(2.5)
    assert seconds_of(rerun, EXPOSED) == 0
    assert seconds_of(attention, dataclasses.replace(measured, overlaps=True)) == pytest.approx(10)


def test_operators_of_an_update_have_less_around_them_on_the_cpu() -> None:
    update = Work(moved_bytes=1, kernels=3, updating=3)
    assert seconds_of(update, EXPOSED) == pytest.approx(1.6)
    assert seconds_of(update, dataclasses.replace(EXPOSED, seconds_saved_per_updating=0.2)) == pytest.approx(1.0)
    assert seconds_of(update, dataclasses.replace(HIDING, seconds_saved_per_updating=0.2)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("kind", "like"), [(Kind.CONVOLUTION, Kind.PRODUCT), (Kind.ATTENTION_BACKWARD, Kind.ATTENTION)]
)
def test_a_gpu_has_one_rate_for_products_and_one_for_attention(kind: Kind, like: Kind) -> None:
    rates = rates_of(gpu("A100 80GB"))
    own, other = (seconds_of(Work(flops=1e12, dtype="bf16", kind=each), rates) for each in (kind, like))
    assert own == other > 1e-3


# --- rates of the catalogue -----------------------------------------------------------------------


@pytest.mark.parametrize("listed", gpus(), ids=lambda listed: listed.name)
def test_rates_of_every_gpu_are_known_or_said_to_be_unknown(listed: Gpu) -> None:
    rates = rates_of(listed)
    for dtype in ("fp32", "fp16", "bf16", "fp64", "other"):
        seconds = seconds_of(Work(flops=1e12, dtype=dtype, kind=Kind.PRODUCT), rates)
        assert seconds > 0 or (listed.fp32_flops is None and math.isnan(seconds))
    assert any("no fp32 rate" in note for note in rates.notes) == (listed.fp32_flops is None)
    assert seconds_of(Work(moved_bytes=1e9), rates) > 0
    assert repr(pickle.loads(pickle.dumps(rates))) == repr(rates)  # NaN is not equal to itself


def test_a_dtype_without_tensor_cores_runs_at_the_rate_of_fp32() -> None:
    t4 = rates_of(gpu("T4"))
    assert t4.flops_per_second["bf16"] == t4.flops_per_second["fp32"] == 8.1e12
    assert t4.flops_per_second["fp16"] == 65e12
    assert t4.notes == ("bf16 products at the rate of fp32: T4 has no bf16",)
    assert rates_of(gpu("GTX 1080")).notes == (
        "fp16 products at the rate of fp32: GTX 1080 has no fp16",
        "bf16 products at the rate of fp32: GTX 1080 has no bf16",
    )


def test_an_unknown_fp32_rate_gives_no_time() -> None:
    a10g = rates_of(gpu("A10G"))
    assert a10g.notes == ("no time of fp32 products: the catalogue has no fp32 rate of A10G",)
    fp32 = Work(flops=1.0, moved_bytes=1e9, dtype="fp32", kind=Kind.PRODUCT)
    assert math.isnan(seconds_of(fp32, a10g))
    assert math.isnan(Bill.of([Work(moved_bytes=1e9), fp32, Work(moved_bytes=1e9)]).seconds(a10g))
    on_one_core = Rates("CPU", {"fp32": math.nan}, 1.0, 0.0, 1.0, overlaps=False)
    assert math.isnan(Bill.of([Work(moved_bytes=1e9), fp32]).seconds(on_one_core))
    # what needs no fp32 product has its time all the same
    assert seconds_of(Work(flops=1.0, moved_bytes=1e9, dtype="bf16", kind=Kind.PRODUCT), a10g) > 0
    assert seconds_of(Work(moved_bytes=1e9, dtype="fp32"), a10g) > 0


def test_tf32_where_it_is_allowed_and_there() -> None:
    assert rates_of(gpu("A100 80GB")).flops_per_second["fp32"] == 19.5e12
    assert rates_of(gpu("A100 80GB"), allow_tf32=True).flops_per_second["fp32"] == 156e12
    assert rates_of(gpu("T4"), allow_tf32=True).flops_per_second["fp32"] == 8.1e12


def test_fp64_by_generation() -> None:
    assert rates_of(gpu("A100 80GB")).flops_per_second["fp64"] == 9.75e12
    assert rates_of(gpu("RTX 4090")).flops_per_second["fp64"] == pytest.approx(82.6e12 / 64)


# --- bills ----------------------------------------------------------------------------------------


def rows(count: float) -> Bill:
    """A step on so many rows: everything but the last operator grows with them."""
    made = 100 + 5 * count
    product = Work(50 * count + 20, made + count, "fp32", kind=Kind.PRODUCT, made_bytes=made)
    return Bill.of([product, Work(moved_bytes=30 * count), Work(moved_bytes=9, kernels=2, host_bytes=count)])


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_a_bill_between_or_beyond_two_others(count: int) -> None:
    composed = rows(2).towards(rows(4), (count - 2) / 2)
    assert list(composed.columns["flops"]) == pytest.approx(rows(count).columns["flops"])
    assert list(composed.columns["moved_bytes"]) == pytest.approx(rows(count).columns["moved_bytes"])
    for rates in (HIDING, EXPOSED):
        assert composed.seconds(rates) == pytest.approx(rows(count).seconds(rates))


def test_bills_of_different_operators_do_not_mix() -> None:
    with pytest.raises(ValueError, match="bills of different operators: 3 and 2"):
        rows(1).towards(Bill.of(WORKS[:2]), 0.5)


def test_slower_rates_never_make_a_step_shorter() -> None:
    bill = Bill.of(WORKS)
    for field, value in (("bytes_per_second", 5.0), ("seconds_per_kernel", 1.0), ("host_bytes_per_second", 1.0)):
        for rates in (HIDING, EXPOSED):
            assert bill.seconds(dataclasses.replace(rates, **{field: value})) >= bill.seconds(rates)
