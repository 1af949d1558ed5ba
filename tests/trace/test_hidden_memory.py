from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.hardware.gpus import Gpu, gpu
from memlab.trace.cuda_choices import cuda_choices
from memlab.trace.hidden_memory import Held, Temporaries
from tests.trace.cuda_twins import fake, twin_of

A100, L4, H100, T4, P100 = (gpu(name) for name in ("A100 80GB", "L4", "H100 SXM", "T4", "P100"))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def hidden_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on: Gpu) -> tuple[int, ...]:
    """Sizes of all temporaries of a call, in the order in which they are freed."""
    found = Temporaries.of(func, args, kwargs, on)
    return () if found is None else tuple(itertools.chain(*found.groups))


class Hidden(TorchDispatchMode):
    """Keeps the temporaries of each operator that has some."""

    def __init__(self, on: Gpu) -> None:
        super().__init__()
        self.on = on
        self.sizes: dict[str, tuple[int, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if sizes := hidden_bytes(func, args, kwargs or {}, self.on):
            self.sizes[func.name().removeprefix("aten::")] = sizes
        return out


def attend(
    on: Gpu, dtype: torch.dtype, shape: tuple[int, ...], key_heads: int | None = None
) -> dict[str, tuple[int, ...]]:
    batch, heads, length, channels = shape
    # as a model makes them: [b, s, h, d], seen as [b, h, s, d]
    q = fake(batch, length, heads, channels, dtype=dtype, trained=True)
    k, v = (fake(batch, length, key_heads or heads, channels, dtype=dtype, trained=True) for _ in range(2))
    with cuda_choices(on), Hidden(on) as hidden:
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=key_heads is not None
        )
        out.transpose(1, 2).backward(fake(batch, length, heads, channels, dtype=dtype))
    return hidden.sizes


def test_flash_backward_gathers_query_gradients_in_fp32() -> None:
    sizes = attend(A100, BF16, (2, 4, 200, 80))

    sums = 2 * 4 * 256 * 4  # 200 queries rounded to 256
    assert sizes["_scaled_dot_product_flash_attention_backward"] == (sums, sums * 96)  # 80 channels rounded to 96


def test_flash_backward_rounds_many_channels_to_64() -> None:
    (sums, query_gradient) = attend(A100, BF16, (1, 2, 128, 136))["_scaled_dot_product_flash_attention_backward"]

    assert query_gradient == sums * 192


def test_flash_backward_expands_shared_heads() -> None:
    sizes = attend(A100, BF16, (2, 8, 128, 64), key_heads=2)["_scaled_dot_product_flash_attention_backward"]

    assert sizes[2:] == (2 * 128 * 8 * 64 * 2,) * 2


def test_flash_backward_copies_what_is_not_in_its_order() -> None:
    q = fake(2, 4, 128, 64, dtype=BF16, trained=True)

    with cuda_choices(A100), Hidden(A100) as hidden:
        F.scaled_dot_product_attention(q, q, q).backward(fake(2, 4, 128, 64, dtype=BF16))

    sizes = hidden.sizes["_scaled_dot_product_flash_attention_backward"]
    assert sizes[2:] == (2 * 4 * 128 * 64 * 2,) * 2  # gradient and output


def gradient_tiles(shape: tuple[int, ...], queries: int, keys: int) -> int:
    batch, heads, length, channels = shape
    tiles = math.ceil(length / queries) * math.ceil(channels / keys)
    return batch * heads * tiles * (4 + queries * keys) * 4


def test_efficient_backward_in_fp32_multiplies_outside_of_its_kernel() -> None:
    shape = (2, 4, 200, 64)

    sizes = attend(A100, FP32, shape)["_scaled_dot_product_efficient_attention_backward"]

    rows = 2 * 4 * 200 * 4
    assert sizes == (rows * 64, rows, rows, gradient_tiles(shape, 64, 64))


def test_efficient_backward_in_half_precision_needs_tiles_of_query_gradients() -> None:
    shape = (2, 4, 200, 64)

    sizes = attend(T4, FP16, shape)["_scaled_dot_product_efficient_attention_backward"]

    assert sizes == (2 * 4 * 200 * 4, gradient_tiles(shape, 64, 64))


def test_efficient_backward_with_little_shared_memory_gathers_keys_and_values_too() -> None:
    shape = (2, 4, 200, 128)

    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        sizes = attend(gpu("L4"), FP16, shape)["_scaled_dot_product_efficient_attention_backward"]

    splits = min(math.ceil(200 / 64), 200 // 8)
    assert sizes[1] == gradient_tiles(shape, 64, 64) + 2 * 4 * splits * 64 * (128 + 128) * 4


def test_efficient_backward_on_turing_keeps_keys_and_values_in_registers() -> None:
    shape = (2, 4, 200, 128)

    sizes = attend(T4, FP16, shape)["_scaled_dot_product_efficient_attention_backward"]

    assert sizes[1] == gradient_tiles(shape, 128, 64)


def test_sums_over_rows_take_what_blocks_of_threads_add_up_apart() -> None:
    rows = torch.empty(4096, 3072, dtype=torch.bfloat16, device="meta")

    # torch takes fp32 for each of 3072 columns, 64 blocks, 32 threads across and 4 lanes of each
    assert hidden_bytes(torch.ops.aten.sum.dim_IntList, (rows, [0]), {}, A100) == (4 * 3072 * 64 * 32 * 4,)
    assert hidden_bytes(torch.ops.aten.sum.dim_IntList, (rows, [1]), {}, A100) == ()


@pytest.mark.parametrize(("groups", "columns"), [(1, (64 * 9 * 16 * 16 * 2,)), (64, ())])
def test_convolutions_in_bf16_unfold_an_image_where_cudnn_has_none(groups: int, columns: tuple[int, ...]) -> None:
    images = torch.empty(8, 64, 32, 32, dtype=BF16, device="meta")
    weight = torch.empty(128, 64 // groups, 3, 3, dtype=BF16, device="meta")
    gradient = torch.empty(8, 128, 16, 16, dtype=BF16, device="meta")
    of_call = (None, [2, 2], [1, 1], [1, 1], False, [0, 0], groups)
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    outputs = [True, True, False]

    assert hidden_bytes(forward, (images, weight, *of_call), {}, T4) == columns
    assert hidden_bytes(backward, (gradient, images, weight, *of_call, outputs), {}, T4) == columns
    assert hidden_bytes(forward, (images, weight, *of_call), {}, A100) == ()
    assert hidden_bytes(forward, (images.half(), weight.half(), *of_call), {}, T4) == ()


@pytest.mark.parametrize(("groups", "on", "multiplies"), [(1, T4, True), (64, T4, False), (1, A100, False)])
def test_convolutions_without_cudnn_are_products_which_take_a_workspace(groups: int, on: Gpu, multiplies: bool) -> None:
    images = torch.empty(8, 64, 32, 32, dtype=BF16, device="meta")
    weight = torch.empty(128, 64 // groups, 3, 3, dtype=BF16, device="meta")
    gradient = torch.empty(8, 32, 32, 128, dtype=BF16, device="meta").permute(0, 3, 1, 2)
    of_call = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    found = [
        Temporaries.of(forward, (images, weight, *of_call), {}, on),
        Temporaries.of(backward, (gradient, images, weight, *of_call, [True, True, True]), {}, on),
    ]
    assert [each is not None and each.multiplies for each in found] == [multiplies] * 2
    if multiplies:  # columns are gone before the copy of the gradient is, whose bias has sums along adjacent elements
        assert found[1] is not None
        assert [type(group).__name__ for group in found[1].groups] == ["Unfolded", "Held"]
        assert [sum(group) for group in found[1].groups] == [64 * 9 * 32 * 32 * 2, gradient.nbytes]


def test_the_copy_of_a_convolutions_weight_is_taken_after_its_result() -> None:
    images = torch.empty(8, 64, 32, 32, device="meta").to(memory_format=torch.channels_last)
    weight = torch.empty(128, 64, 3, 3, device="meta")
    call = (images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = Temporaries.of(torch.ops.aten.convolution.default, call, {}, T4)
    assert found is not None
    assert found.groups == ((weight.nbytes,),)
    assert found.held_bytes == 0


def test_logsumexp_takes_its_exponentials() -> None:
    rows = torch.empty(128, 4096, device="meta")

    assert hidden_bytes(torch.ops.aten.logsumexp.default, (rows, [1]), {}, A100) == (rows.nbytes, 128 * 4)


def test_softmax_backward_takes_the_product_of_gradient_and_output() -> None:
    gradient, scores = torch.empty(8, 64, 64, device="meta"), torch.empty(8, 64, 64, device="meta")
    func = torch.ops.aten._softmax_backward_data.default

    assert hidden_bytes(func, (gradient, scores, -1, torch.bfloat16), {}, A100) == (gradient.nbytes,)


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"])
@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
def test_losses_that_are_summed_up_are_there_for_each_element(loss: str, reduction: int) -> None:
    outputs, targets = torch.empty(64, 32, device="meta"), torch.empty(64, 32, device="meta")
    sizes = hidden_bytes(getattr(torch.ops.aten, loss).default, (outputs, targets), {"reduction": reduction}, A100)

    own = 1 if loss.startswith("binary") else 0  # the logarithm of its sigmoid
    assert sizes == (outputs.nbytes,) * (own + (reduction > 0))


def test_sums_of_small_whole_numbers_are_of_long_ones() -> None:
    mask, numbers = (
        torch.empty(64, 32, dtype=torch.bool, device="meta"),
        torch.empty(64, 32, dtype=torch.int64, device="meta"),
    )

    assert hidden_bytes(torch.ops.aten.sum.dim_IntList, (mask, [1]), {}, A100) == (64 * 32 * 8,)
    assert hidden_bytes(torch.ops.aten.sum.dim_IntList, (numbers, [1]), {}, A100) == ()


def test_efficient_backward_before_volta_splits_no_keys() -> None:
    sizes = attend(P100, FP32, (2, 4, 200, 64))["_scaled_dot_product_efficient_attention_backward"]

    rows = 2 * 4 * 200 * 4
    assert sizes == (rows * 64, rows, rows)


def test_efficient_forward_of_many_channels_adds_up_in_fp32() -> None:
    sizes = attend(T4, FP16, (2, 4, 16, 160))

    assert sizes["_scaled_dot_product_efficient_attention"] == (2 * 4 * 16 * 160 * 4,)


def test_plain_attention_marks_empty_rows() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        sizes = attend(A100, FP32, (2, 4, 16, 64), key_heads=2)

    scores = 2 * 4 * 16 * 16
    assert sizes == {"_safe_softmax": (scores, 2 * 4 * 16), "_softmax_backward_data": (4 * scores,)}


@pytest.mark.parametrize(("tokens", "rows"), [(4096, 50_000), (4096, 1024)])
def test_embedding_backward_sorts_and_sums_in_pieces(tokens: int, rows: int) -> None:
    table = twin_of(nn.Embedding(rows, 32))

    with cuda_choices(A100), Hidden(A100) as hidden:
        table(torch.zeros(4, tokens // 4, dtype=torch.long)).sum().backward()

    segments = min(tokens, rows)
    pieces = tokens // 10 + segments
    *lists, sums, copy = hidden.sizes["embedding_dense_backward"]
    assert (sums, copy) == (pieces * 32 * 4, tokens * 32 * 4)
    assert sum(lists) == 8 * (3 * tokens + 2 * segments + pieces)


def test_embedding_backward_of_few_tokens_needs_nothing() -> None:
    table, ids = twin_of(nn.Embedding(100, 32)), torch.zeros(4, 8, dtype=torch.long)

    with cuda_choices(A100), Hidden(A100) as hidden:
        table(ids).backward(fake(4, 8, 32))

    assert hidden.sizes == {}


def test_index_put_sorts_only_when_it_accumulates() -> None:
    rows, at = fake(100, 8), torch.arange(10)

    with Hidden(A100) as hidden:
        rows.index_put((at,), fake(10, 8))
        assert hidden.sizes == {}
        rows.index_put((at[:, None], torch.arange(4)), fake(10, 4), accumulate=True)

    assert hidden.sizes == {"index_put": (10 * 4 * 8,) * 4}


def test_norms_of_many_tensors_are_taken_by_chunks() -> None:
    tensors = [fake(65536 * 3 + 1), fake(5)]

    with Hidden(A100) as hidden:
        torch._foreach_norm(tensors)

    assert hidden.sizes == {"_foreach_norm.Scalar": (2 * 4 * 4,)}


def test_everything_else_is_one_look_up() -> None:
    rows = fake(4, 4)

    assert hidden_bytes(torch.ops.aten.add.Tensor, (rows, rows), {}, A100) == ()


def test_flash_forward_adds_up_parts_of_the_keys_where_queries_do_not_fill_the_gpu() -> None:
    few, many = (fake(4, 8, queries, 64, dtype=BF16) for queries in (200, 1500))
    func = torch.ops.aten._scaled_dot_product_flash_attention.default

    # 4 × 8 × 4 blocks of 64 queries for 108 processors: keys are split into three
    rows_bytes = 3 * 4 * 8 * 200 * 4
    assert hidden_bytes(func, (few, many, many), {}, A100) == (rows_bytes, rows_bytes * 64)
    assert hidden_bytes(func, (few, many, many, 0.1), {}, A100) == ()
    assert hidden_bytes(func, (many, many, many), {}, A100) == ()


def test_copies_are_taken_before_results() -> None:
    rows = fake(64, 32).t()

    found = Temporaries.of(torch.ops.aten.native_layer_norm.default, (rows, [64], None, None, 1e-5), {}, A100)

    assert found is not None
    assert found.groups == (Held((rows.nbytes,)),)
    assert isinstance(found.groups[0], Held)


@pytest.mark.parametrize("rows", [256, 512, 1024, 1500, 4096])
def test_temporaries_of_other_rows_follow_from_those_of_two_batches(rows: int) -> None:
    def summed(rows: int) -> Temporaries:
        gradient = torch.empty(rows, 20_000, device="meta")
        found = Temporaries.of(torch.ops.aten.sum.dim_IntList, (gradient, [0], True), {}, H100)
        assert found is not None
        return found

    one, other = summed(1024), summed(2048)

    assert one.between(other, (rows - 1024) / 1024).groups == summed(rows).groups
    assert one.between(other, (512 - 1024) / 1024).groups == ()
