"""fp32 numbers in fewer bits: a bit-exact split in two parts, and stochastic rounding.

The nearest bf16 of an fp32 number is its upper half, rounded. Kept as two tensors, it serves as the
parameter of forward and backward, and the lower half completes it to the fp32 master for the
update, so the master costs two more bytes per element and not four.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from memlab.runtime.rounds import rounds

_LOW = 0 if sys.byteorder == "little" else 1
_HALF_STEP = 2**15
_KEEP_HIGH_HALF = -(2**16)
_MAGNITUDE, _MAGNITUDE_OF_UPPER = 2**31 - 1, 2**15 - 1  # all bits but the sign
_CHUNK_ELEMENTS = 2**20  # bounds the temporaries of rounding to some 20 MiB
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def split_master(
    master: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 into the nearest bf16 and the 16 bits that complete it.

    Args:
        master: fp32 tensor of any shape.
        into: where to put both; new tensors by default.

    Returns:
        The nearest bf16 (of two equally near, the one away from zero), and the lower half of the bits as
        int16. `join_master` gives every value back bit for bit; of a NaN, one bit of its payload may be another.

    Example:
        >>> high, low = split_master(torch.tensor([1.0, -0.1]))
        >>> join_master(high, low)
        tensor([ 1.0000, -0.1000])
    """
    bits = master.detach().contiguous().view(-1).view(torch.int32)
    upper = torch.empty(bits.shape, dtype=torch.int16, device=master.device)
    for chunk in _chunks(bits):
        # adding half a step carries into the upper half where the lower one is at least a half; in the last NaN it would
        # carry into the sign, and leave a zero
        is_last = (bits[chunk] & _MAGNITUDE) >= _MAGNITUDE - _HALF_STEP + 1
        upper[chunk] = torch.where(is_last, bits[chunk], bits[chunk] + _HALF_STEP) >> 16
    high, low = into or (
        torch.empty_like(master, dtype=torch.bfloat16, requires_grad=False),
        torch.empty_like(master, dtype=torch.int16, requires_grad=False),
    )
    high.view(torch.int16).copy_(upper.view(master.shape))
    low.copy_(bits.view(torch.int16).view(-1, 2)[:, _LOW].view(master.shape))
    return high, low


def join_master(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Put the two parts of `split_master` together again, bit for bit.

    Where the upper part has been set to zero since (a mask of pruned weights), there is no carry to take back: without that
    the result would be NaN.
    """
    upper, lower = high.detach().contiguous().view(-1).view(torch.int16), low.contiguous().view(-1)
    bits = torch.empty_like(upper, dtype=torch.int32)
    for chunk in _chunks(bits):
        joined = bits[chunk].copy_(upper[chunk])
        joined <<= 16
        # read as a signed number the lower half takes back the carry of rounding
        joined += lower[chunk]
        joined -= lower[chunk].clamp_max(0) * ((upper[chunk] & _MAGNITUDE_OF_UPPER) == 0)
    master = bits.view(torch.float32).view(high.shape)
    return master if high.is_contiguous() else torch.empty_like(high, dtype=torch.float32).copy_(master)


def round_stochastically(
    values: torch.Tensor, generator: torch.Generator | None = None, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Round fp32 to bf16, up or down with a chance that makes the mean come out right.

    Values that bf16 represents stay as they are, infinities and NaN too, and no finite value becomes
    infinite.

    Args:
        values: fp32 tensor of any shape.
        generator: source of the random bits, on the same device.
        into: where to put the numbers, laid out as the values; a new tensor by default.
    """
    if into is not None and into.is_contiguous() and values.is_contiguous():
        rounded = into
    else:
        rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    flat, out = values.detach().contiguous().view(-1), rounded.view(-1)
    for chunk in _chunks(flat):
        _round_chunk(flat[chunk], out[chunk], generator)
    return rounded if values.is_contiguous() else torch.empty_like(values, dtype=torch.bfloat16).copy_(rounded)


def _chunks(flat: torch.Tensor) -> Iterator[slice]:
    return rounds([slice(start, start + _CHUNK_ELEMENTS) for start in range(0, flat.numel(), _CHUNK_ELEMENTS)])


def _round_chunk(values: torch.Tensor, out: torch.Tensor, generator: torch.Generator | None) -> None:
    # a random number below one bf16 step, added to the bits, carries into the upper half as often as it should
    bits = torch.empty_like(values, dtype=torch.int32).random_(0, 2**16, generator=generator)
    bits.add_(values.view(torch.int32)).bitwise_and_(_KEEP_HIGH_HALF)
    rounded = bits.view(torch.float32).clamp_(-_LARGEST_BF16, _LARGEST_BF16)
    out.copy_(torch.where(torch.isfinite(values), rounded, values))
