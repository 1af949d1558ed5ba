"""Predictions stay near published measurements of GPUs, with nothing fitted to them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.bench import published
from tests.bench.published import (
    ALST,
    BERT,
    GPT,
    LITGPT,
    LLAMA,
    LONGEST,
    MISTRAL,
    TABLES,
    VIT,
    Case,
    Line,
    longest,
    predicted,
    rows_of,
)
from tests.bench.published_models import (
    LLAMA_7B,
    STABLELM_3B,
    AdamOf2023,
    LigerFeedForward,
    LigerNorm,
    LitAdapter,
    LitSizes,
    _Attention,
    _Gelu,
    _Norm,
    _VitAttention,
    _WrittenAttention,
    attention_of_torchtune,
    eager_of_2022,
    lit_adapter,
)


@pytest.mark.few(0, full=0)
def test_bert_large_on_a_v100() -> None:
    rows = predicted(BERT, [BERT.lines[0], BERT.lines[4]])

    # what the article saw of the whole GPU, with the libraries it was written with
    assert [row.error_of_theirs for row in rows] == pytest.approx([0, 0], abs=0.03)
    # as it is trained today, a step needs less: gradients are dropped, and softmax keeps no input
    assert rows[0].error == pytest.approx(-0.18, abs=0.02)
    # micro-batches with checkpointing have little of either
    assert rows[1].error == pytest.approx(0, abs=0.03)
    # time in fp32
    assert rows[0].speed_ratio == pytest.approx(1, abs=0.15)


@pytest.mark.full
def test_llama_3b_on_an_a100() -> None:
    as_written, checkpointed = predicted(LLAMA, [LLAMA.lines[0], LLAMA.lines[2]])

    assert as_written.error_of_theirs == pytest.approx(0, abs=0.02)
    # without keys and values repeated for each head
    assert as_written.error == pytest.approx(-0.035, abs=0.02)
    assert as_written.speed_ratio == pytest.approx(1, abs=0.15)
    assert checkpointed.error == pytest.approx(0, abs=0.05)


@pytest.mark.full
def test_mistral_7b_and_its_adapters_on_an_a100() -> None:
    rows = predicted(MISTRAL)

    assert [row.error for row in rows] == pytest.approx([0, 0, 0], abs=0.05)


@pytest.mark.full
def test_long_texts_of_llama_8b_on_an_h200() -> None:
    baseline, chunked = predicted(ALST, ALST.lines[:2])

    assert baseline.error == pytest.approx(0, abs=0.02)
    assert chunked.error_of_theirs == pytest.approx(0, abs=0.05)
    # without what Liger's kernels do not save
    assert chunked.error == pytest.approx(0.215, abs=0.03)


@pytest.mark.full
def test_the_longest_text_of_llama_8b_on_an_h100() -> None:
    (baseline,) = predicted(LONGEST, LONGEST.lines[:1])

    assert 32_000 < baseline.predicted < 36_000


def test_the_longest_text_is_found_where_what_is_needed_bends() -> None:
    found = longest(lambda tokens: max(3 * tokens, 10 * tokens - 40_000), 100_000, first=1000)

    assert 0.99 * 14_000 <= found <= 14_000


@pytest.mark.parametrize(("torchs", "ligers"), [(LlamaRMSNorm, LigerNorm), (LlamaMLP, LigerFeedForward)])
def test_parts_that_save_as_ligers_kernels_do_are_llamas(torchs: type[nn.Module], ligers: type[nn.Module]) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    part = torchs(8) if torchs is LlamaRMSNorm else torchs(LlamaConfig(**sizes))
    x, gradient = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    expected = part(x)
    expected_gradients = torch.autograd.grad(expected, (x, *part.parameters()), gradient.clone())
    part.__class__ = ligers

    ours = part(x)

    torch.testing.assert_close(ours, expected)
    # the gradient that comes may be written over
    torch.testing.assert_close(torch.autograd.grad(ours, (x, *part.parameters()), gradient.clone()), expected_gradients)


def test_a_gpt_written_operator_by_operator_and_of_torchs_layers() -> None:
    first, *_, last = predicted(GPT, [GPT.lines[0], GPT.lines[-1]])

    assert (first.error, last.error) == pytest.approx((0, 0), abs=0.01)


def test_frozen_models_with_adapters() -> None:
    rows = predicted(LITGPT, LITGPT.lines[::3])

    assert [row.error for row in rows] == pytest.approx([0, 0], abs=0.01)


@pytest.mark.full
def test_a_vision_transformer_with_the_libraries_of_its_time() -> None:
    rows = predicted(VIT, VIT.lines[2:])

    assert [row.error_of_theirs for row in rows] == pytest.approx([0] * 5, abs=0.02)
    # Adam has one temporary less today
    assert rows[3].error == pytest.approx(-0.15, abs=0.02)


def test_a_row_that_memlab_refuses_is_no_row() -> None:
    line = Line("more parts than rows", 1, Case(GPT.lines[-1].case.make, "--accumulate 9"))

    with pytest.raises(
        RuntimeError, match=r"GPT of 163M parameters, .*: --accumulate 9 is refused: .* this batch has 8"
    ):
        predicted(GPT, [line])


def test_attention_of_2022_is_attention() -> None:
    query, key, value = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    module = torch.nn.Identity().eval()

    ours = eager_of_2022(module, query, key, value, None)[0].transpose(1, 2)
    torchs = F.scaled_dot_product_attention(query, key, value)

    torch.testing.assert_close(ours, torchs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.square().sum(), (query, key, value)),
        torch.autograd.grad(torchs.square().sum(), (query, key, value)),
    )


def test_attention_of_torchtune_is_attention() -> None:
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)

    ours, _ = attention_of_torchtune(torch.nn.Identity(), query, key, value, None)

    torchs = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours.transpose(1, 2), torchs)


@pytest.mark.parametrize("tokens", [None, 5], ids=["mask made in each call", "mask held"])
def test_attention_written_out_is_attention(tokens: int | None) -> None:
    written, torchs, x = _WrittenAttention(tokens).eval(), _Attention().eval(), torch.randn(2, 5, 768)
    torchs.qkv.weight = nn.Parameter(torch.cat([each.weight for each in (written.query, written.key, written.value)]))
    torchs.out = written.out

    torch.testing.assert_close(written(x), torchs(x))


@pytest.mark.parametrize(("ours", "torchs"), [(_Norm(8), nn.LayerNorm(8)), (_Gelu(), nn.GELU("tanh"))])
def test_layers_written_out_are_torchs(ours: nn.Module, torchs: nn.Module) -> None:
    x = torch.randn(3, 8)

    torch.testing.assert_close(ours(x), torchs(x))


@pytest.mark.parametrize("is_of_2023", [False, True])
def test_attention_of_the_vision_transformer_is_torchs(is_of_2023: bool) -> None:
    torchs, ours, x = (
        nn.MultiheadAttention(1024, 16, batch_first=True),
        _VitAttention(is_of_2023),
        torch.randn(2, 5, 1024),
    )
    ours.qkv.weight, ours.qkv.bias, ours.out = torchs.in_proj_weight, torchs.in_proj_bias, torchs.out_proj

    torch.testing.assert_close(ours(x), torchs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("sizes", "is_second", "trained"),
    [
        (STABLELM_3B, False, 573_888),
        (LLAMA_7B, False, 1_229_760),
        (STABLELM_3B, True, 2_125_248),
        (LLAMA_7B, True, 4_279_744),
    ],
)
def test_adapters_train_as_many_numbers_as_published(sizes: LitSizes, is_second: bool, trained: int) -> None:
    model = lit_adapter(sizes, tokens=1, is_second=is_second).model

    assert isinstance(model, LitAdapter)
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == trained


def test_adam_of_2023_is_adam_without_bias_corrections() -> None:
    ours, torchs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for parameter in (ours, torchs):
        parameter.grad = torch.tensor([1.0, -2.0, 3.0])
    AdamOf2023([ours]).step()
    torch.optim.Adam([torchs]).step()

    # which are 0.1 and the root of 0.001 in the first step
    torch.testing.assert_close(ours - 1, (torchs - 1) * 0.1 / 0.001**0.5)


def test_what_is_written_down_is_of_these_tables() -> None:
    results = json.loads(published.PATH.read_text())

    for table in TABLES:
        kept = [(row.name, row.published, row.published_speed) for row in rows_of(results, table)]
        assert kept == [(line.name, round(line.published * table.unit), line.speed) for line in table.lines]
