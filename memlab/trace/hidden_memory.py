"""Bytes on a CUDA device that no dispatch mode sees, by formulas from torch's sources.

They are temporaries that one operator takes from the caching allocator and gives back before it returns. Where a size is
not certain, nothing is counted. Workspaces that libraries take once and keep: `memlab.runtime.cublas.workspaces`.

Sources (pytorch; the formulas are those of 2.13 unless a version is named):
- flash: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp `mha_bwd`, `set_params_splitkv`, `num_splits_heuristic`;
- memory-efficient: transformers/cuda/attention_backward.cu `_efficient_attention_backward`, attention.cu
  `_efficient_attention_forward`, and in the wheel include/ATen/native/transformers/cuda/mem_eff_attention/
  kernel_backward.h `workspace_size`, kernel_forward.h, kernels/cutlassB.h (which kernel is taken);
- embedding: aten/src/ATen/native/cuda/Embedding.cu `embedding_dense_backward_cuda`,
  EmbeddingBackwardKernel.cu `embedding_backward_cuda_kernel`;
- index_put: cuda/Indexing.cu `index_put_with_sort_kernel`;
- norms of many tensors: cuda/ForeachReduceOp.cu `foreach_tensor_norm_cuda`;
- sums over rows: cuda/Reduce.cuh `setReduceConfig`, `global_memory_size`;
- convolutions: native/Convolution.cpp `determine_backend_memory_format`, cudnn/ConvShared.cpp,
  cuda/ConvolutionMM2d.cu (GPUs without convolutions in bf16); layer norm: native/cuda/layer_norm_kernel.cu;
- logsumexp: native/ReduceOps.cpp `logsumexp_out_impl`;
- softmax: cuda/SoftMax.cu `softmax_backward_cuda_out`; transformers/attention.cpp `_safe_softmax`;
- losses: native/Loss.cpp, cuda/Loss.cu; sums of whole numbers: native/ReduceOps.cpp.

Known limitations: workspaces of cuDNN (its attention, plans of convolutions, recurrent layers), of cub's sorts, and the
extra buffers of deterministic algorithms are not counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from memlab.allocator.sizes import round_up
from memlab.hardware.gpus import Gpu
from memlab.runtime.dispatch import HALF
from memlab.trace.work import CHUNK_ELEMENTS

_aten = torch.ops.aten
_FP32_BYTES = 4
_INDEX_BYTES = 8

# bytes of temporaries that live together
Sizes = tuple[int, ...]


class Held(tuple[int, ...]):
    """Sizes of temporaries that an operator takes before its results, as copies of arguments."""


class Unfolded(tuple[int, ...]):
    """Sizes of temporaries of which some are images unfolded: the operator multiplies matrices."""


# groups in the order in which they are freed; one that is not `Held` is taken when the one before is gone
_Groups = Iterator[Sizes]
_Rule = Callable[[Sequence[Any], Mapping[str, Any], Gpu], _Groups]


class _Layout(NamedTuple):
    """What a rule asks of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Temporaries:
    """What one call of an operator takes beside its arguments and results, and frees before it returns."""

    groups: tuple[Sizes, ...]  # in the order in which they are freed
    func: Any  # the operator
    args: Any  # its arguments, with layouts in place of tensors
    kwargs: Any
    gpu: Gpu

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], gpu: Gpu) -> Temporaries | None:
        """What a call takes; None for an operator that never takes anything."""
        if func not in _RULES:
            return None
        found = (type(group)(filter(None, group)) for group in _RULES[func](args, kwargs, gpu))
        laid_out, named = tree_map_only(torch.Tensor, _layout, (tuple(args), dict(kwargs)))
        return cls(tuple(filter(None, found)), func, laid_out, named, gpu)

    @property
    def multiplies(self) -> bool:
        """Return whether the operator multiplies matrices, for which libraries take workspaces."""
        return any(isinstance(group, Unfolded) for group in self.groups)

    @property
    def held_bytes(self) -> int:
        """Return how much is taken before the results."""
        return sum(sum(group) for group in self.groups if isinstance(group, Held))

    def levels(self) -> Iterator[int]:
        """Yield the bytes that live together when each group does."""
        held_bytes = self.held_bytes
        for group in self.groups:
            yield held_bytes + (0 if isinstance(group, Held) else sum(group))
            held_bytes -= sum(group) if isinstance(group, Held) else 0

    def between(self, other: Temporaries, share: float) -> Temporaries:
        """What the same call takes of another batch: this one's sizes, and so large a share of the way to the other's."""
        args, kwargs = _between((self.args, self.kwargs), (other.args, other.kwargs), share)
        found = self.of(self.func, args, kwargs, self.gpu)
        assert found is not None
        return found


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _between(one: Any, other: Any, share: float) -> Any:
    """Arguments between two, with tensors without memory in place of layouts."""
    if isinstance(one, _Layout):
        sizes, strides = (_between(mine, theirs, share) for mine, theirs in zip(one[:2], other[:2], strict=True))
        return torch.empty_strided(sizes, strides, dtype=one.dtype, device="meta")
    if isinstance(one, dict):
        return {key: _between(value, other[key], share) for key, value in one.items()}
    if isinstance(one, (list, tuple)):
        return type(one)(_between(mine, theirs, share) for mine, theirs in zip(one, other, strict=True))
    return round(one + share * (other - one)) if isinstance(one, int) and one != other else one


