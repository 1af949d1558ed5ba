"""Weights in half precision, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from memlab.inferring.weights import HalfWeights
from memlab.measuring.ledger import Ledger
from memlab.plan import Precision
from tests.inferring.small_models import PROMPT, gpt2, llama, plain


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_every_bit_comes_back_odd_ones_too(precision: Precision) -> None:
    model = plain()
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.4e38, -1e-30])
    model[0].bias.data[: odd.numel()] = odd
    before = [p.detach().clone().view(torch.int32) for p in model.parameters()]
    half = HalfWeights(model, precision)
    half.convert()
    assert all(p.dtype is half.dtype for p in model.parameters())
    half.restore()
    half.restore()
    for parameter, bits in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().view(torch.int32), bits)
    assert half.host_bytes == 0


def test_layout_and_ties_come_back() -> None:
    model = gpt2()
    model.transformer.h[0].mlp.c_fc.weight.data = model.transformer.h[0].mlp.c_fc.weight.data.t().contiguous().t()
    strides = [p.stride() for p in model.parameters()]
    half = HalfWeights(model, Precision.BF16)
    half.convert()
    assert model.lm_head.weight is model.transformer.wte.weight
    half.restore()
    assert [p.stride() for p in model.parameters()] == strides


def test_the_rest_can_be_put_back_once_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain()
    before = [p.detach().clone() for p in model.parameters()]
    half = HalfWeights(model, Precision.FP16)
    half.convert()
    original, left = torch.empty_like, [2]

    def scarce(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no room")
        return original(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(torch, "empty_like", scarce)
        half.restore()
    assert {p.dtype for p in model.parameters()} == {torch.float16, torch.float32}
    half.restore()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_what_is_kept_takes_no_memory_of_the_device() -> None:
    model = plain()
    half = HalfWeights(model, Precision.BF16)
    with Ledger() as ledger:
        half.convert()
    assert half.host_bytes == sum(4 * p.numel() for p in model.parameters())
    assert ledger.live_bytes == sum(2 * p.numel() for p in model.parameters())
    half.restore()


def test_nests_are_converted_and_keep_their_types() -> None:
    half = HalfWeights(plain(), Precision.BF16)
    low = torch.zeros(2, dtype=torch.bfloat16)
    nest = {"pair": Pair(low, [low, 3]), "ids": torch.zeros(2, dtype=torch.int64), "past_key_values": (low,)}
    wide = half.widened(nest)
    assert isinstance(wide["pair"], Pair)
    assert wide["pair"].second[0].dtype is torch.float32
    assert wide["ids"] is nest["ids"]
    assert wide["past_key_values"] is nest["past_key_values"]
    seen = half.called(lambda *args, **kwargs: (args, kwargs), (torch.zeros(2), 1), {"mask": torch.ones(2, dtype=bool)})
    assert seen[0][0].dtype is torch.bfloat16
    assert seen[1]["mask"].dtype is torch.bool


def test_an_output_of_transformers_keeps_its_type_and_cache() -> None:
    model = llama()
    half = HalfWeights(model, Precision.BF16)
    half.convert()
    output = model(PROMPT)
    wide = half.widened(output)
    half.restore()
    assert type(wide) is type(output)
    assert wide.logits is wide["logits"]
    assert wide.logits.dtype is torch.float32
    assert wide.past_key_values is output.past_key_values
