"""The attention kernel CUDA takes: cuDNN's, flash, memory-efficient, or plain products of matrices.

`scaled_dot_product_attention` asks its backends in an order of preference whether they can serve a
call. What each asks for is a list of conditions, here as there.

Sources (pytorch): aten/src/ATen/native/transformers/cuda/sdp_utils.cpp `select_sdp_backend`,
`priority_order`, `can_use_*_attention`; transformers/sdp_utils_cpp.h (as in the 2.13 wheel);
transformers/attention.cpp `scaled_dot_product_attention`, `_scaled_dot_product_attention_math`.
Differences between versions: cuDNN is not asked for dropout that is no multiple of 1/16 since
https://github.com/pytorch/pytorch/pull/174245 (2.12); 2.11 asks it for more channels than 128 where they train, as seen on an
H100. Builds are taken to be the wheels of PyPI, whose cuDNN
is newer than 9.15.1, below which Hopper would not prefer it.

Known limitations: nested tensors are handed on to the CPU's way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from memlab.hardware.gpus import Gpu
from memlab.runtime.dispatch import HALF, TORCH
from memlab.trace.cuda_kernels import Registration, is_watched
from memlab.trace.cuda_thread import current_gpu

_aten = torch.ops.aten
# at::Context::sdp_priority_order, include/ATen/Context.h
_DEFAULT_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Attention:
    """One call of `scaled_dot_product_attention`."""

    query: torch.Tensor  # [batch, heads, queries, channels]
    key: torch.Tensor  # [batch, key heads, keys, channels]
    value: torch.Tensor  # [batch, key heads, keys, value channels]
    mask: torch.Tensor | None = None  # boolean or added to the scores
    dropout: float = 0.0  # probability
    is_causal: bool = False  # whether a query sees no later key
    scale: float | None = None  # factor on the scores; None for 1/√channels
    grouped: bool = False  # whether several query heads may share a key head

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    @property
    def scale_factor(self) -> float:
        return 1 / math.sqrt(self.query.size(-1)) if self.scale is None else self.scale

    @property
    def has_four_dimensions(self) -> bool:
        return all(tensor.dim() == 4 for tensor in self.tensors)

    @property
    def is_empty(self) -> bool:
        return self.query.size(-2) == 0 or self.key.size(-2) == 0

    @property
    def has_one_head_count(self) -> bool:
        return len({tensor.size(1) for tensor in self.tensors}) == 1

    @property
    def heads_divide(self) -> bool:
        if not self.grouped:
            return self.has_one_head_count
        return all(self.query.size(1) % heads.size(1) == 0 for heads in (self.key, self.value))

    @property
    def has_adjacent_channels(self) -> bool:
        return all(tensor.stride(-1) == 1 for tensor in self.tensors) and self._has_adjacent_mask

    @property
    def has_single_channel(self) -> bool:
        return self.query.size(-1) == 1 and self._has_adjacent_mask

    @property
    def _has_adjacent_mask(self) -> bool:
        return self.mask is None or self.mask.stride(-1) == 1

    def is_of(self, allowed: tuple[torch.dtype, ...]) -> bool:
        return self.query.dtype in allowed and len({tensor.dtype for tensor in self.tensors}) == 1


# --- choosing -------------------------------------------------------------------------------------


def attention_backend(attention: Attention, gpu: Gpu) -> SDPBackend:
    """The backend that serves a call on a GPU, under the user's `torch.backends.cuda` switches.

    Raises:
        RuntimeError: no backend that is switched on can, as on CUDA.

    Example:
        >>> from memlab.hardware.gpus import gpu
        >>> rows = torch.empty(1, 4, 16, 64, dtype=torch.bfloat16, device="meta")
        >>> attention_backend(Attention(rows, rows, rows), gpu("A100 80GB")).name
        'FLASH_ATTENTION'
    """
    for backend in _order(gpu):
        if backend in _SERVES and _SERVES[backend](attention, gpu):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(gpu: Gpu) -> list[SDPBackend]:
    """The user's order when there is one, else what the GPU prefers."""
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    if order[: len(_DEFAULT_ORDER)] == _DEFAULT_ORDER and _prefers_cudnn(gpu):
        order.remove(SDPBackend.CUDNN_ATTENTION)
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return order