def _copy_bytes(tensor: torch.Tensor) -> Sizes:
    """Return what `.contiguous()` takes."""
    return () if tensor.is_contiguous() else (tensor.nbytes,)


# --- attention ------------------------------------------------------------------------------------


_FLASH_QUERIES = 64  # of a block, where keys are split
_MOST_SPLITS = 128
_WELL_FILLED, _NEARLY_BEST = 0.8, 0.85


def _flash_forward(args: Sequence[Any], kwargs: Mapping[str, Any], gpu: Gpu) -> _Groups:
    """Results of the parts into which keys are split where queries do not fill the GPU."""
    query, key = args[:2]  # [b, h, s, d]
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    batch, heads, queries, channels = query.shape
    keys_in_block = 256 if channels <= 64 else 128 if channels <= 128 else 64
    blocks = batch * heads * -(-queries // _FLASH_QUERIES)
    splits = _splits(blocks, 2 * gpu.multiprocessors, -(-key.size(2) // keys_in_block))
    if not dropout and splits > 1:
        rows_bytes = splits * batch * heads * queries * _FP32_BYTES
        yield rows_bytes, rows_bytes * _wide(channels)


def _wide(channels: int) -> int:
    return round_up(channels, 32 if channels <= 128 else 64)


def _splits(blocks: int, room: int, key_blocks: int) -> int:
    """The fewest parts of the keys that fill the GPU nearly as well as any number does."""
    if blocks >= _WELL_FILLED * room:
        return 1
    numbers = range(1, min(_MOST_SPLITS, room, key_blocks) + 1)
    waves = {
        splits: blocks * splits / room
        for splits in numbers
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1))
    }
    filled = {splits: each / math.ceil(each) for splits, each in waves.items()}
    return next(splits for splits, share in filled.items() if share >= _NEARLY_BEST * max(filled.values()))


def _flash_backward(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    gradient, query, key, _value, out = args[:5]  # [b, h, s, d]
    batch, heads, queries, channels = query.shape
    wide_queries = round_up(queries, 128)
    softmax_sums = batch * heads * wide_queries * _FP32_BYTES
    query_gradient = softmax_sums * _wide(channels)
    expanded = _per_query_head(query, key, key)
    yield (softmax_sums, query_gradient, *expanded)
    yield Held((*_copy_bytes(gradient.transpose(1, 2)), *_copy_bytes(out.transpose(1, 2))))


_LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))


@dataclass(frozen=True)
class _Tiles:
    """A kernel of memory-efficient attention's backward pass: its tile, and whether results stay in registers."""

    queries: int
    keys: int
    in_registers: bool


def _tiles(channels: int, dtype: torch.dtype, gpu: Gpu) -> _Tiles:
    """The first kernel of kernels/cutlassB.h that takes so many channels and fits into shared memory.

    For 65 to 128 channels of half precision, which one fits is taken from the size of a GPU's shared memory; where
    it is small, the kernel with the larger workspace is assumed.
    """
    if dtype not in HALF:
        is_long = channels > 64 and gpu.compute_capability in _LARGE_SHARED_MEMORY
        return _Tiles(128 if is_long else 64, 64, in_registers=False)
    if channels <= 64:
        return _Tiles(64, 64, in_registers=True)
    if channels > 128:
        return _Tiles(128, 64, in_registers=False)
    if gpu.compute_capability < (8, 0) or (channels <= 96 and gpu.compute_capability in ((8, 6), (8, 9))):
        return _Tiles(128, 64, in_registers=True)
    if gpu.compute_capability in _LARGE_SHARED_MEMORY:
        return _Tiles(128, 128, in_registers=True)
    return _Tiles(64, 64, in_registers=False)


