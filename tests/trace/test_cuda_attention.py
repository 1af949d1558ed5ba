from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab.hardware.gpus import gpu
from memlab.runtime.dispatch import TORCH, StorageWatch
from memlab.techniques.checkpointing.selective import Products
from memlab.trace.cuda_attention import Attention, attention_backend
from memlab.trace.cuda_choices import cuda_choices
from tests.trace.cuda_twins import SINCE_2_14, Operators, fake

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def rows(dtype: torch.dtype, heads: int = 4, length: int = 16, channels: int = 64) -> torch.Tensor:
    return torch.empty(2, heads, length, channels, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("A100 80GB", BF16, FLASH),
        ("A100 80GB", HALF, FLASH),
        ("A100 80GB", FP32, EFFICIENT),
        ("L4", BF16, FLASH),
        ("RTX 5090", BF16, FLASH),
        ("H100 SXM", BF16, CUDNN),
        ("H200", HALF, CUDNN),
        ("B200", BF16, CUDNN),
        ("H200", FP32, EFFICIENT),
        ("T4", HALF, EFFICIENT),
        ("T4", FP32, EFFICIENT),
        ("T4", BF16, MATH),
        ("V100 16GB", HALF, EFFICIENT),
        ("P100", FP32, EFFICIENT),
    ],
)
def test_the_type_and_the_gpu_decide(name: str, dtype: torch.dtype, expected: SDPBackend) -> None:
    q = rows(dtype)

    assert attention_backend(Attention(q, q, q), gpu(name)) == expected


_GROUPED = EFFICIENT if SINCE_2_14 else MATH
MASK = torch.empty(2, 4, 16, 16, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("name", "attention", "expected"),
    [
        ("A100 80GB", Attention(rows(BF16), rows(BF16), rows(BF16), MASK), EFFICIENT),
        ("H200", Attention(rows(BF16), rows(BF16), rows(BF16), MASK), CUDNN),
        ("H200", Attention(rows(BF16), rows(BF16), rows(BF16), MASK.float().requires_grad_()), EFFICIENT),
        # cuDNN knows dropout in sixteenths only, which torch asks for since 2.12
        ("H200", Attention(rows(BF16), rows(BF16), rows(BF16), dropout=0.1), FLASH if TORCH >= (2, 12) else CUDNN),
        ("H200", Attention(rows(BF16), rows(BF16), rows(BF16), dropout=0.125), CUDNN),
        # grouped heads
        ("A100 80GB", Attention(rows(BF16), rows(BF16, 2), rows(BF16, 2), grouped=True), FLASH),
        ("A100 80GB", Attention(rows(FP32), rows(FP32, 2), rows(FP32, 2), grouped=True), _GROUPED),
        ("A100 80GB", Attention(rows(BF16), rows(BF16, 2), rows(BF16, 2), MASK, grouped=True), _GROUPED),
        # channels
        ("A100 80GB", Attention(*[rows(BF16, channels=60)] * 3), FLASH),
        ("A100 80GB", Attention(*[rows(FP32, channels=62)] * 3), MATH),
        ("A100 80GB", Attention(*[rows(BF16, channels=264)] * 3), EFFICIENT),
        ("L4", Attention(*[rows(BF16, channels=224)] * 3), EFFICIENT),
        ("L4", Attention(*[rows(BF16, channels=256)] * 3), FLASH),
        ("L4", Attention(*[rows(BF16, channels=256)] * 3, dropout=0.1), EFFICIENT),
        ("B200", Attention(*[rows(BF16, channels=256)] * 3), CUDNN if SINCE_2_14 else FLASH),
        ("H200", Attention(*[rows(BF16, channels=256)] * 3), CUDNN),
        # causal with fewer queries than keys
        ("A100 80GB", Attention(rows(BF16, length=8), rows(BF16), rows(BF16), is_causal=True), EFFICIENT),
        # last dimension not adjacent
        ("A100 80GB", Attention(*[rows(BF16, length=64).transpose(-1, -2)] * 3), MATH),
        ("A100 80GB", Attention(*[rows(BF16)[0]] * 3), MATH),
    ],
)
def test_masks_dropout_heads_and_channels_decide(name: str, attention: Attention, expected: SDPBackend) -> None:
    assert attention_backend(attention, gpu(name)) == expected


def test_without_gradients_small_gpus_serve_more_channels() -> None:
    q = rows(BF16, channels=224)

    with torch.no_grad():
        assert attention_backend(Attention(q, q, q), gpu("L4")) == FLASH


