"""Rates of the CPU as a device: measured in this process, since no datasheet knows its kernels.

Everything is measured when it is first asked for, once for each number of threads. Random state, threads, grad mode
and autocast stay as they are, and dispatch modes (a ledger, a fake mode) do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import torch
from torch.nn.utils import skip_init
from torch.utils._python_dispatch import _disable_current_modes

from memlab.extras import available, require
from memlab.hardware.roofline import Kind, Rates
from memlab.plan import Tier
from memlab.runtime.modules import without_global_hooks
from memlab.techniques.checkpointing.rerun import Part, recomputed
from memlab.techniques.offload.spill import Spill
from memlab.units import MIB

# name, dtype, and rows, inputs and outputs of a linear layer that takes a few milliseconds; 16 bits have no fast kernels on
# most CPUs
_PRODUCTS = {
    "fp32": (torch.float32, (512, 512, 512)),
    "bf16": (torch.bfloat16, (256, 128, 512)),
    "fp16": (torch.float16, (128, 128, 256)),
    "fp64": (torch.float64, (256, 256, 256)),
}
_PRODUCTS_OF_LAYER = 3
_OF_LIBRARIES = (Kind.PRODUCT, Kind.CONVOLUTION, Kind.ATTENTION, Kind.ATTENTION_BACKWARD)
_OF_BITSANDBYTES = (Kind.ADAM_8BIT, Kind.QUANTIZATION)
_THIN = (64, 128, 128)  # a layer of a micro-batch, whose products take longer than their arithmetic
_IMAGES = (4, 64, 16, 16)
_KERNEL = 3
# heads, queries and keys, features of a head; and into how many tiles torch's kernel cuts each of them
_ATTENTION = (((4, 64, 64), 2), ((4, 384, 64), 6))
# above what malloc comes to keep, and above most caches
_FRESH_BYTES = 40 * MIB
# up to which malloc comes to keep freed memory (M_MMAP_THRESHOLD in mallopt(3))
_KEPT_BYTES = 32 * MIB
_ELEMENTS = 2**16
_ROW_ELEMENTS = 256
_ADAM_ELEMENTS = 2**18
_BLOCK_ELEMENTS = 256
_SPILLED_BYTES = 16 * MIB  # state is streamed, so more than the nearer caches hold
_BLOCKS = 8
_SMALL = 4
_BETWEEN = 192
# linear layer, normalisation and GELU: three in forward; in backward three, and two more for weight and bias, each of
# them added to what `.grad` holds, as are the two gradients of the normalisation
_OPERATORS_OF_BLOCK = 12
_OPERATORS_OF_UPDATE = 6
_REPEATS = 5
_REPEATS_BETWEEN = 15
# features, heads and features within of a layer that is run again, and its batch
_LAYER = (64, 2, 64)
_LAYER_INPUT = (2, 16, 64)
# operators of it that run again, and are more than views
_OPERATORS_OF_RERUN: dict[str, int] = {Kind.RERUN: 13, Kind.SELECTIVE_RERUN: 8}

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
    flops = {name: _product_rate(dtype, *sizes) for name, (dtype, sizes) in _PRODUCTS.items()}
    seconds_per_operator = _seconds_per_operator()
    return Rates(
        name=f"CPU, {threads} thread{'s' if threads > 1 else ''}",
        flops_per_second=flops,
        bytes_per_second=bytes_per_second,
        seconds_per_kernel=seconds_per_operator,
        seconds_saved_per_updating=max(0.0, seconds_per_operator - _seconds_per_updating()),
        host_bytes_per_second=_spill_rate(),
        elements_per_second=_element_rates(),
        costs=_Costs(flops, seconds_per_operator),
        kept_bytes=_KEPT_BYTES,
        mapped_bytes_per_second=mapped_bytes_per_second,
        overlaps=False,
    )


def _seconds(call: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """The shortest of a few runs, after one to warm up."""
    clock = _clock()
    call()
    shortest = math.inf
    for _ in range(repeats):
        start = clock()
        call()
        shortest = min(shortest, clock() - start)
    return shortest


def _clock() -> Callable[[], float]:
    # other processes make a run longer on the clock, and take no time of this thread; that of several is not to be had
    return thread_time if torch.get_num_threads() == 1 else perf_counter


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
    blocks, values = [torch.nn.Sequential(*_block()) for _ in range(_BLOCKS)], _ones(_SMALL, _SMALL).requires_grad_()

    def there_and_back(between: Callable[..., None]) -> None:
        with torch.enable_grad():
            result = values
            for block in blocks:
                result = block(result)
                between()
                result.register_hook(between)
            result.sum().backward()  # type: ignore[no-untyped-call]

    return _seconds_between(there_and_back) / (_OPERATORS_OF_BLOCK * _BLOCKS)


def _seconds_per_updating() -> float:
    """Return what surrounds an operator of an update, where there are neither modules nor autograd."""
    values, other = _ones(_SMALL, _SMALL), _ones(_SMALL, _SMALL)

    def update(between: Callable[..., None]) -> None:
        for _ in range(_BLOCKS):
            values.mul_(0.5).add_(other, alpha=0.5)
            torch.sqrt(other).add_(1.0)
            values.addcdiv_(values, other, value=0.5)
            values.lerp_(other, 0.5)
            between()

    return _seconds_between(update) / (_OPERATORS_OF_UPDATE * _BLOCKS)


def _seconds_between(call: Callable[[Callable[..., None]], None]) -> float:
    """Seconds of a call that has products run in between, without these.

    What follows a product finds neither code nor data in the nearest caches, as in a step.
    """
    clock, matrix, of_products = _clock(), _ones(_BETWEEN, _BETWEEN), 0.0
    result = torch.empty_like(matrix)

    def product(_gradient: object = None) -> None:
        nonlocal of_products
        start = clock()
        with torch.no_grad():
            torch.mm(matrix, matrix, out=result)
        of_products += clock() - start

    shortest = math.inf
    for _ in range(_REPEATS_BETWEEN):
        of_products, start = 0.0, clock()
        call(product)
        shortest = min(shortest, clock() - start - of_products)
    return shortest


def _block() -> tuple[torch.nn.Module, ...]:
    # made without drawing random numbers
    linear = skip_init(torch.nn.Linear, _SMALL, _SMALL, device="cpu", dtype=torch.float32)  # type: ignore[no-untyped-call]
    torch.nn.init.eye_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    return linear, torch.nn.LayerNorm(_SMALL, device="cpu", dtype=torch.float32), torch.nn.GELU()


_Key = tuple[str, str]
_Cost = tuple[float, float]


class _Costs(Mapping[_Key, _Cost]):
    """Seconds of a unit of arithmetic and of a part, by dtype and kind, each measured when it is first asked for."""

    def __init__(self, flops_per_second: Mapping[str, float], seconds_per_operator: float) -> None:
        self._flops_per_second, self._seconds_per_operator = flops_per_second, seconds_per_operator
        self._known: dict[_Key, _Cost] = {}

    def __getitem__(self, key: _Key) -> _Cost:
        if key not in self._known:
            if not self._differs(*key):
                raise KeyError(key)
            with _undisturbed():
                self._known |= self._measured(*key)
        return self._known[key]

    def _differs(self, name: str, kind: str) -> bool:
        """Return whether a kind is not priced well enough by what is known of all."""
        if kind in _OF_BITSANDBYTES:
            return available("bitsandbytes")
        return kind in _OPERATORS_OF_RERUN or (kind in _OF_LIBRARIES and name in _PRODUCTS)

    def _measured(self, name: str, kind: str) -> Mapping[_Key, _Cost]:
        if kind in _OF_BITSANDBYTES:
            return _bitsandbytes_costs()
        if kind in _OPERATORS_OF_RERUN:
            seconds, modules = _rerun(selective=kind == Kind.SELECTIVE_RERUN)
            seconds -= _OPERATORS_OF_RERUN[kind] * self._seconds_per_operator
            return {(name, kind): (0.0, max(0.0, seconds) / modules)}
        dtype, per_flop = _PRODUCTS[name][0], 1 / self._flops_per_second[name]
        if kind == Kind.CONVOLUTION:
            return {(name, kind): (1 / _convolution_rate(dtype), 0.0)}
        if kind != Kind.PRODUCT:
            return _attention_costs(name, dtype)
        flops = 2.0 * math.prod(_THIN)
        return {(name, kind): (per_flop, max(0.0, flops / _product_rate(dtype, *_THIN) - flops * per_flop))}

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _convolution_rate(dtype: torch.dtype) -> float:
    """Operations per second of a convolution, there and back: of another library than products of matrices."""
    rows, channels, height, width = _IMAGES
    images, kernels = _ones(*_IMAGES, dtype=dtype), _ones(channels, channels, _KERNEL, _KERNEL, dtype=dtype)
    settings: Any = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def there_and_back() -> None:
        torch.ops.aten.convolution(images, kernels, None, *settings)
        torch.ops.aten.convolution_backward(images, images, kernels, None, *settings, [True, True, False])

    flops = 2.0 * rows * height * width * (channels * _KERNEL) ** 2
    return _PRODUCTS_OF_LAYER * flops / _seconds(there_and_back)


def _attention_costs(name: str, dtype: torch.dtype) -> Mapping[_Key, _Cost]:
    """Costs of fused attention, there and back, from two lengths: a tile has small products, which a flop does not tell."""
    seconds: list[tuple[float, float]] = []
    work: list[tuple[float, int]] = []
    for (heads, length, features), tiles in _ATTENTION:
        values = _ones(1, heads, length, features, dtype=dtype)
        forward = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, values, values, values)
        backward = partial(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, *(values,) * 4, *forward(), 0.0, False
        )
        seconds.append((_seconds(forward), _seconds(backward)))
        work.append((4.0 * heads * length**2 * features, heads * tiles))
    (few, few_tiles), (many, many_tiles) = work

    def cost(at: int, factor: float) -> _Cost:
        short, long = seconds[0][at], seconds[1][at]
        per_tile = max(0.0, (short * many - long * few) / (few_tiles * many - many_tiles * few))
        return max(0.0, long - many_tiles * per_tile) / (factor * many), per_tile

    # five products in backward for the two in forward
    return {(name, Kind.ATTENTION): cost(0, 1.0), (name, Kind.ATTENTION_BACKWARD): cost(1, 2.5)}


def _rerun(*, selective: bool) -> tuple[float, int]:
    """Seconds by which running a layer again makes a step longer, and its modules.

    Their state is put back, and what they save is compared.
    """
    block = skip_init(
        torch.nn.TransformerEncoderLayer, *_LAYER, 0.0, batch_first=True, device="cpu", dtype=torch.float32
    )  # type: ignore[no-untyped-call]
    for parameter in block.parameters():
        torch.nn.init.ones_(parameter)
    values, part = _ones(*_LAYER_INPUT).requires_grad_(), Part(block, "block")

    def step(run: Callable[[torch.Tensor], Any]) -> None:
        with torch.enable_grad():
            run(values).sum().backward()

    def again(given: torch.Tensor) -> Any:
        return recomputed(part, block.forward, (given,), {}, selective=selective)

    return _seconds(lambda: step(again), 15) - _seconds(lambda: step(block.forward), 15), len(part.modules)


def _bitsandbytes_costs() -> Mapping[_Key, _Cost]:
    """Seconds of an element and of a call of the 8-bit optimizer, and of the way to its format and back."""
    functional = require("bitsandbytes").functional
    signed, unsigned = functional.create_dynamic_map(signed=True), functional.create_dynamic_map(signed=False)

    def seconds(elements: int) -> tuple[float, float]:
        values = torch.linspace(-1.0, 1.0, elements, dtype=torch.float32, device="cpu")
        gradient = values.clone()
        states = [torch.zeros(elements, dtype=torch.uint8, device="cpu") for _ in range(2)]
        scales = [_ones(elements // _BLOCK_ELEMENTS) for _ in range(2)]

        def update() -> None:
            functional.optimizer_update_8bit_blockwise(
                "adam", gradient, values, *states, 0.9, 0.999, 0.0, 0.0, 1e-8, 1, 0.0, signed, unsigned, *scales
            )

        def there_and_back() -> None:
            codes, state = functional.quantize_blockwise(gradient, code=signed, blocksize=_BLOCK_ELEMENTS)
            functional.dequantize_blockwise(codes, absmax=state.absmax, code=signed, blocksize=_BLOCK_ELEMENTS)

        return _seconds(update), _seconds(there_and_back) / 2

    calls, all_elements = seconds(_BLOCK_ELEMENTS), seconds(_ADAM_ELEMENTS)
    kinds = zip((Kind.ADAM_8BIT, Kind.QUANTIZATION), calls, all_elements, strict=True)
    return {("other", kind): (max(0.0, many - call) / _ADAM_ELEMENTS, call) for kind, call, many in kinds}


def _spill_rate() -> float:
    """Bytes per second to a region of the kind that offload uses again and again, and back."""
    values = _ones(_SPILLED_BYTES // 4)
    spilled = Spill(Tier.DISK).store(values)

    def there_and_back() -> None:
        spilled.copy_(values)
        values.copy_(spilled)

    return 2 * _SPILLED_BYTES / _seconds(there_and_back)
