"""CUDA's autocast lists for CPU tensors.

Under `torch.autocast("cpu")` operators are cast by the CPU's lists, which differ: layer norm, softmax,
pow, exp and sums run in fp32 on CUDA and not on the CPU, some losses the other way round. Products of
matrices and convolutions stand in both; they stay with torch's own kernels, which keep the casts of
weights as CUDA does. The other operators of either list get a kernel at the same dispatch key here.

Source: include/ATen/autocast_mode.h of the 2.13 wheel (the macros name the lists; a test compares them
where the header is installed), aten/src/ATen/autocast_mode.cpp.

Known limitations: casts of recurrent layers as cuDNN does them (autocast of `_cudnn_rnn`) are not made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from memlab.runtime.dispatch import TORCH
from memlab.runtime.tree import tensors_in
from memlab.trace.cuda_kernels import Kernel, Registration, exists, operators_with, overload
from memlab.trace.cuda_thread import exchange

_KEY = "AutocastCPU"
_DEVICE = "cpu"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
    """
) - (frozenset() if TORCH >= (2, 12) else _names("rms_norm"))
FP32_RESULT = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
_NORMS: Mapping[str, str] = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

# of the CPU's own list: these cast down, as what they consist of does on CUDA
_CPU_LOWER = _names(
    """
    conv1d.padding conv2d.padding conv3d.padding mkldnn_rnn_layer _native_multi_head_attention _addmm_activation
    """
)
_CPU_WIDEST = frozenset(("stack", "cat", "index_copy"))


# --- casts ----------------------------------------------------------------------------------------


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == _DEVICE
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _each(cast: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_each(cast, part) for part in value)
    return cast(value) if _eligible(value) else value


def _to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class _CastCache(threading.local):
    """Casts of weights, kept until autocast ends, like torch's own (which it does not show)."""

    def __init__(self) -> None:
        self.casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def lowered(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(_DEVICE)
        if not self._may_keep(tensor):
            return _to(dtype, tensor)
        kept = self.casts.get(id(tensor))
        if kept is None or kept[1].dtype is not dtype:
            kept = self.casts[id(tensor)] = (tensor, _to(dtype, tensor))
        return kept[1]

    def _may_keep(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.is_leaf
            and tensor.requires_grad
            and tensor.dtype is torch.float32
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )


_cache = _CastCache()


def exchange_cache(undo: ExitStack) -> None:
    """Empty the cache of casts whenever torch empties its own."""

    def clearing(original: Callable[[], None]) -> Callable[[], None]:
        def clear_autocast_cache() -> None:
            _cache.casts.clear()
            original()

        return clear_autocast_cache

    undo.callback(_cache.casts.clear)
    exchange(torch, "clear_autocast_cache", clearing, undo)


# --- the kernels ----------------------------------------------------------------------------------


def _on_cast(
    cast: Callable[[torch.Tensor], torch.Tensor], operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    given, named = _each(cast, args), {key: _each(cast, value) for key, value in kwargs.items()}
    with torch._C._DisableAutocast():
        return operator(*given, **named)


def _lower(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _on_cast(_cache.lowered, operator, args, kwargs)


def _fp32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _on_cast(partial(_to, torch.float32), operator, args, kwargs)


def _fp32_result(operator: Any, *args: Any, **kwargs: Any) -> Any:
    if _eligible(args[0]):
        args, kwargs = _with_dtype(operator, args, kwargs)
    with torch._C._DisableAutocast():
        return operator(*args, **kwargs)


def _with_dtype(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Ask for an fp32 result, unless the caller asked for a type."""
    at = next(i for i, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
    if at < len(args):
        return (*args[:at], args[at] or torch.float32, *args[at + 1 :]), dict(kwargs)
    return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}


def _fp32_norm(operator: Any, *args: Any, **kwargs: Any) -> Any:
    name = operator.name().removeprefix("aten::")
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    if name == "norm.Scalar" and len(args) < 2:
        args = (*args, 2)
    if name == "norm.ScalarOpt_dim" and len(args) < 4:
        args = (*args, False)
    with torch._C._DisableAutocast():
        return overload(_NORMS[name])(*args, **kwargs, dtype=dtype)


def _widest(operator: Any, *args: Any, **kwargs: Any) -> Any:
    single = any(t.dtype is torch.float32 for t in tensors_in([*args, *kwargs.values()]) if _eligible(t))
    dtype = torch.float32 if single else torch.get_autocast_dtype(_DEVICE)
    return _on_cast(partial(_to, dtype), operator, args, kwargs)


def _banned(_: Any, *__: Any, **___: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on CUDA: "
        "use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )


def _as_it_is(_: Any, *__: Any, **___: Any) -> Any:
    return NotImplemented


def _policies() -> dict[str, Kernel]:
    lists = (
        (LOWER_PRECISION, _lower),
        (FP32, _fp32),
        (FP32_RESULT, _fp32_result),
        (WIDEST, _widest),
        (_NORMS, _fp32_norm),
    )
    policies = {name: kernel for names, kernel in lists for name in names}
    return {**policies, "binary_cross_entropy": _banned}


def registrations() -> tuple[Registration, ...]:
    """Kernels for every operator that CUDA's lists treat otherwise than the CPU's."""
    on_cpu, on_cuda = operators_with(_KEY), _policies()
    left_to_torch = on_cpu & (LOWER_PRECISION | _CPU_LOWER)
    wanted = sorted((on_cpu | on_cuda.keys()) - left_to_torch)
    return tuple(
        Registration(name, _KEY, on_cuda.get(name, _as_it_is), _elsewhere(name) if name in on_cpu else None)
        for name in wanted
        if exists(name)
    )


def _elsewhere(name: str) -> Kernel:
    """Return what the CPU's list says, for threads that trace nothing while its kernel is covered."""
    return _widest if name in _CPU_WIDEST else _fp32