def test_the_users_switches_are_respected() -> None:
    q = rows(BF16)

    with sdpa_kernel(EFFICIENT):
        assert attention_backend(Attention(q, q, q), gpu("A100 80GB")) == EFFICIENT
    with sdpa_kernel([MATH, FLASH], set_priority=True):
        assert attention_backend(Attention(q, q, q), gpu("H200")) == MATH
    with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="No available kernel"):
        attention_backend(Attention(rows(FP32), rows(FP32), rows(FP32)), gpu("A100 80GB"))


def test_cudnn_can_be_put_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    q = rows(BF16)

    assert attention_backend(Attention(q, q, q), gpu("H200")) == FLASH


@pytest.mark.parametrize(
    ("name", "dtype", "key_heads", "kernel"),
    [
        ("A100 80GB", BF16, 2, "_scaled_dot_product_flash_attention"),
        ("H200", BF16, 2, "_scaled_dot_product_cudnn_attention"),
        ("A100 80GB", FP32, 4, "_scaled_dot_product_efficient_attention"),
        ("A100 80GB", FP32, 2, "_scaled_dot_product_efficient_attention" if SINCE_2_14 else "_safe_softmax"),
    ],
)
def test_forward_and_backward_run_through_the_kernel(
    name: str, dtype: torch.dtype, key_heads: int, kernel: str
) -> None:
    q = fake(2, 4, 16, 60, dtype=dtype, trained=True)
    k, v = (fake(2, key_heads, 16, 60, dtype=dtype, trained=True) for _ in range(2))

    with cuda_choices(gpu(name)), Operators() as operators:
        grouped = key_heads != 4
        # cuDNN wants channels in eights
        cut = (t[..., :56] if "cudnn" in kernel else t for t in (q, k, v))
        out = F.scaled_dot_product_attention(*cut, is_causal=True, enable_gqa=grouped)
        out.sum().backward()

    assert kernel in operators.names
    assert out.shape[:3] == q.shape[:3]
    assert out.dtype is dtype
    assert q.grad is not None
    assert q.grad.shape == q.shape
    assert k.grad is not None
    assert k.grad.shape == k.shape
    if kernel != "_safe_softmax":
        assert f"{kernel}_backward" in operators.names


@pytest.mark.parametrize(("keys", "padded"), [(16, False), (20, True)])
def test_rows_of_a_mask_are_aligned_for_the_efficient_kernel(keys: int, padded: bool) -> None:
    q, k = fake(2, 4, 16, 64, dtype=BF16, trained=True), fake(2, 4, keys, 64, dtype=BF16)
    mask = torch.ones(2, 1, 16, keys, dtype=torch.bool)

    with cuda_choices(gpu("A100 80GB")), Operators() as operators:
        F.scaled_dot_product_attention(q, k, k, mask)

    assert operators.dtypes("where.self") == [BF16]
    assert ("constant_pad_nd" in operators.names) is padded


def test_math_adds_its_mask_in_place() -> None:
    q = fake(2, 4, 16, 62, trained=True)

    with cuda_choices(gpu("A100 80GB")), Operators() as operators:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)

    assert operators.count("add_.Tensor") == 1


def test_math_adds_its_mask_to_a_copy_where_operators_are_watched() -> None:
    # as torch does: what selective checkpointing keeps of the product is then still there
    q = fake(2, 4, 16, 62, trained=True)

    with cuda_choices(gpu("A100 80GB")), Products().keeping(), Operators() as operators:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)

    assert (operators.count("add.Tensor"), operators.count("add_.Tensor")) == (1, 0)


def test_math_adds_its_mask_in_place_in_the_steps_after_one_that_is_watched_for_writes() -> None:
    q = fake(2, 4, 16, 62, trained=True)

    with cuda_choices(gpu("A100 80GB")), StorageWatch(), Operators() as operators:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)

    assert (operators.count("add.Tensor"), operators.count("add_.Tensor")) == (0, 1)


def test_real_tensors_take_the_cpus_way() -> None:
    q = torch.randn(2, 4, 16, 64)
    expected = F.scaled_dot_product_attention(q, q, q)

    with cuda_choices(gpu("A100 80GB")), Operators() as operators:
        found = F.scaled_dot_product_attention(q, q, q)

    assert operators.names == ["_scaled_dot_product_flash_attention_for_cpu"]
    assert torch.equal(found, expected)
