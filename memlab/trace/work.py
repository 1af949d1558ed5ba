"""Work of an operator: arithmetic, memory traffic and launches, from its arguments and its result.

Rules:

1. Bytes are those of the distinct tensors that are read plus those that are written; what is updated in place is
   both. A tensor counts the elements it has in memory, so an expanded one counts once, and a table that is looked
   up counts the rows that are taken.
2. Views and the making of memory that nothing is written to are no work.
3. The arithmetic of products is counted by torch's own formulas (`torch.utils.flop_counter`), or by the same ones
   written out here where they are missing there or refuse arguments.
4. What can be known from an operator's schema is learnt once; what depends on shapes the recorder keeps by shape.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memlab.hardware.roofline import Kind, Work
from memlab.runtime.tree import tensors_in
from memlab.techniques.offload.spill import is_spilled

_Args = tuple[Any, ...]
_Flops = Callable[[_Args], float]
_Pricer = Callable[[_Args, Mapping[str, Any], Any], Work | None]

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


@functools.cache
def may_cross(func: Any) -> bool:
    """Return whether an operator's work depends on where its tensors are kept, on the device or off it."""
    return getattr(getattr(func, "_schema", None), "name", "") in _COPIES


def work_of(func: Any, args: _Args, kwargs: Mapping[str, Any], out: Any) -> Work | None:
    """The work of an operator call, on real or fake tensors.

    Returns:
        The work, or None for views and for operators that touch no tensor's values.

    Example:
        >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
        >>> work = work_of(torch.ops.aten.mm.default, (a, b), {}, a @ b)
        >>> work.flops, work.moved_bytes, work.dtype
        (48.0, 104, 'fp32')
        >>> work_of(torch.ops.aten.t.default, (a,), {}, a.t()) is None
        True

    Known limitations:
        An operator without a formula is priced by its memory traffic alone.
    """
    rule = _rule_of(func)
    return None if rule is None else rule(args, kwargs, out)


# --- sizes ----------------------------------------------------------------------------------------


def size_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of the elements a tensor has in memory: an expanded dimension counts once.

    Example:
        >>> size_bytes_of(torch.ones(3, 1).expand(3, 5))
        12
    """
    if tensor.layout is not torch.strided:
        return tensor._nnz() * tensor.element_size() if tensor.is_sparse else 0
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in steps if stride) * tensor.element_size()


def _numel_of_largest(args: Sequence[Any]) -> int:
    return max((arg.numel() for arg in args if isinstance(arg, torch.Tensor)), default=0)


def _floating_dtype(args: Sequence[Any]) -> str:
    """The dtype of the first floating tensor among arguments, as `Work` names it."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            name = _DTYPES.get(arg.dtype)
            if name is not None:
                return name
    return "other"


# --- products -------------------------------------------------------------------------------------


def _matrices(args: _Args) -> float:
    return 2.0 * float(args[0].numel() * args[1].shape[-1])


def _added_matrices(args: _Args) -> float:
    return _matrices(args[1:])


def _grouped_matrices(args: _Args) -> float:
    """Each group's product; of three dimensions times two, each group takes some of the columns."""
    groups = args[0].shape[0] if args[0].dim() > args[1].dim() else 1
    return _matrices(args) / groups


def _linear(args: _Args) -> float:
    return 2.0 * float(args[0].numel() * args[1].shape[0])


def _vector(args: _Args) -> float:
    return 2.0 * float(args[0].numel())


def _added_vector(args: _Args) -> float:
    return _vector(args[1:])


def _attention(args: _Args) -> float:
    """Queries with keys, and weights with values; causal masks are counted in full, as torch does."""
    query, key, value = args[:3]  # [b, h, s, d]
    return 2.0 * _scores(query, key) * float(query.shape[-1] + value.shape[-1])


def _attention_backward(args: _Args) -> float:
    """Five products for the forward's two: the weights are computed again."""
    query, key, value = args[1:4]
    return 2.0 * _scores(query, key) * float(3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor) -> float:
    return float(math.prod(query.shape[:-1]) * key.shape[-2])


# queries that torch's kernel for CPUs takes at once, from which number of them on, and keys:
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/FlashAttentionKernel.cpp
_QUERIES_OF_TILE = ((768, 256), (192, 64), (0, 32))
_KEYS_OF_TILE = 512


