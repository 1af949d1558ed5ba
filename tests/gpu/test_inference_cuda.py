"""Calls that only run forward, on a real GPU: one command, `python -m pytest -q tests/gpu/test_inference_cuda.py`."""

from __future__ import annotations

import gc

import pytest
import torch

from memlab.inferring.inference import inference
from memlab.records import Category
from memlab.runtime.workload import Workload
from memlab.session.snapshot import Snapshot
from memlab.units import MIB
from tests.helpers.snapshots import changed_between

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
transformers = pytest.importorskip("transformers", reason="the models are those of Transformers")

PROMPT_TOKENS, NEW_TOKENS = 128, 64


@pytest.fixture
def llama():
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().eval()
    yield model
    del model
    gc.collect()
    torch.cuda.empty_cache()


def prompt(rows: int) -> torch.Tensor:
    return torch.randint(1, 1024, (rows, PROMPT_TOKENS), device="cuda")


def generate(model, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.mark.parametrize(("flags", "element_bytes"), [("", 4), ("--fp16", 2), ("--bf16", 2)])
def test_memory_speed_and_cache(llama, flags: str, element_bytes: int) -> None:
    ids = prompt(8)  # drawn before the state is noted, as drawing moves the device's generator on
    before = Snapshot(Workload(llama))
    with inference(llama, flags) as run:
        for _ in range(3):
            generate(llama, ids)
        peak = torch.cuda.max_memory_allocated()
    record = run.record
    tokens = PROMPT_TOKENS + NEW_TOKENS - 1
    assert record.cache.size_bytes == record.cache.predicted_bytes == 2 * 4 * 2 * 64 * element_bytes * tokens * 8
    assert record.calls[-1].peak_allocated_bytes == peak
    assert record.calls[-1].peak_reserved_bytes >= peak
    assert not any(call.observed for call in record.calls)  # the allocator counts
    weights = sum(element_bytes * p.numel() for p in llama.parameters())
    assert record.breakdown[Category.PARAMETERS] == pytest.approx(weights, rel=0.01)
    seen = sum(size for name, size in record.breakdown.items() if name != Category.UNUSED)
    assert seen == record.peak_allocated_bytes
    assert record.decode_tokens_per_second > 0
    assert record.prefill_tokens_per_second > record.decode_tokens_per_second
    assert changed_between(before, Snapshot(Workload(llama))) == []


def test_half_precision_frees_half_of_the_weights(llama) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    with inference(llama, "--bf16") as run:
        halved = torch.cuda.memory_allocated()
        llama(prompt(1))
    weights = sum(4 * p.numel() for p in llama.parameters())
    assert before - halved == pytest.approx(weights / 2, rel=0.05)
    assert run.record.host_bytes == weights
    assert torch.cuda.memory_allocated() <= before + MIB


def test_the_batch_that_is_advised_fits(llama) -> None:
    with inference(llama) as run:
        generate(llama, prompt(2))
        generate(llama, prompt(8))
        budget_bytes = torch.cuda.memory_allocated() + 128 * MIB
        advice = run.record.advise(budget_bytes)
    with inference(llama) as run:
        generate(llama, prompt(advice.rows))
    assert run.record.peak_allocated_bytes <= budget_bytes


def test_bit_equal_without_precision_and_no_graph(llama) -> None:
    ids = prompt(2)
    with torch.no_grad():
        expected = llama(ids).logits
    with inference(llama) as run:
        logits = llama(ids).logits
        assert run.capacity_bytes <= torch.cuda.get_device_properties(0).total_memory
    assert torch.equal(logits, expected)
    assert not logits.requires_grad