def _prefers_cudnn(gpu: Gpu) -> bool:
    major, minor = gpu.compute_capability
    deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") == "1"
    return major in (9, 10) and minor in (0, 3) and not deprioritized


def _serves_cudnn(attention: Attention, gpu: Gpu) -> bool:
    """`can_use_cudnn_attention`."""
    may_vary = not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled()
    return (
        torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and attention.has_four_dimensions
        and may_vary
        and attention.is_of(_half_types(gpu))
        and _has_plain_mask(attention)
        and (8, 0) <= gpu.compute_capability <= (12, 1)
        and (TORCH < (2, 12) or attention.dropout * 16 % 1 == 0)
        and not attention.is_empty
        and (attention.has_single_channel or attention.has_adjacent_channels)
        and len({tensor.size(0) for tensor in attention.tensors}) == 1
        and attention.heads_divide
        and _are_channels_of_cudnn(attention, gpu)
        and _are_lengths_of_cudnn(attention, gpu)
    )


def _serves_flash(attention: Attention, gpu: Gpu) -> bool:
    """`can_use_flash_attention`."""
    channels = {tensor.size(-1) for tensor in attention.tensors}
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and attention.has_four_dimensions
        and attention.mask is None
        and len(channels) == 1
        and max(channels) <= 256
        and (8, 0) <= gpu.compute_capability <= (12, 1)
        and _flash_backward_fits(attention, gpu)
        and (not attention.is_causal or attention.query.size(-2) == attention.key.size(-2))
        and attention.is_of(_half_types(gpu))
        and len({tensor.size(0) for tensor in attention.tensors}) == 1
        and attention.heads_divide
        and (not attention.grouped or attention.key.size(1) == attention.value.size(1))
        and not attention.is_empty
        and (attention.has_single_channel or attention.has_adjacent_channels)
    )


def _serves_efficient(attention: Attention, gpu: Gpu) -> bool:
    """`can_use_mem_efficient_attention`."""
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and (5, 0) <= gpu.compute_capability <= (12, 1)
        and attention.has_four_dimensions
        and _has_aligned_channels(attention, gpu)
        and not attention.is_empty
        and attention.has_adjacent_channels
        and len({tensor.size(0) for tensor in attention.tensors}) == 1
        and (attention.has_one_head_count if TORCH < (2, 14) else attention.heads_divide)
        and attention.is_of((*_half_types(gpu), torch.float32))
    )


_SERVES: Mapping[SDPBackend, Callable[[Attention, Gpu], bool]] = {
    SDPBackend.CUDNN_ATTENTION: _serves_cudnn,
    SDPBackend.FLASH_ATTENTION: _serves_flash,
    SDPBackend.EFFICIENT_ATTENTION: _serves_efficient,
    SDPBackend.MATH: lambda _attention, _gpu: torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
}


def _half_types(gpu: Gpu) -> tuple[torch.dtype, ...]:
    return HALF if gpu.compute_capability >= (8, 0) else (torch.float16,)


def _flash_backward_fits(attention: Attention, gpu: Gpu) -> bool:
    """Above 192 channels the backward pass needs more shared memory than these GPUs have."""
    small = (8, 6) <= gpu.compute_capability <= (8, 9) or (12, 0) <= gpu.compute_capability <= (12, 1)
    channels = attention.query.size(-1)
    return not (attention.trains and small) or channels <= 192 or (attention.dropout == 0 and channels > 224)


def _has_aligned_channels(attention: Attention, gpu: Gpu) -> bool:
    """`minimum_gemm_alignment`: of what tensor cores and vector loads want."""
    is_half, major = attention.query.dtype in HALF, gpu.compute_capability[0]
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major == 7 and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    query, key, value = (tensor.size(-1) for tensor in attention.tensors)
    return query == key and query > 0 and value > 0 and query % alignment == 0 and value % alignment == 0


def _has_plain_mask(attention: Attention) -> bool:
    mask = attention.mask
    if mask is None:
        return True
    whole = (*attention.query.shape[:3], attention.key.size(2))
    fits = all(size in (1, want) for size, want in zip(reversed(mask.shape), reversed(whole), strict=False))
    return not mask.requires_grad and mask.dim() in (2, 4) and fits


