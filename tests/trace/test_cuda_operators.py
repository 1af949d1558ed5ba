from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab.hardware.gpus import gpu
from memlab.trace.cuda_choices import cuda_choices
from tests.trace.cuda_twins import FAKE, Operators, fake, twin_of

A100 = gpu("A100 80GB")


def test_dropout_has_a_boolean_mask() -> None:
    rows = fake(4, 8, trained=True)

    with cuda_choices(A100), Operators() as operators:
        nn.Dropout(0.1)(rows).sum().backward()

    assert operators.names[0] == "native_dropout"
    assert "native_dropout_backward" in operators.names
    assert "bernoulli_.float" not in operators.names


def test_dropout_that_does_nothing_runs_nothing() -> None:
    rows = fake(4, 8, trained=True)

    with cuda_choices(A100), Operators() as operators:
        assert F.dropout(rows, 0.0) is not None
        F.dropout(rows, 0.5, training=False)

    assert operators.names == []


def test_softmax_from_fp16_to_fp32_makes_no_copy_in_between() -> None:
    for dtype, copied in ((torch.float16, False), (torch.bfloat16, True)):
        rows = fake(4, 8, dtype=dtype, trained=True)
        with cuda_choices(A100), Operators() as operators:
            out = F.softmax(rows, -1, dtype=torch.float32)
            F.log_softmax(rows, -1, dtype=torch.float32)
        assert out.dtype is torch.float32
        assert ("_to_copy" in operators.names) is copied


def test_softmax_backward_returns_to_fp16() -> None:
    rows = fake(4, 8, dtype=torch.float16, trained=True)

    with cuda_choices(A100), Operators() as operators:
        F.log_softmax(rows, -1, dtype=torch.float32).sum().backward()

    assert operators.dtypes("_log_softmax_backward_data") == [torch.float16]
    assert rows.grad is not None


def test_linear_with_a_strided_input_adds_its_bias_in_place() -> None:
    layer, rows = twin_of(nn.Linear(8, 6)), fake(3, 4, 8).transpose(0, 1)

    with cuda_choices(A100), Operators() as operators:
        layer(rows).sum().backward()
        layer(fake(3, 4, 8))

    assert operators.count("add_.Tensor") == 1
    assert operators.count("addmm") == 1
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None


def test_rms_norm_is_one_kernel() -> None:
    layer, rows = twin_of(nn.RMSNorm(8)), fake(4, 8, trained=True)

    with cuda_choices(A100), Operators() as operators:
        layer(rows).sum().backward()

    assert operators.names[0] == "_fused_rms_norm"
    assert "_fused_rms_norm_backward" in operators.names
    assert rows.grad is not None
    assert layer.weight.grad is not None


def test_rms_norm_of_transposed_heads_is_one_kernel_and_of_channels_last_pictures_is_not() -> None:
    heads = fake(2, 5, 4, 8).transpose(1, 2)
    picture = fake(2, 4, 5, 8).to(memory_format=torch.channels_last)

    for rows, fused in ((heads, True), (picture, False)):
        with cuda_choices(A100), Operators() as operators:
            F.rms_norm(rows, (8,))
        assert ("_fused_rms_norm" in operators.names) is fused


def test_rms_norm_of_other_type_than_its_weight_is_taken_apart() -> None:
    layer, rows = twin_of(nn.RMSNorm(8)), fake(4, 8, dtype=torch.bfloat16)

    with pytest.warns(UserWarning, match="Mismatch dtype"), cuda_choices(A100), Operators() as operators:
        layer(rows)

    assert "_fused_rms_norm" not in operators.names


def test_without_the_choices_nothing_of_this_happens() -> None:
    with Operators() as operators, FAKE:
        F.dropout(torch.empty(4, 8), 0.1)
        nn.RMSNorm(8)(torch.empty(4, 8))

    assert not {"native_dropout", "_fused_rms_norm"} & set(operators.names)
