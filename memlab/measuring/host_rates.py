"""Rates of the CPU as a device: measured in this process, since no datasheet knows its kernels.

Everything is measured when it is first asked for, once for each number of threads. Random state, threads, grad mode
and autocast stay as they are, and dispatch modes (a ledger, a fake mode) do not see it.
"""

from __future__ import annotations

import functools
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
from memlab.hardware.roofline import Cost, Kind, Rates
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
_THIN = (64, 128, 128)  # a layer of a micro-batch, whose products take longer than their arithmetic
_IMAGES, _IMAGE = (2, 8), (64, 16, 16)  # a single one is computed in another way
_KERNEL = 3
# heads, queries and keys, features of a head; and into how many tiles torch's kernel cuts each
_ATTENTION = ((4, 64, 64, 2), (4, 384, 64, 6))
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
_REPEATS_OF_SMALL = 15
# features, heads and features within of a layer that is run again, and its batch
_LAYER = (64, 2, 64)
_LAYER_INPUT = (2, 16, 64)

_known: dict[int, Rates] = {}


def host_rates() -> Rates:
    """Rates of this machine's CPU with the present number of threads.

    The first call takes some 0.3 s, later ones nothing. What plans or models differ in (attention, convolutions, what is run
    again, 8-bit optimizers, whose import takes a second) is measured when it is first asked for.

    Known limitations:
        Products are measured warm, those of one linear layer together; caches and other processes make a step slower.
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
        measured=_costs(flops),
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
    result = torch.empty_like(values)
    kept_seconds = _seconds(lambda: torch.mul(values, 2.0, out=result))
    fresh_seconds = _seconds(lambda: torch.mul(values, 2.0), repeats=1)
    mapping_seconds = max(fresh_seconds - kept_seconds, 0.01 * kept_seconds)
    return 2 * _FRESH_BYTES / kept_seconds, _FRESH_BYTES / mapping_seconds


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
    for _ in range(_REPEATS_OF_SMALL):
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


def _costs(flops_per_second: Mapping[str, float]) -> Callable[[str, str], Cost | None]:
    """Return what tells the costs of a dtype and kind that is measured for itself, when it is first asked for."""

    @functools.cache
    def cost(name: str, kind: str) -> Cost | None:
        with _undisturbed():
            if kind in (Kind.ADAM_8BIT, Kind.QUANTIZATION):
                return _bitsandbytes_cost(kind) if available("bitsandbytes") else None
            if kind in (Kind.RERUN, Kind.SELECTIVE_RERUN):
                return 0.0, _seconds_of_rerun(selective=kind == Kind.SELECTIVE_RERUN)
            if name not in _PRODUCTS:
                return None
            dtype, per_flop = _PRODUCTS[name][0], 1 / flops_per_second[name]
            if kind == Kind.PRODUCT:
                flops = 2.0 * math.prod(_THIN)
                return per_flop, max(0.0, flops / _product_rate(dtype, *_THIN) - flops * per_flop)
            if kind == Kind.CONVOLUTION:
                return _convolution_cost(dtype)
            return _attention_cost(dtype, kind) if kind in (Kind.ATTENTION, Kind.ATTENTION_BACKWARD) else None

    return cost


def _convolution_cost(dtype: torch.dtype) -> Cost:
    """Cost of a convolution, from two numbers of images: of another library than products of matrices."""
    channels, height, width = _IMAGE
    kernels = _ones(channels, channels, _KERNEL, _KERNEL, dtype=dtype)
    settings: Any = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def seconds(rows: int) -> float:
        images = _ones(rows, *_IMAGE, dtype=dtype)

        def there_and_back() -> None:
            torch.ops.aten.convolution(images, kernels, None, *settings)
            torch.ops.aten.convolution_backward(images, images, kernels, None, *settings, [True, True, False])

        return _seconds(there_and_back)

    flops = _PRODUCTS_OF_LAYER * 2.0 * height * width * (channels * _KERNEL) ** 2  # of one image
    few, many = map(seconds, _IMAGES)
    of_calls = max(0.0, few * _IMAGES[1] - many * _IMAGES[0]) / (_IMAGES[1] - _IMAGES[0])
    return max(0.0, many - of_calls) / _IMAGES[1] / flops, of_calls / 2


def _attention_cost(dtype: torch.dtype, kind: str) -> Cost:
    """Cost of fused attention, from two lengths: each tile has products of its own, which large ones tell nothing of."""
    seconds, flops, tiles = [], [], []
    for heads, length, features, tiles_of_head in _ATTENTION:
        values = _ones(1, heads, length, features, dtype=dtype)
        call = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, values, values, values)
        if kind == Kind.ATTENTION_BACKWARD:
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            call = partial(backward, *(values,) * 4, *call(), 0.0, False)
        seconds.append(_seconds(call))
        # five products in backward for the two in forward
        flops.append((10.0 if kind == Kind.ATTENTION_BACKWARD else 4.0) * heads * length**2 * features)
        tiles.append(heads * tiles_of_head)
    (short, long), (few, many) = seconds, flops
    per_tile = max(0.0, (short * many - long * few) / (tiles[0] * many - tiles[1] * few))
    return max(0.0, long - tiles[1] * per_tile) / many, per_tile


def _seconds_of_rerun(*, selective: bool) -> float:
    """Seconds by which running a layer again makes a step longer, for each of its modules.

    Their state is put back, and what they save is compared. Beside that the operators that run again are a twentieth here.
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

    once, twice = (_seconds(partial(step, run), _REPEATS_OF_SMALL) for run in (block.forward, again))
    return max(0.0, twice - once) / len(part.modules)


def _bitsandbytes_cost(kind: str) -> Cost:
    """Cost of an element and of a call of the 8-bit optimizer, or of the way to its format and back."""
    functional = require("bitsandbytes").functional
    signed, unsigned = functional.create_dynamic_map(signed=True), functional.create_dynamic_map(signed=False)

    def seconds(elements: int) -> float:
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

        return _seconds(update) if kind == Kind.ADAM_8BIT else _seconds(there_and_back) / 2

    of_call, of_elements = seconds(_BLOCK_ELEMENTS), seconds(_ADAM_ELEMENTS)
    # on a busy machine a short call may take as long as a long one
    return max(0.1 * of_elements, of_elements - of_call) / _ADAM_ELEMENTS, of_call


def _spill_rate() -> float:
    """Bytes per second to a region of the kind that offload uses again and again, and back."""
    values = _ones(_SPILLED_BYTES // 4)
    spilled = Spill(Tier.DISK).store(values)

    def there_and_back() -> None:
        spilled.copy_(values)
        values.copy_(spilled)

    return 2 * _SPILLED_BYTES / _seconds(there_and_back)
