"""Rates of the CPU: measured once, plausible, and without a trace in the process."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.hardware.roofline import Bill, Kind, Rates, Work
from memlab.measuring import host_rates as module
from memlab.measuring.device import Device
from memlab.measuring.host_rates import host_rates


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test measures for itself."""
    monkeypatch.setattr(module, "_known", {})


def numbers_of(rates: Rates) -> list[float]:
    return [
        *rates.flops_per_second.values(),
        *rates.elements_per_second.values(),
        rates.bytes_per_second,
        rates.mapped_bytes_per_second,
        rates.seconds_per_kernel,
        rates.host_bytes_per_second,
    ]


def test_rates_are_numbers_of_a_computer() -> None:
    rates = host_rates()
    assert all(math.isfinite(number) and number > 0 for number in numbers_of(rates))
    assert set(rates.flops_per_second) == {"fp32", "bf16", "fp16", "fp64"}
    assert {Kind.EXPONENTIAL, Kind.TANH, Kind.RANDOM} <= set(rates.elements_per_second)
    assert rates.name == "CPU, 1 thread"
    assert rates.seconds_per_kernel < 1e-3
    assert not rates.overlaps
    assert Bill.of([Work(flops=1e9, dtype="fp32", kind=Kind.PRODUCT)]).seconds(rates) > 0


def test_measured_once_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = host_rates()
    assert host_rates() is rates
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert host_rates() is not rates
    assert host_rates().name == "CPU, 7 threads"


def test_nothing_is_measured_at_import_and_bitsandbytes_waits_for_plans_that_need_it() -> None:
    code = (
        "import memlab.measuring.host_rates as m, sys; assert m._known == {}; rates = m.host_rates(); "
        "rates.seconds_per_flop('fp32', 'tanh'); assert 'bitsandbytes' not in sys.modules; "
        "assert rates.seconds_per_flop('other', 'adam8bit') > 0"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_products_in_16_bits_are_as_fast_as_those_of_a_layer() -> None:
    """Of two matrices that lie as they are made some CPUs make products in bf16 several times as slowly."""
    layer = torch.nn.Linear(192, 384, bias=False).bfloat16()
    values = torch.ones(256, 192, dtype=torch.bfloat16, requires_grad=True)

    def seconds() -> float:
        began = time.thread_time()
        layer(values).sum().backward()
        return time.thread_time() - began

    measured = min(seconds() for _ in range(5))
    predicted = 6 * 256 * 192 * 384 / host_rates().flops_per_second["bf16"]
    assert measured / 2.5 < predicted < 2.5 * measured


@pytest.mark.few(2)
@pytest.mark.parametrize("surroundings", ["plain", "no_grad", "inference", "autocast", "fake"])
def test_the_surroundings_stay_as_they_are(surroundings: str) -> None:
    contexts = {
        "plain": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "fake": FakeTensorMode,
    }
    with contexts[surroundings]():
        before = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads())
        random_before = torch.get_rng_state()
        rates = host_rates()
        after = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads())
        random_after = torch.get_rng_state()
    assert before == after
    assert bytes(random_before.untyped_storage()) == bytes(random_after.untyped_storage())
    assert all(math.isfinite(number) and number > 0 for number in numbers_of(rates))


def test_another_default_dtype_is_not_asked() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        rates = host_rates()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(number > 0 for number in numbers_of(rates))


def test_a_ledger_does_not_see_it() -> None:
    # a capacity of one MiB would refuse the first of the large tensors
    device = Device(2**20)
    ledger = device.ledger()
    ledger.begin([])
    with ledger:
        host_rates()
    assert ledger.peak_bytes == 0
    device.close()


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda package: False)
    assert host_rates().cost("other", Kind.ADAM_8BIT) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Kind.ATTENTION, Kind.ATTENTION_BACKWARD])
def test_attention_takes_what_its_tiles_and_its_arithmetic_take(kind: Kind, dtype: torch.dtype) -> None:
    """In bf16 the gradient of 48 queries takes up to 100 times as long as its arithmetic would in large products."""
    heads, length, features = 32, 48, 16
    values = torch.ones(1, heads, length, features, dtype=dtype)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    output = forward(values, values, values)

    def seconds() -> float:
        began = time.thread_time()
        if kind is Kind.ATTENTION:
            forward(values, values, values)
        else:
            backward(values, values, values, values, *output, 0.0, False)
        return time.thread_time() - began

    measured = min(seconds() for _ in range(10))
    name = "fp32" if dtype is torch.float32 else "bf16"
    flops = (4.0 if kind is Kind.ATTENTION else 10.0) * heads * length**2 * features
    work = Work(flops, dtype=name, kind=kind, kernels=0, parts=2 * heads)
    predicted = Bill.of([work]).seconds(host_rates())
    assert measured / 2.5 < predicted < 2.5 * measured


def test_rerunning_a_layer_takes_longer_than_its_operators() -> None:
    rates = host_rates()
    per_module, per_module_of_selective = (
        cost[1] for kind in (Kind.RERUN, Kind.SELECTIVE_RERUN) if (cost := rates.cost("other", kind)) is not None
    )
    assert rates.seconds_per_kernel < per_module < 0.01
    assert rates.seconds_per_kernel < per_module_of_selective < 0.01
    assert 0 <= rates.seconds_saved_per_updating < rates.seconds_per_kernel