def _efficient_backward(args: Sequence[Any], _: Mapping[str, Any], gpu: Gpu) -> _Groups:
    gradient, query, _key, value = args[:4]  # [b, h, s, d]
    rows_bytes = query.numel() // query.size(-1) * _FP32_BYTES
    if query.dtype not in HALF:
        yield (
            rows_bytes * value.size(-1),
            rows_bytes,
        )  # gradient times output, summed over channels outside of the kernel
    yield rows_bytes, _efficient_workspace(query, args[2], value, gpu)
    yield Held((*_copy_bytes(gradient.transpose(1, 2)), *_per_query_head(query, args[2], value)))


def _per_query_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sizes:
    """Gradients of keys and values for each query head, to be summed where heads share them."""
    heads = query.size(1)
    return tuple(shared.nbytes // shared.size(1) * heads for shared in (key, value) if shared.size(1) != heads)


def _efficient_workspace(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gpu: Gpu) -> int:
    batch, heads, queries, channels = query.shape
    half = query.dtype in HALF
    tiles = _tiles(max(channels, value.size(-1)), query.dtype, gpu)
    elements = 0
    if half and not tiles.in_registers:
        splits = max(1, min(-(-key.size(2) // tiles.keys), 200 // (batch * heads)))
        widths = round_up(channels, tiles.queries) + round_up(value.size(-1), tiles.queries)
        elements += splits * tiles.keys * widths
    if half or gpu.compute_capability >= (7, 0):  # keys are split: query gradients are added up in tiles, with a lock
        stored = 4 + tiles.queries * tiles.keys
        elements += -(-queries // tiles.queries) * -(-channels // tiles.keys) * stored
    return batch * heads * round_up(elements, 4) * _FP32_BYTES


def _efficient_forward(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    query, _key, value = args[:3]
    if query.dtype in HALF and value.size(-1) > 128:
        yield (math.prod(query.shape[:-1]) * value.size(-1) * _FP32_BYTES,)


def _safe_softmax(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    scores, dim = args[:2]
    yield scores.numel(), scores.numel() // max(scores.size(dim), 1)


def _softmax_backward(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    """The product of gradient and output; the gradient is in fp32 where softmax has raised its input to that."""
    yield (args[0].nbytes,)


# --- losses ---------------------------------------------------------------------------------------

_NO_REDUCTION = 0


def _reduced_loss(args: Sequence[Any], kwargs: Mapping[str, Any], _: Gpu) -> _Groups:
    """Losses of all elements, before they are summed up."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if reduction != _NO_REDUCTION:
        yield (args[0].nbytes,)


def _logits_loss(args: Sequence[Any], kwargs: Mapping[str, Any], _: Gpu) -> _Groups:
    """Log-sigmoids, and losses of all elements where they are summed up."""
    reduction = args[4] if len(args) > 4 else kwargs.get("reduction", 1)
    yield (args[0].nbytes,) * (1 if reduction == _NO_REDUCTION else 2)


# --- sums over equal indices ----------------------------------------------------------------------

_SORTS_FROM = 3072
_ROWS_PER_THREAD = 10


def _embedding_backward(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    """Indices are sorted, runs of equal ones cut into pieces, and each piece summed in fp32."""
    gradient, indices, rows = args[:3]
    scaled = bool(args[4]) if len(args) > 4 else False
    count, index_bytes = indices.numel(), indices.element_size()
    if count > _SORTS_FROM or scaled:
        segments = min(count, rows)
        pieces = count // _ROWS_PER_THREAD + segments
        lists = (count, count, count, segments, segments, pieces, *((count,) if scaled else ()))
        yield (*(length * index_bytes for length in lists), pieces * gradient.size(-1) * _FP32_BYTES)
    yield Held(_copy_bytes(gradient))


def _index_put(args: Sequence[Any], kwargs: Mapping[str, Any], _: Gpu) -> _Groups:
    """Bytes of `index_put`: with accumulation, indices are made linear and sorted beside their numbers."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    shapes = [index.shape for index in args[1] if index is not None and index.dtype is not torch.bool]
    if accumulate and shapes:
        broadcast: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        yield (math.prod(broadcast) * _INDEX_BYTES,) * 4


# --- sums over rows -------------------------------------------------------------------------------

_BLOCK_THREADS, _WARP = 512, 32
_LEAST_VALUES, _MOST_VALUES = 16, 256  # of a thread


def _sum(args: Sequence[Any], kwargs: Mapping[str, Any], gpu: Gpu) -> _Groups:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if not (args[0].is_floating_point() or args[0].is_complex() or args[0].dtype is torch.int64 or kwargs.get("dtype")):
        yield (args[0].numel() * _INDEX_BYTES,)  # small whole numbers are made long ones first
    else:
        yield _column_sums(args[0], [dims] if isinstance(dims, int) else dims, gpu)


def _column_sums(tensor: torch.Tensor, dims: Sequence[int] | None, gpu: Gpu) -> Sizes:
    """Partial sums of thread blocks that share columns, as many as a block has threads and vector lanes.

    Sums along adjacent elements are finished within a block and leave next to nothing to the others.
    """
    reduced = {dim % tensor.dim() for dim in dims or range(tensor.dim())} if tensor.dim() else set()
    long = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    kept, over = (
        sorted((tensor.stride(dim), tensor.size(dim)) for dim in long if (dim in reduced) is is_reduced)
        for is_reduced in (False, True)
    )
    if not kept or not over or over[0][0] < kept[0][0] or not tensor.numel():
        return ()
    outputs, inputs = math.prod(size for _, size in kept), math.prod(size for _, size in over)
    adjacent = kept[0][1]
    for (stride, size), (longer, more) in itertools.pairwise(kept):
        if stride * size != longer:
            break
        adjacent *= more
    lanes = 1
    if kept[0][0] == 1:
        lanes = min(4, math.gcd(4, adjacent, *(stride for stride, _ in over), *(stride for stride, _ in kept[1:])))
    most = _BLOCK_THREADS // lanes
    columns, rows = (_power_of_two(number, most) for number in (outputs // lanes, inputs))
    height = min(rows, most // min(columns, _WARP))
    width = min(columns, most // height)
    each = -(-inputs // height)
    groups = -(-(outputs // lanes) // width)
    resident = gpu.multiprocessors * (gpu.threads // (width * height))
    if inputs < min(_LEAST_VALUES * height, _MOST_VALUES) or each < _MOST_VALUES or groups > resident:
        return ()
    least, enough = (-(-each // values) for values in (_MOST_VALUES, _LEAST_VALUES))
    blocks = max(min(-(-resident // groups), enough), least)
    element_bytes = max(_FP32_BYTES, tensor.element_size())
    return (element_bytes * outputs * blocks * width * lanes,) if blocks > 1 else ()


def _power_of_two(number: int, most: int) -> int:
    """The last power of two that is no larger than a number, or the most."""
    return most if number >= most else 1 << (number.bit_length() - 1)


# --- copies in the layout that a library wants ----------------------------------------------------


def _logsumexp(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    """Exponentials of all numbers, and the largest of each row."""
    dims = [dim % args[0].dim() for dim in args[1]]
    yield args[0].nbytes, args[0].nbytes // max(math.prod(args[0].size(dim) for dim in dims), 1)


def _layer_norm(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    yield Held(_copy_bytes(args[0]))


def _layer_norm_backward(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    yield Held((*_copy_bytes(args[0]), *_copy_bytes(args[1])))


def _convolution(args: Sequence[Any], _: Mapping[str, Any], gpu: Gpu) -> _Groups:
    images, weight = args[:2]
    if _has_cudnn(weight, gpu):
        yield Held(_laid_out((images,), (images, weight)))
        yield _laid_out((weight,), (images, weight))
        return
    stride, padding, dilation = args[3:6]
    yield Held(_laid_out((images, weight), ()))
    sizes = zip(images.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    outputs = [(n + 2 * pad - wide * (k - 1) - 1) // by + 1 for n, k, by, pad, wide in sizes]
    yield Unfolded(_columns(args[:2], args[6:], outputs))


def _convolution_backward(args: Sequence[Any], _: Mapping[str, Any], gpu: Gpu) -> _Groups:
    gradient, images, weight = args[:3]
    if not _has_cudnn(weight, gpu):
        # the bias has sums of the copy, along adjacent elements
        yield Unfolded(_columns((images, weight), args[7:], gradient.shape[2:]))
        yield Held(_laid_out((gradient, images), ()))
        return
    # the copy of the weight is gone before its gradient, as large, is made
    yield Held(_laid_out((gradient, images), (images, weight)))
    yield _column_sums(gradient, [0, *range(2, gradient.dim())], gpu) if args[-1][2] else ()


def _has_cudnn(weight: torch.Tensor, gpu: Gpu) -> bool:
    return weight.dtype != torch.bfloat16 or gpu.compute_capability >= (8, 0)


def _columns(tensors: Sequence[torch.Tensor], more: Sequence[Any], outputs: Sequence[int]) -> Sizes:
    """One image unfolded, a column for each position: what torch's own kernels multiply with the weight.

    Args:
        tensors: images and weight.
        more: whether the convolution is transposed, its output padding, its groups.
        outputs: height and width of what comes out.
    """
    (images, weight), (is_transposed, _, groups) = tensors, more[:3]
    if not is_transposed and images.size(1) == groups > 1:
        return ()  # each channel by itself
    positions = images.shape[2:] if is_transposed else outputs
    return (math.prod(weight.shape[1:]) * math.prod(positions) * weight.element_size(),)


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is laid out with its channels last, and in no other way."""
    last = _LAST.get(tensor.dim())
    return last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)


def _laid_out(tensors: Sequence[torch.Tensor], deciding: Sequence[torch.Tensor]) -> Sizes:
    """Copies that a convolution needs: in channels-last format where one of those that decide is, otherwise contiguous."""
    wanted = _LAST[tensors[0].dim()] if any(map(is_channels_last, deciding)) else torch.contiguous_format
    return tuple(tensor.nbytes for tensor in tensors if not tensor.is_contiguous(memory_format=wanted))


# --- many tensors at once -------------------------------------------------------------------------


def _foreach_norm(args: Sequence[Any], _: Mapping[str, Any], __: Gpu) -> _Groups:
    tensors = args[0]
    chunks = max((-(-tensor.numel() // CHUNK_ELEMENTS) for tensor in tensors), default=0)
    yield (len(tensors) * chunks * _FP32_BYTES,) if chunks else ()


def _overloads(*packets: Any) -> list[Any]:
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_overloads(_aten._scaled_dot_product_flash_attention), _flash_forward),
    **dict.fromkeys(_overloads(_aten._scaled_dot_product_flash_attention_backward), _flash_backward),
    **dict.fromkeys(_overloads(_aten._scaled_dot_product_efficient_attention_backward), _efficient_backward),
    **dict.fromkeys(_overloads(_aten._scaled_dot_product_efficient_attention), _efficient_forward),
    **dict.fromkeys(_overloads(_aten._safe_softmax), _safe_softmax),
    **dict.fromkeys(_overloads(_aten._softmax_backward_data), _softmax_backward),
    **dict.fromkeys(_overloads(_aten.mse_loss, _aten.smooth_l1_loss, _aten.huber_loss), _reduced_loss),
    **dict.fromkeys(_overloads(_aten.binary_cross_entropy_with_logits), _logits_loss),
    **dict.fromkeys(_overloads(_aten.embedding_dense_backward), _embedding_backward),
    **dict.fromkeys(
        _overloads(_aten.index_put, _aten.index_put_, _aten._unsafe_index_put, _aten._index_put_impl_), _index_put
    ),
    **dict.fromkeys(_overloads(_aten._foreach_norm), _foreach_norm),
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim), _sum),
    **dict.fromkeys(_overloads(_aten.logsumexp), _logsumexp),
    **dict.fromkeys(_overloads(_aten.native_layer_norm), _layer_norm),
    **dict.fromkeys(_overloads(_aten.native_layer_norm_backward), _layer_norm_backward),
    **dict.fromkeys(_overloads(_aten.convolution), _convolution),
    **dict.fromkeys(_overloads(_aten.convolution_backward), _convolution_backward),
}
