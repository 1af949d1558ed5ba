"""Predictions stay near published measurements of GPUs, with nothing fitted to them."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

from tests.bench import published
from tests.bench.published import (
    BERT,
    LLAMA,
    Row,
    attention_of_torchtune,
    eager_of_2022,
    predicted_bert,
    predicted_llama,
)


@pytest.mark.few(0, full=0)
def test_bert_large_on_a_v100() -> None:
    rows = predicted_bert([BERT[0], BERT[4]])

    # what the article saw of the whole GPU, with the libraries it was written with
    assert [row.ratio_of_theirs for row in rows] == pytest.approx([1, 1], abs=0.03)
    # as it is trained today, a step needs less: gradients are dropped, and softmax keeps no input
    assert rows[0].ratio == pytest.approx(0.82, abs=0.02)
    # micro-batches with checkpointing have little of either
    assert rows[1].ratio == pytest.approx(1, abs=0.03)
    # time in fp32
    assert rows[0].speed_ratio == pytest.approx(1, abs=0.15)


@pytest.mark.full
def test_llama_3b_on_an_a100() -> None:
    as_written, checkpointed = predicted_llama([LLAMA[0], LLAMA[2]])

    assert as_written.ratio_of_theirs == pytest.approx(1, abs=0.02)
    # without keys and values repeated for each head
    assert as_written.ratio == pytest.approx(0.965, abs=0.02)
    assert as_written.speed_ratio == pytest.approx(1, abs=0.15)
    assert checkpointed.ratio == pytest.approx(1, abs=0.05)


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


def test_what_is_written_down_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads((published.RESULTS / "predicted.json").read_text())

    published.show(results)

    shown = capsys.readouterr().out
    assert "14949" in shown
    assert "61440" in shown
    kept = [
        Row(**{**row, "published": published.Published(**row["published"])})
        for row in results["tables"]["BERT-large · V100 16GB"]
    ]
    assert tuple(row.published for row in kept) == BERT