def _tiles(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return how many tiles of the scores a CPU computes, each by products of its own."""
    queries, keys = query.shape[-2], key.shape[-2]  # of [b, h, s, d]
    at_once = next(size for since, size in _QUERIES_OF_TILE if queries >= since)
    return math.prod(query.shape[:-2]) * -(-queries // at_once) * -(-keys // _KEYS_OF_TILE)


def _rnn_layer(args: _Args) -> float:
    """The two products of a recurrent layer, with its input and with its state; weights serve every time step."""
    inputs, *weights = args[:3]
    return 2.0 * float(math.prod(inputs.shape[:-1]) * sum(weight.numel() for weight in weights))


def _rnn_layer_backward(args: _Args) -> float:
    return 2 * _rnn_layer(args)


_PRODUCTS: dict[str, _Flops] = {
    "aten::mm": _matrices,
    "aten::bmm": _matrices,
    "aten::_grouped_mm": _grouped_matrices,
    "aten::linear": _linear,
    "aten::addmm": _added_matrices,
    "aten::_addmm_activation": _added_matrices,
    "aten::baddbmm": _added_matrices,
    "aten::addbmm": _added_matrices,
    "aten::mv": _vector,
    "aten::dot": _vector,
    "aten::vdot": _vector,
    "aten::addmv": _added_vector,
    "aten::mkldnn_rnn_layer": _rnn_layer,
    "aten::mkldnn_rnn_layer_backward": _rnn_layer_backward,
}
_ATTENTION: dict[str, _Flops] = {
    f"aten::_scaled_dot_product_{kernel}{suffix}": flops
    for kernel, tail in (("flash_attention", ""), ("flash_attention", "_for_cpu"), ("efficient_attention", ""))
    for suffix, flops in ((tail, _attention), (f"{tail}_backward", _attention_backward))
} | {
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}


# --- other arithmetic -----------------------------------------------------------------------------

# a handful of instructions per element at least: exponentials, and several passes over rows
_EXPONENTIAL = (
    *("exp", "expm1", "exp2", "log", "log2", "log10", "log1p", "sigmoid", "sin", "cos", "erf", "erfc", "erfinv"),
    *("gelu", "gelu_backward", "silu", "silu_backward", "elu", "elu_backward", "softplus", "softplus_backward"),
    *("mish", "mish_backward", "log_sigmoid_forward", "logsumexp", "_softmax", "_softmax_backward_data"),
    *("_safe_softmax", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm"),
    *("native_layer_norm_backward", "native_group_norm", "native_group_norm_backward", "native_batch_norm"),
    *("native_batch_norm_backward", "_native_batch_norm_legit", "batch_norm_backward", "_fused_rms_norm"),
    *("_fused_rms_norm_backward", "max_pool2d_with_indices", "binary_cross_entropy_with_logits", "sqrt", "rsqrt"),
)
_TANH = ("tanh", "atan2", "tan", "sinh", "cosh", "asin", "acos", "atan", "digamma", "lgamma")
_RANDOM = (
    *("bernoulli", "bernoulli_", "native_dropout", "uniform_", "normal_", "rand", "rand_like", "randn", "randn_like"),
    *("random_", "randint", "randint_like", "exponential_", "randperm"),
)
_KINDS: dict[str, Kind] = {
    **{f"aten::{name}": Kind.EXPONENTIAL for name in _EXPONENTIAL},
    **{f"aten::{name}": Kind.TANH for name in _TANH},
    **{f"aten::{name}": Kind.RANDOM for name in _RANDOM},
    "bitsandbytes::optimizer_update_8bit_blockwise": Kind.ADAM_8BIT,
    "bitsandbytes::optimizer_update_32bit": Kind.ADAM_8BIT,  # of parameters that are too small to pack
    "bitsandbytes::quantize_blockwise": Kind.QUANTIZATION,
    "bitsandbytes::dequantize_blockwise": Kind.QUANTIZATION,
}
# passes over the elements for one of softmax's: the CPU's kernels look for rows that are masked as a whole, and take one
# element at a time for pooling (torch 2.13)
_PASSES = {"aten::_safe_softmax": 3, "aten::max_pool2d_with_indices": 7}
_GELU = frozenset({"aten::gelu", "aten::gelu_backward"})


# --- what a schema does not say -------------------------------------------------------------------

# memory is made or described, and nothing written
_NO_WORK = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_", "set_"),
        *("detach", "detach_", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_same_size", "record_stream"),
        *("requires_grad_", "_has_compatible_shallow_copy_type", "sym_size", "sym_stride", "sym_numel"),
    )
)
# arguments that are written to without being read
_ONLY_WRITTEN = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"),
        *("_foreach_zero_", "_foreach_copy_", "_foreach_fill_"),
    )
)
# position of an argument of which only the elements in the result, or those named by an index, are read
_LOOKED_UP = {
    **dict.fromkeys(("aten::embedding", "aten::index", "aten::index_select", "aten::gather"), 0),
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss2d_forward"), 0),
    **dict.fromkeys(("aten::nll_loss_backward", "aten::nll_loss2d_backward"), 1),
}
# a tensor that is taken off the device is looked up, given a place and seen as bytes: measured, on a CPU
_OPERATORS_OF_CROSSING = 6
_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"})
_KERNELS = {
    "aten::convolution_backward": 2,
    "aten::native_layer_norm_backward": 2,
    "aten::native_group_norm_backward": 2,
    "aten::embedding_dense_backward": 4,
    "aten::index_put_": 4,
    **{name: 3 for name in _ATTENTION if name.endswith("_backward")},
}
# tensors that one launch of a multi-tensor kernel takes, by the number of lists, and the chunks all of them are cut into:
# https://github.com/pytorch/pytorch/blob/v2.9.0/aten/src/ATen/native/cuda/MultiTensorApply.cuh#L12-L21
_TENSORS_OF_LAUNCH = (110, 110, 64, 48, 36, 30)
_CHUNKS_OF_LAUNCH = 320
CHUNK_ELEMENTS = 65536  # kChunkSize


class _Rule:
    """Cost of the calls of one operator."""

    def __init__(self, name: str, schema: Any) -> None:
        self.kind: str = _KINDS.get(name, Kind.ELEMENTWISE)
        self._name = name
        arguments = schema.arguments
        written = [_is_written(argument) for argument in arguments]
        is_only_written = name in _ONLY_WRITTEN
        skipped = _LOOKED_UP.get(name, -1)
        # how often each argument's bytes are moved: read, written, both, or neither
        self._times = [
            0 if at == skipped else 1 if argument.is_out or (is_only_written and written[at]) else 1 + written[at]
            for at, argument in enumerate(arguments)
        ]
        self._times_by_name = {argument.name: times for argument, times in zip(arguments, self._times, strict=True)}
        returns_its_arguments = schema.returns and all(_is_written(returned) for returned in schema.returns)
        self._makes_tensors = bool(schema.returns) and not returns_its_arguments
        if any(written) and not self._makes_tensors and self.kind is Kind.ELEMENTWISE:
            self.kind = Kind.IN_PLACE
        self._kernels = _KERNELS.get(name, 1)
        self._is_copy = name in _COPIES
        self._looks_up = skipped >= 0 and not name.endswith("_backward")
        self._is_random = self.kind is Kind.RANDOM
        self._is_gelu = name in _GELU
        self._passes = _PASSES.get(name, 1)

    def __call__(self, args: _Args, kwargs: Mapping[str, Any], out: Any) -> Work | None:
        moved = self._moved_bytes(args, kwargs, out)
        if not moved:  # tensors without elements: nothing is launched
            return None
        kind, flops = self.kind, 0.0
        if kind is not Kind.ELEMENTWISE and kind is not Kind.IN_PLACE:
            kind, flops = self._arithmetic(args, kwargs, out)
        if self._is_copy:
            host = _crossing_bytes(args, out)
            kernels = _OPERATORS_OF_CROSSING if host else 1
            return Work(flops, max(0, moved - host), "other", kernels, host, kind, self._made_bytes(out))
        return Work(flops, moved, "other", self._kernels, 0, kind, self._made_bytes(out))

    def _arithmetic(self, args: _Args, kwargs: Mapping[str, Any], out: Any) -> tuple[str, float]:
        if self._is_random:
            made = out[0] if isinstance(out, tuple) else out
            return self.kind, float(made.numel())
        if self._is_gelu and kwargs.get("approximate") == "tanh":
            return Kind.TANH, float(_numel_of_largest(args))
        if self.kind is Kind.ADAM_8BIT:
            return self.kind, float(args[2].numel())
        return self.kind, float(self._passes * _numel_of_largest(args))

    def _moved_bytes(self, args: _Args, kwargs: Mapping[str, Any], out: Any) -> int:
        moved = 0
        counted: list[Any] = []
        for times, arg in zip(self._times, args, strict=False):
            if isinstance(arg, torch.Tensor):
                if times > 1 or all(arg is not other for other in counted):
                    counted.append(arg)
                    moved += times * size_bytes_of(arg)
            elif times and isinstance(arg, (list, tuple)):
                moved += times * _bytes_in(arg)
        if kwargs:
            for name, arg in kwargs.items():
                if isinstance(arg, (torch.Tensor, list, tuple)):
                    moved += self._times_by_name.get(name, 0) * _bytes_in(arg)
        if self._makes_tensors:
            made = self._made_bytes(out)
            moved += 2 * made if self._looks_up else made
        return moved

    def _made_bytes(self, out: Any) -> int:
        if not self._makes_tensors:
            return 0
        return _bytes_in(out)


class _ProductRule(_Rule):
    """Cost of products: by a formula of their shapes, besides their memory traffic."""

    def __init__(self, name: str, schema: Any, kind: Kind, own: _Flops | None, formula: Any) -> None:
        super().__init__(name, schema)
        self.kind = kind
        self._own, self._formula = own, formula  # the latter is torch's

    def __call__(self, args: _Args, kwargs: Mapping[str, Any], out: Any) -> Work:
        moved, made = self._moved_bytes(args, kwargs, out), self._made_bytes(out)
        flops = float(self._formula(*args, **kwargs, out_val=out)) if self._own is None else self._own(args)
        parts = 1
        if self.kind in (Kind.ATTENTION, Kind.ATTENTION_BACKWARD):
            parts = _tiles(*args[self.kind is Kind.ATTENTION_BACKWARD :][:2])
        return Work(flops, moved, _floating_dtype(args), self._kernels, 0, self.kind, made, parts)


class _ForeachRule(_Rule):
    """Cost of an operator over lists of tensors, which takes few launches."""

    def __call__(self, args: _Args, kwargs: Mapping[str, Any], out: Any) -> Work | None:
        work = super().__call__(args, kwargs, out)
        if work is None:
            return None
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]
        return dataclasses.replace(work, kernels=_launches(lists))


def _launches(lists: Sequence[Sequence[torch.Tensor]]) -> int:
    if not lists:
        return 1
    depth = min(len(lists), len(_TENSORS_OF_LAUNCH) - 1)
    chunks = sum(-(-tensor.numel() // CHUNK_ELEMENTS) for tensor in lists[0])
    return max(1, -(-len(lists[0]) // _TENSORS_OF_LAUNCH[depth]), -(-chunks // _CHUNKS_OF_LAUNCH))


def _item(args: _Args, _kwargs: Mapping[str, Any], _out: Any) -> Work:
    """Work of reading one value: it crosses to the host, and the host waits for it."""
    size_bytes = args[0].element_size()
    return Work(0.0, size_bytes, "other", 1, 0 if args[0].is_cpu else size_bytes)


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info is not None and argument.alias_info.is_write)


def _bytes_in(values: Any) -> int:
    return sum(map(size_bytes_of, tensors_in(values)))


def _crossing_bytes(args: _Args, out: Any) -> int:
    """Bytes that a copy takes to or from another device, or a file; 0 within a device."""
    first, second = (args[0], args[1]) if len(args) > 1 else (args[0], out)
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return 0
    if first.device == second.device and not _is_in_file(first) and not _is_in_file(second):
        return 0
    return min(size_bytes_of(first), size_bytes_of(second))


def _is_in_file(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and is_spilled(tensor.untyped_storage())


# --- the rule of an operator ----------------------------------------------------------------------


@functools.cache
def _rule_of(func: Any) -> _Pricer | None:
    """The rule of an operator, None where there is no work."""
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator: what runs inside is seen by itself
        return None
    name = schema.name
    if name == "aten::_local_scalar_dense":
        return _item
    if name in _NO_WORK or _is_view(schema) or not _touches_tensors(schema):
        return None
    own = name.removesuffix("_")  # addmm_ as addmm
    flops, formula = _PRODUCTS.get(own) or _ATTENTION.get(own), flop_registry.get(getattr(func, "overloadpacket", None))
    if flops is not None or formula is not None:
        return _ProductRule(name, schema, _kind_of_product(name), flops, formula)
    if name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")) and "rms_norm" not in name:
        return _ForeachRule(name, schema)
    return _Rule(name, schema)


def _kind_of_product(name: str) -> Kind:
    if "attention" in name:
        return Kind.ATTENTION_BACKWARD if name.endswith("_backward") else Kind.ATTENTION
    return Kind.CONVOLUTION if "convolution" in name else Kind.PRODUCT


def _is_view(schema: Any) -> bool:
    """Return whether an operator returns its arguments' memory and writes nothing."""
    infos = [returned.alias_info for returned in schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _touches_tensors(schema: Any) -> bool:
    returns = any("Tensor" in str(returned.type) for returned in schema.returns)
    return returns or any(_is_written(argument) for argument in schema.arguments)