def _are_channels_of_cudnn(attention: Attention, gpu: Gpu) -> bool:
    query, value = attention.query.size(-1), attention.value.size(-1)
    if query % 8 or value % 8:
        return False
    if max(query, value) <= 128 or (gpu.compute_capability[0] == 10 and (query, value) == (192, 128)):
        return True
    is_wide = gpu.compute_capability == (9, 0) or (gpu.compute_capability[0] == 10 and TORCH >= (2, 14))
    return is_wide and max(query, value) <= 256 and (not attention.trains or query == value == 256 or TORCH < (2, 12))


def _are_lengths_of_cudnn(attention: Attention, gpu: Gpu) -> bool:
    single = attention.query.size(2) == 1
    if single and gpu.compute_capability[0] == 10 and TORCH >= (2, 14):
        return False
    return attention.key.size(2) != 1 and (attention.dropout == 0 or not single)


# --- running --------------------------------------------------------------------------------------


def registrations() -> tuple[Registration, ...]:
    """The kernel for attention."""
    return (Registration("scaled_dot_product_attention", "AutogradCPU", _attend),)


def _attend(
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    gpu = current_gpu()
    if gpu is None or not isinstance(query, FakeTensor) or query.is_nested:
        return NotImplemented
    attention = Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _RUN[attention_backend(attention, gpu)](attention)


def _cudnn(attention: Attention) -> torch.Tensor:
    mask = _additive(attention.mask, attention.query.dtype, -65504.0)
    out: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(
        *attention.tensors, mask, attention.trains, attention.dropout, attention.is_causal, False, scale=attention.scale
    )[0]
    return out


def _flash(attention: Attention) -> torch.Tensor:
    channels = attention.query.size(-1)
    missing = -channels % 8
    query, key, value = (F.pad(tensor, (0, missing)) if missing else tensor for tensor in attention.tensors)
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, attention.dropout, attention.is_causal, False, scale=attention.scale_factor
    )[0]
    return out[..., :channels] if missing else out


def _efficient(attention: Attention) -> torch.Tensor:
    mask = _additive(attention.mask, attention.query.dtype, -math.inf)
    if mask is not None:
        mask = _aligned(mask).expand(*attention.query.shape[:3], attention.key.size(2))
    out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        *attention.tensors, mask, attention.trains, attention.dropout, attention.is_causal, scale=attention.scale
    )[0]
    return out


def _plain(attention: Attention) -> torch.Tensor:
    """Products of matrices; the probabilities that torch returns beside the output live longer than what they were made from."""
    out, _probabilities = _products(attention)
    return out


def _products(attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and probabilities, with half precision carried out in fp32."""
    wide = attention.query.dtype in HALF and not torch._C._get_math_sdp_allow_fp16_bf16_reduction()
    query, key, value = (tensor.float() if wide else tensor for tensor in attention.tensors)
    root = math.sqrt(abs(attention.scale_factor))
    mask = attention.mask
    scaled = query * (-root if attention.scale_factor < 0 else root)  # beside the query, which lives to the end
    if attention.is_causal:
        mask = query.new_ones((query.size(-2), key.size(-2)), dtype=torch.bool).tril()
    mask = _additive(mask, query.dtype, -math.inf)
    if attention.grouped:
        key, value = (_repeated(tensor, query.size(-3)) for tensor in (key, value))
    scores = torch.matmul(scaled, key.transpose(-2, -1) * root)
    if mask is not None:
        scores = scores.add(mask) if is_watched() else scores.add_(mask)
    scores = _aten._safe_softmax(scores, -1)
    if attention.dropout > 0:
        scores = torch.dropout(scores, attention.dropout, True)
    probabilities = scores.to(attention.query.dtype)  # made before the output
    out = torch.matmul(scores, value)
    narrow = out.to(attention.query.dtype)
    # in the order in which C++ lets go of them
    del out, scores, mask, scaled, value, key, query
    return narrow, probabilities


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor if tensor.size(-3) == heads else tensor.repeat_interleave(heads // tensor.size(-3), -3)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype, lowest: float) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(lowest, dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A mask whose rows begin at multiples of eight elements: padded, and cut again."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.size(-1)
    return F.pad(mask, (0, 8 - keys % 8))[..., :keys]


_RUN: Mapping[SDPBackend, Callable[[Attention], torch.Tensor]] = {
    SDPBackend.CUDNN_ATTENTION: _cudnn,
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.MATH: _plain,
}
