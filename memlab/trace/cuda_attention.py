"""The attention kernel CUDA takes: cuDNN's, flash, memory-efficient, or plain products of matrices.

`scaled_dot_product_attention` asks its backends in an order of preference whether they can serve a
call. What each asks for is a list of conditions, here as there.

Sources (pytorch): aten/src/ATen/native/transformers/cuda/sdp_utils.cpp `select_sdp_backend`,
`priority_order`, `can_use_*_attention`; transformers/sdp_utils_cpp.h (as in the 2.13 wheel);
transformers/attention.cpp `scaled_dot_product_attention`, `_scaled_dot_product_attention_math`.
Differences between versions: cuDNN is not asked for dropout that is no multiple of 1/16 since
https://github.com/pytorch/pytorch/pull/174245 (2.12). Builds are taken to be the wheels of PyPI, whose cuDNN
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
from memlab.trace.cuda_kernels import Registration
from memlab.trace.cuda_thread import current_gpu

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
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


Condition = Callable[[Attention, Gpu], bool]


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
        allows, conditions = _BACKENDS.get(backend, (_never, ()))
        if allows() and all(condition(attention, gpu) for condition in conditions):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _never() -> bool:
    return False


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


def _on(first: tuple[int, int], last: tuple[int, int]) -> Condition:
    return lambda _, gpu: first <= gpu.compute_capability <= last


def _four_dimensions(attention: Attention, _: Gpu) -> bool:
    return all(tensor.dim() == 4 for tensor in attention.tensors)


def _one_type(attention: Attention, allowed: tuple[torch.dtype, ...]) -> bool:
    return attention.query.dtype in allowed and len({tensor.dtype for tensor in attention.tensors}) == 1


def _half(attention: Attention, gpu: Gpu) -> bool:
    return _one_type(attention, _HALF if gpu.compute_capability >= (8, 0) else (torch.float16,))


def _half_or_single(attention: Attention, gpu: Gpu) -> bool:
    half = _HALF if gpu.compute_capability >= (8, 0) else (torch.float16,)
    return _one_type(attention, (*half, torch.float32))


def _one_batch_size(attention: Attention, _: Gpu) -> bool:
    return len({tensor.size(0) for tensor in attention.tensors}) == 1


def _one_head_count(attention: Attention, _: Gpu) -> bool:
    return len({tensor.size(1) for tensor in attention.tensors}) == 1


def _heads_divide(attention: Attention, gpu: Gpu) -> bool:
    if not attention.grouped:
        return _one_head_count(attention, gpu)
    return all(attention.query.size(1) % heads.size(1) == 0 for heads in (attention.key, attention.value))


def _keys_have_values(attention: Attention, _: Gpu) -> bool:
    return not attention.grouped or attention.key.size(1) == attention.value.size(1)


def _not_empty(attention: Attention, _: Gpu) -> bool:
    return attention.query.size(-2) != 0 and attention.key.size(-2) != 0


def _channels_adjacent(attention: Attention, _: Gpu) -> bool:
    mask = attention.mask
    return all(tensor.stride(-1) == 1 for tensor in attention.tensors) and (mask is None or mask.stride(-1) == 1)


def _channels_adjacent_or_single(attention: Attention, gpu: Gpu) -> bool:
    mask = attention.mask
    single = attention.query.size(-1) == 1 and (mask is None or mask.stride(-1) == 1)
    return single or _channels_adjacent(attention, gpu)


def _no_mask(attention: Attention, _: Gpu) -> bool:
    return attention.mask is None


def _equal_channels_to_256(attention: Attention, _: Gpu) -> bool:
    channels = {tensor.size(-1) for tensor in attention.tensors}
    return len(channels) == 1 and max(channels) <= 256


def _backward_fits_channels(attention: Attention, gpu: Gpu) -> bool:
    """Above 192 channels the backward pass needs more shared memory than these GPUs have."""
    small = (8, 6) <= gpu.compute_capability <= (8, 9) or (12, 0) <= gpu.compute_capability <= (12, 1)
    channels = attention.query.size(-1)
    return not (attention.trains and small) or channels <= 192 or (attention.dropout == 0 and channels > 224)


def _causal_is_square(attention: Attention, _: Gpu) -> bool:
    return not attention.is_causal or attention.query.size(-2) == attention.key.size(-2)


def _aligned_channels(attention: Attention, gpu: Gpu) -> bool:
    """`minimum_gemm_alignment`: of what tensor cores and vector loads want."""
    is_half, major = attention.query.dtype in _HALF, gpu.compute_capability[0]
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major == 7 and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    query, key, value = (tensor.size(-1) for tensor in attention.tensors)
    return query == key and query > 0 and value > 0 and query % alignment == 0 and value % alignment == 0


def _mask_without_gradient(attention: Attention, _: Gpu) -> bool:
    mask = attention.mask
    if mask is None:
        return True
    whole = (*attention.query.shape[:3], attention.key.size(2))
    fits = all(size in (1, want) for size, want in zip(reversed(mask.shape), reversed(whole), strict=False))
    return not mask.requires_grad and mask.dim() in (2, 4) and fits


def _cudnn_channels(attention: Attention, gpu: Gpu) -> bool:
    query, value = attention.query.size(-1), attention.value.size(-1)
    if query % 8 or value % 8:
        return False
    if max(query, value) <= 128 or (gpu.compute_capability[0] == 10 and (query, value) == (192, 128)):
        return True
    is_wide = gpu.compute_capability == (9, 0) or (gpu.compute_capability[0] == 10 and _VERSION >= (2, 14))
    return is_wide and max(query, value) <= 256 and (not attention.trains or query == value == 256)


def _cudnn_lengths(attention: Attention, gpu: Gpu) -> bool:
    single = attention.query.size(2) == 1
    if single and gpu.compute_capability[0] == 10 and _VERSION >= (2, 14):
        return False
    return attention.key.size(2) != 1 and (attention.dropout == 0 or not single)


def _cudnn_dropout(attention: Attention, _: Gpu) -> bool:
    return _VERSION < (2, 12) or attention.dropout * 16 % 1 == 0


def _may_vary(_: Attention, __: Gpu) -> bool:
    return not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled()


_BACKENDS: Mapping[SDPBackend, tuple[Callable[[], bool], tuple[Condition, ...]]] = {
    SDPBackend.CUDNN_ATTENTION: (
        torch.backends.cuda.cudnn_sdp_enabled,
        (
            _four_dimensions,
            _may_vary,
            _half,
            _mask_without_gradient,
            _on((8, 0), (12, 1)),
            _cudnn_dropout,
            _not_empty,
            _channels_adjacent_or_single,
            _one_batch_size,
            _heads_divide,
            _cudnn_channels,
            _cudnn_lengths,
        ),
    ),
    SDPBackend.FLASH_ATTENTION: (
        torch.backends.cuda.flash_sdp_enabled,
        (
            _four_dimensions,
            _no_mask,
            _equal_channels_to_256,
            _on((8, 0), (12, 1)),
            _backward_fits_channels,
            _causal_is_square,
            _half,
            _one_batch_size,
            _heads_divide,
            _keys_have_values,
            _not_empty,
            _channels_adjacent_or_single,
        ),
    ),
    SDPBackend.EFFICIENT_ATTENTION: (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        (
            _on((5, 0), (12, 1)),
            _four_dimensions,
            _aligned_channels,
            _not_empty,
            _channels_adjacent,
            _one_batch_size,
            _one_head_count if _VERSION < (2, 14) else _heads_divide,
            _half_or_single,
        ),
    ),
    SDPBackend.MATH: (torch.backends.cuda.math_sdp_enabled, ()),
}


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
    """Products of matrices, with the scores in memory and half precision carried out in fp32."""
    wide = attention.query.dtype in _HALF and not torch._C._get_math_sdp_allow_fp16_bf16_reduction()
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
        scores.add_(mask)
    scores = _aten._safe_softmax(scores, -1)
    if attention.dropout > 0:
        scores = torch.dropout(scores, attention.dropout, True)
    returned = scores.to(attention.query.dtype)  # beside the output, and made before it
    out = torch.matmul(scores, value).to(attention.query.dtype)
    del returned
    return out


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor if tensor.size(-3) == heads else tensor.repeat_interleave(heads // tensor.size(-3), -3)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype, lowest: float) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(lowest, dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor, alignment: int = 8) -> torch.Tensor:
    """A mask whose rows begin at multiples of so many elements: padded, and cut again."""
    if mask.stride(-1) == 1 and all(stride % alignment == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.size(-1)
    return F.pad(mask, (0, alignment - keys % alignment))[..., :keys]


_RUN: Mapping[SDPBackend, Callable[[Attention], torch.Tensor]] = {
    SDPBackend.CUDNN_ATTENTION: _cudnn,
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.MATH: _plain,
}
