"""Rates of the CPU as a device: measured in this process, since no datasheet knows its kernels.

Everything is measured when it is first asked for, once for each number of threads. Random state, threads, grad mode
and autocast stay as they are, and dispatch modes (a ledger, a fake mode) do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import Any

import torch
from torch.nn.utils import skip_init
from torch.utils._python_dispatch import _disable_current_modes

from memlab.extras import available, require
from memlab.hardware.roofline import Kind, Rates
from memlab.plan import Tier
from memlab.runtime.modules import without_global_hooks
from memlab.techniques.offload.spill import Spill
from memlab.units import MIB

# name, dtype, and rows, inputs and outputs of a linear layer that takes a few milliseconds; 16 bits have no fast kernels on
# most CPUs
_PRODUCTS = (
    ("fp32", torch.float32, (512, 512, 512)),
    ("bf16", torch.bfloat16, (256, 128, 512)),
    ("fp16", torch.float16, (128, 128, 256)),
    ("fp64", torch.float64, (256, 256, 256)),
)
_PRODUCTS_OF_LAYER = 3
# above the 32 MiB up to which malloc comes to keep freed memory (M_MMAP_THRESHOLD in mallopt(3)), and above most caches
_FRESH_BYTES = 40 * MIB
# from about here on an operator's result was memory mapped anew at every step (GPT-2 and BERT of 4 to 12 M parameters)
_KEPT_BYTES = 8 * MIB
_ELEMENTS = 2**16
_ROW_ELEMENTS = 256
_ADAM_ELEMENTS = 2**18
_BLOCK_ELEMENTS = 256
_SPILLED_BYTES = 16 * MIB  # state is streamed, so more than the nearer caches hold
_BLOCKS = 16
_SMALL = 4
# linear layer, normalisation and GELU: three in forward; in backward three, and two more for weight and bias, each of
# them added to what `.grad` holds, as are the two gradients of the normalisation
_OPERATORS_OF_BLOCK = 12
_REPEATS = 5

_known: dict[int, Rates] = {}


def host_rates() -> Rates:
    """Rates of this machine's CPU with the present number of threads.

    The first call takes some 0.5 s, later ones nothing. Rates of 8-bit optimizers are measured when they are first asked for, as
    that imports bitsandbytes.

    Known limitations:
        Products are measured warm, those of one linear layer together; caches, other processes and thin products make a
        step slower.
    """
    threads = torch.get_num_threads()
    if threads not in _known:
        with _undisturbed():
            _known[threads] = _measured(threads)
    return _known[threads]


@contextmanager
def _undisturbed() -> Iterator[None]:
    no_autocast, no_inference = torch.autocast("cpu", enabled=False), torch.inference_mode(False)
    with without_global_hooks(), _disable_current_modes(), no_inference, no_autocast, torch.no_grad():
        yield


def _measured(threads: int) -> Rates:
    bytes_per_second, mapped_bytes_per_second = _memory_rates()
    return Rates(
        name=f"CPU, {threads} thread{'s' if threads > 1 else ''}",
        flops_per_second={name: _product_rate(dtype, *sizes) for name, dtype, sizes in _PRODUCTS},
        bytes_per_second=bytes_per_second,
        seconds_per_kernel=_seconds_per_operator(),
        host_bytes_per_second=_spill_rate(),
        elements_per_second=_Elements(_element_rates()),
        kept_bytes=_KEPT_BYTES,
        mapped_bytes_per_second=mapped_bytes_per_second,
        overlaps=False,
    )


def _seconds(call: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """The shortest of a few runs, after one to warm up."""
    # other processes make a run longer on the clock, and take no time of this thread; that of several is not to be had
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    call()
    shortest = math.inf
    for _ in range(repeats):
        start = clock()
        call()
        shortest = min(shortest, clock() - start)
    return shortest


def _ones(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(sizes, dtype=dtype, device="cpu")


def _product_rate(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    """Operations per second of a linear layer, there and back: in 16 bits its products differ up to 17 times in speed."""
    values, weight = _ones(rows, inputs, dtype=dtype), _ones(outputs, inputs, dtype=dtype)
    gradient = _ones(rows, outputs, dtype=dtype)

    def there_and_back() -> None:
        torch.mm(values, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), values)

    return _PRODUCTS_OF_LAYER * 2.0 * rows * inputs * outputs / _seconds(there_and_back)


def _memory_rates() -> tuple[float, float]:
    """Bytes per second of an operator over memory, and of mapping what its result needs."""
    values = _ones(_FRESH_BYTES // 4)
    kept_seconds = _seconds_into(values, torch.empty_like(values))
    fresh_seconds = _seconds(lambda: torch.mul(values, 2.0), repeats=1)
    mapping_seconds = max(fresh_seconds - kept_seconds, 0.01 * kept_seconds)
    return 2 * _FRESH_BYTES / kept_seconds, _FRESH_BYTES / mapping_seconds


def _seconds_into(values: torch.Tensor, result: torch.Tensor) -> float:
    return _seconds(lambda: torch.mul(values, 2.0, out=result))


def _element_rates() -> dict[str, float]:
    """Elements per second of arithmetic that takes longer than its memory traffic."""
    values = torch.linspace(-3.0, 3.0, _ELEMENTS, dtype=torch.float32, device="cpu")
    rows = values.view(-1, _ROW_ELEMENTS)
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.empty_like(values)
    return {
        Kind.EXPONENTIAL: _ELEMENTS / _seconds(lambda: torch.softmax(rows, dim=-1)),
        Kind.TANH: _ELEMENTS / _seconds(lambda: torch.tanh(values)),
        Kind.RANDOM: _ELEMENTS / _seconds(lambda: drawn.bernoulli_(0.9, generator=generator)),
    }


def _seconds_per_operator() -> float:
    """Return what surrounds an operator: Python, modules, dispatch and autograd, on tensors too small to count."""
    blocks = torch.nn.Sequential(*(module for _ in range(_BLOCKS) for module in _block()))
    values = _ones(_SMALL, _SMALL).requires_grad_()

    def there_and_back() -> None:
        with torch.enable_grad():
            blocks(values).sum().backward()

    return _seconds(there_and_back) / (_OPERATORS_OF_BLOCK * _BLOCKS)


def _block() -> tuple[torch.nn.Module, ...]:
    # made without drawing random numbers
    linear = skip_init(torch.nn.Linear, _SMALL, _SMALL, device="cpu", dtype=torch.float32)  # type: ignore[no-untyped-call]
    torch.nn.init.eye_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    return linear, torch.nn.LayerNorm(_SMALL, device="cpu", dtype=torch.float32), torch.nn.GELU()


class _Elements(Mapping[str, float]):
    """Rates by kind of arithmetic; those of bitsandbytes are measured when one is asked for."""

    def __init__(self, known: dict[str, float]) -> None:
        self._known = known

    def __getitem__(self, kind: str) -> float:
        if kind in (Kind.ADAM_8BIT, Kind.QUANTIZATION) and kind not in self._known:
            with _undisturbed():
                self._known |= _bitsandbytes_rates()
        return self._known[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _bitsandbytes_rates() -> dict[str, float]:
    """Elements per second of the 8-bit optimizer, and of the way to its format and back."""
    if not available("bitsandbytes"):
        return {}
    functional = require("bitsandbytes").functional
    signed, unsigned = functional.create_dynamic_map(signed=True), functional.create_dynamic_map(signed=False)
    values = torch.linspace(-1.0, 1.0, _ADAM_ELEMENTS, dtype=torch.float32, device="cpu")
    gradient = values.clone()
    states = [torch.zeros(_ADAM_ELEMENTS, dtype=torch.uint8, device="cpu") for _ in range(2)]
    scales = [_ones(_ADAM_ELEMENTS // _BLOCK_ELEMENTS) for _ in range(2)]

    def update() -> None:
        functional.optimizer_update_8bit_blockwise(
            "adam", gradient, values, *states, 0.9, 0.999, 0.0, 0.0, 1e-8, 1, 0.0, signed, unsigned, *scales
        )

    def there_and_back() -> None:
        codes, state = functional.quantize_blockwise(gradient, code=signed, blocksize=_BLOCK_ELEMENTS)
        functional.dequantize_blockwise(codes, absmax=state.absmax, code=signed, blocksize=_BLOCK_ELEMENTS)

    return {
        Kind.ADAM_8BIT: _ADAM_ELEMENTS / _seconds(update, repeats=2),
        Kind.QUANTIZATION: 2 * _ADAM_ELEMENTS / _seconds(there_and_back, repeats=2),
    }


def _spill_rate() -> float:
    """Bytes per second to a region of the kind that offload uses again and again, and back."""
    values = _ones(_SPILLED_BYTES // 4)
    spilled = Spill(Tier.DISK).store(values)

    def there_and_back() -> None:
        spilled.copy_(values)
        values.copy_(spilled)

    return 2 * _SPILLED_BYTES / _seconds(there_and_back)
