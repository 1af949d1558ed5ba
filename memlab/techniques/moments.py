"""fp32 numbers in fewer bits: a bit-exact split in two halves, and stochastic rounding.

bf16 is the upper half of fp32. Kept as two tensors, the upper half serves as the bf16 parameter of
forward and backward, and the lower half completes it to the fp32 master for the update, so the
master costs two more bytes per element and not four.
"""

from __future__ import annotations

import sys

import torch

_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_KEEP_HIGH_HALF = -(2**16)
_CHUNK_ELEMENTS = 2**20  # bounds the temporaries of rounding to some 20 MiB
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 into its upper and lower halves, without temporaries.

    Args:
        master: fp32 tensor of any shape.

    Returns:
        The upper half as bf16 (the value truncated towards zero) and the lower half as int16. A NaN
        whose payload is all in its lower half reads as infinity in the bf16 tensor alone;
        `join_master` gives it back bit for bit.

    Example:
        >>> high, low = split_master(torch.tensor([1.0, -0.1]))
        >>> join_master(high, low)
        tensor([ 1.0000, -0.1000])
    """
    halves = _halves(master.detach().contiguous())
    high = torch.empty_like(master, dtype=torch.bfloat16, requires_grad=False)
    low = torch.empty_like(master, dtype=torch.int16, requires_grad=False)
    high.view(torch.int16).copy_(halves[:, _HIGH].view(master.shape))
    low.copy_(halves[:, _LOW].view(master.shape))
    return high, low


def join_master(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Put the two halves of `split_master` together again, bit for bit."""
    master = torch.empty(high.shape, dtype=torch.float32, device=high.device)
    halves = _halves(master)
    halves[:, _HIGH].view(high.shape).copy_(high.detach().view(torch.int16))
    halves[:, _LOW].view(low.shape).copy_(low)
    return master if high.is_contiguous() else torch.empty_like(high, dtype=torch.float32).copy_(master)


def round_stochastically(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round fp32 to bf16, up or down with a chance that makes the mean come out right.

    Values that bf16 represents stay as they are, infinities and NaN too, and no finite value becomes
    infinite.

    Args:
        values: fp32 tensor of any shape.
        generator: source of the random bits, on the same device.
    """
    rounded = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    flat, out = values.detach().contiguous().view(-1), rounded.view(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        _round_chunk(flat[chunk], out[chunk], generator)
    return rounded if values.is_contiguous() else torch.empty_like(values, dtype=torch.bfloat16).copy_(rounded)


def _round_chunk(values: torch.Tensor, out: torch.Tensor, generator: torch.Generator | None) -> None:
    # a random number below one bf16 step, added to the bits, carries into the upper half as often as it should
    bits = torch.empty_like(values, dtype=torch.int32).random_(0, 2**16, generator=generator)
    bits.add_(values.view(torch.int32)).bitwise_and_(_KEEP_HIGH_HALF)
    rounded = bits.view(torch.float32).clamp_(-_LARGEST_BF16, _LARGEST_BF16)
    out.copy_(torch.where(torch.isfinite(values), rounded, values))


def _halves(master: torch.Tensor) -> torch.Tensor:
    return master.view(-1).view(torch.int16).view(-1, 2)  # [elements, 2]
