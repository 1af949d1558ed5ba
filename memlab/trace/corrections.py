"""Results of operators whose fakes are not like the real ones, put right.

What is wrong, and how it was found: `tests/trace/test_corrections.py` compares each with the real operator.

- `mse_loss`, `smooth_l1_loss`, `binary_cross_entropy` and `soft_margin_loss` with a reduction write their elements into the result first, whose storage keeps that size:
  aten/src/ATen/native/BinaryOps.cpp and Loss.cpp (`mse_loss_out`, `smooth_l1_loss_out`).
- `native_group_norm` of a half-precision input with fp32 weights keeps its statistics in fp32 and gives a gradient in the dtype of
  the input (aten/src/ATen/native/group_norm.cpp); the fake takes the dtype of the input for the one and fp32 for the other.
- `mkldnn_rnn_layer` keeps a workspace for backward, which the fake has no bytes for. Its size is oneDNN's secret, so a layer of
  zeros is run once for each shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
_NO_REDUCTION = 0
_HALF = (torch.float16, torch.bfloat16)

_Correction = Callable[[FakeTensorMode, tuple[Any, ...], Any], Any]


def corrected(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
    """The result of an operator on fakes as the real operator would give it.

    Args:
        mode: of the fakes.
        func: the operator.
        args: its arguments.
        kwargs: likewise.
        out: what the fake mode returned.
    """
    correction = _CORRECTIONS.get(func)
    return out if correction is None else correction(mode, (*args, *kwargs.values()), out)


def _with_storage_of_elements(mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    reduction = next((value for value in args[2:4] if type(value) is int), None)
    if reduction == _NO_REDUCTION or not isinstance(out, FakeTensor):
        return out
    shape = torch.broadcast_tensors(args[0], args[1])[0].shape  # type: ignore[no-untyped-call]
    with mode:
        return torch.empty(shape, dtype=out.dtype, device=out.device).as_strided((), ())


def _is_mixed(values: torch.Tensor, weight: torch.Tensor | None) -> bool:
    return values.dtype in _HALF and weight is not None and weight.dtype is torch.float32


def _group_norm(mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    if not _is_mixed(args[0], args[1]):
        return out
    with mode:
        normalized = torch.empty_like(out[0], dtype=args[0].dtype)
        statistics = [torch.empty_like(part, dtype=torch.float32) for part in out[1:]]
    return (normalized, *statistics)


def _group_norm_backward(mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    values = args[1]
    if out[0] is None or out[0].dtype is values.dtype:
        return out
    with mode:
        return (torch.empty_like(values), *out[1:])


def _recurrent_layer(mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    *outputs, workspace = out
    size_bytes = _workspace_bytes(*(_described(value) for value in args))
    if workspace is None or not size_bytes:
        return out
    with mode:
        return (*outputs, torch.empty(size_bytes, dtype=torch.uint8, device=workspace.device))


def _described(value: Any) -> Any:
    """A tensor as its shape and dtype; anything else as it is, in a form that can be looked up."""
    if isinstance(value, torch.Tensor):
        return _Described(tuple(value.shape), value.dtype)
    return tuple(value) if isinstance(value, list) else value


class _Described(tuple[Any, ...]):
    """Shape and dtype of a tensor."""

    __slots__ = ()

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Self:
        return super().__new__(cls, (shape, dtype))


@functools.lru_cache(maxsize=64)
def _workspace_bytes(*described: Any) -> int:
    """Bytes that a recurrent layer keeps for its backward pass, from running it on zeros."""
    args = [torch.zeros(value[0], dtype=value[1]) if isinstance(value, _Described) else value for value in described]
    args = [list(value) if type(value) is tuple else value for value in args]
    workspace: torch.Tensor | None = _aten.mkldnn_rnn_layer.default(*args)[-1]
    return 0 if workspace is None else workspace.untyped_storage().nbytes()


_CORRECTIONS: dict[Any, _Correction] = {
    _aten.mse_loss.default: _with_storage_of_elements,
    _aten.binary_cross_entropy.default: _with_storage_of_elements,
    _aten.soft_margin_loss.default: _with_storage_of_elements,
    _aten.smooth_l1_loss.default: _with_storage_of_elements,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.mkldnn_rnn_layer.default: _recurrent_layer,
}
