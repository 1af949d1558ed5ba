from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab.hardware.gpus import gpu
from memlab.runtime.dispatch import TORCH
from memlab.trace import cuda_autocast
from memlab.trace.cuda_choices import cuda_choices
from tests.trace.cuda_twins import Operators, fake, twin_of

A100 = gpu("A100 80GB")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def listed(macro: str) -> set[str]:
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", text)
    assert body is not None
    return {
        f"{name}.{overload}" if overload else name
        for name, overload in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
        if "dimname" not in overload.lower()  # which older ones have
    }


@pytest.mark.skipif(not HEADER.is_file(), reason="needs the headers of torch's wheel")
@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", cuda_autocast.LOWER_PRECISION),
        ("AT_FORALL_FP32", cuda_autocast.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", cuda_autocast.FP32_RESULT),
        ("AT_FORALL_PROMOTE", cuda_autocast.WIDEST),
    ],
)
def test_the_lists_are_those_of_torch(macro: str, names: frozenset[str]) -> None:
    assert listed(macro) == names


def rows(dtype: torch.dtype = BF16) -> torch.Tensor:
    return fake(4, 8, dtype=dtype, trained=True)


def labels() -> torch.Tensor:
    return torch.tensor([0, 1, 2, 3])


# what comes out under torch.autocast("cuda", bfloat16), from the lists of autocast_mode.h
OUTPUTS: list[tuple[str, Callable[[], torch.Tensor], torch.dtype]] = [
    ("matmul", lambda: rows(FP32) @ rows(FP32).t(), BF16),
    ("linear", lambda: F.linear(rows(FP32), rows(FP32)), BF16),
    ("conv2d", lambda: F.conv2d(fake(1, 2, 5, 5), fake(3, 2, 3, 3)), BF16),
    ("conv padding", lambda: F.conv2d(fake(1, 2, 5, 5), fake(3, 2, 3, 3), padding="same"), BF16),
    ("einsum", lambda: torch.einsum("ij,kj->ik", rows(FP32), rows(FP32)), BF16),
    ("addmv", lambda: torch.addmv(fake(4), rows(FP32), fake(8)), BF16),
    ("mv", lambda: rows(FP32).mv(fake(8)), BF16),
    ("attention", lambda: F.scaled_dot_product_attention(*[fake(1, 2, 8, 8)] * 3), BF16),
    ("layer_norm", lambda: F.layer_norm(rows(), (8,)), FP32),
    ("rms_norm", lambda: F.rms_norm(rows(), (8,)), FP32 if TORCH >= (2, 12) else BF16),
    ("group_norm", lambda: F.group_norm(rows(), 2), FP32),
    ("softmax", lambda: F.softmax(rows(), -1), FP32),
    ("softmax method", lambda: rows().softmax(-1), FP32),
    ("log_softmax", lambda: F.log_softmax(rows(), -1), FP32),
    ("softmax of a type", lambda: F.softmax(rows(), -1, dtype=BF16), BF16),
    ("pow", lambda: rows().pow(2), FP32),
    ("** ", lambda: rows() ** 2, FP32),
    ("scalar **", lambda: 2 ** rows(), FP32),
    ("exp", lambda: rows().exp(), FP32),
    ("log", lambda: torch.log(rows()), FP32),
    ("rsqrt", lambda: torch.rsqrt(rows()), FP32),
    ("norm", lambda: rows().norm(), FP32),
    ("norm of rows", lambda: rows().norm(dim=-1, keepdim=True), FP32),
    ("old norm", lambda: torch.ops.aten.norm.Scalar(rows()), FP32),
    ("old norm of rows", lambda: torch.ops.aten.norm.ScalarOpt_dim(rows(), 2, [1]), FP32),
    ("sum", lambda: rows().sum(), FP32),
    ("sum of rows", lambda: rows().sum(-1), FP32),
    ("cumsum", lambda: rows().cumsum(-1), FP32),
    ("prod", lambda: rows().prod(), FP32),
    ("mean", lambda: rows().mean(), BF16),
    ("gelu", lambda: F.gelu(rows()), BF16),
    ("silu", lambda: F.silu(rows()), BF16),
    ("softplus", lambda: F.softplus(rows()), FP32),
    ("mse_loss", lambda: F.mse_loss(rows(), rows()), FP32),
    ("nll_loss", lambda: F.nll_loss(rows(), labels()), FP32),
    ("cross_entropy", lambda: F.cross_entropy(rows(), labels()), FP32),
    ("bce with logits", lambda: F.binary_cross_entropy_with_logits(rows(), rows()), FP32),
    ("interpolate", lambda: F.interpolate(fake(1, 2, 4, 4, dtype=BF16), scale_factor=2), FP32),
    ("avg_pool3d", lambda: F.avg_pool3d(fake(1, 2, 4, 4, 4, dtype=BF16), 2), BF16),
    ("trace", lambda: torch.trace(rows()), BF16),
    ("addcmul of both", lambda: torch.addcmul(rows(), rows(), rows(FP32)), FP32),
    ("addcmul", lambda: torch.addcmul(rows(), rows(), rows()), BF16),
    ("cat", lambda: torch.cat([rows(), rows()]), BF16),
    ("cat of both", lambda: torch.cat([rows(), rows(FP32)]), FP32),
    ("stack", lambda: torch.stack([rows(), rows()]), BF16),
    ("add", lambda: rows() + rows(FP32), FP32),
    ("in place", lambda: fake(4, 8, dtype=BF16).exp_(), BF16),
    ("double", lambda: fake(4, 8, dtype=torch.float64).exp(), torch.float64),
]


@pytest.mark.parametrize(("run", "expected"), [pytest.param(run, dtype, id=name) for name, run, dtype in OUTPUTS])
def test_outputs_have_the_type_cudas_lists_give_them(run: Callable[[], torch.Tensor], expected: torch.dtype) -> None:
    with cuda_choices(A100), torch.autocast("cpu", dtype=BF16):
        out = run()

    assert out.dtype is expected
    if out.requires_grad:
        out.sum().backward()


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    with cuda_choices(A100), torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(rows(), rows())


def test_cross_entropy_keeps_log_probabilities_in_half_precision() -> None:
    logits = rows()

    with cuda_choices(A100), torch.autocast("cpu", dtype=BF16), Operators() as operators:
        F.cross_entropy(logits, labels())

    assert operators.dtypes("_log_softmax") == [BF16]
    assert operators.dtypes("nll_loss_forward") == [FP32]


def test_fp16_softmax_needs_no_copy_in_fp32() -> None:
    scores = rows(FP16)

    with cuda_choices(A100), torch.autocast("cpu", dtype=FP16), Operators() as operators:
        F.softmax(scores, -1)

    assert operators.names == ["_softmax", "detach"] or operators.names == ["_softmax"]


@pytest.mark.parametrize(
    "use",
    [lambda weight: F.linear(rows(FP32), weight), lambda weight: torch.addmv(fake(4), weight, fake(8))],
    ids=["of torch", "of memlab"],
)
def test_a_weight_is_cast_once_under_autocast(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = rows(FP32)

    def casts() -> int:
        with torch.autocast("cpu", dtype=BF16), Operators() as operators:
            for _ in range(3):
                use(weight)
        return sum(1 for name, dtype in operators.seen if name == "_to_copy" and dtype is BF16)

    with cuda_choices(A100):
        first, second = casts(), casts()

    once = 1 + 3 * (1 if use(weight).dim() == 2 else 2)
    assert first == second == once


def test_gradients_reach_fp32_weights() -> None:
    model = twin_of(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)))

    with cuda_choices(A100):
        with torch.autocast("cpu", dtype=BF16):
            loss = model(fake(4, 8)).pow(2).mean()
        loss.backward()

    assert all(p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())


def test_afterwards_the_cpus_lists_hold_again() -> None:
    with cuda_choices(A100), torch.autocast("cpu", dtype=BF16):
        assert rows().exp().dtype is FP32

    with torch.autocast("cpu", dtype=BF16):
        assert rows().exp().dtype is BF16
        assert F.avg_pool3d(fake(1, 2, 4, 4, 4, dtype=BF16), 2).dtype is FP32
