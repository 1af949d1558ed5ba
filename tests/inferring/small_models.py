"""Small models that generate, or only run forward, and what their caches take by hand."""

from __future__ import annotations

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the models are those of Transformers")

# what Transformers calls a cache, before 5.24 and since
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.GPT2LMHeadModel.forward).parameters
)
VOCABULARY = 97
PROMPT = torch.arange(1, 25).view(2, 12)


def gpt2(dropout: float = 0.0) -> torch.nn.Module:
    """2 layers × 4 heads × 8."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=None,
        pad_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    """2 layers × 2 key-value heads (of 4) × 8."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mistral(window: int) -> torch.nn.Module:
    """The same with a window."""
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0, sliding_window=window,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


def t5() -> torch.nn.Module:
    """2 decoder layers × 4 heads × 8, which keep the encoder's tokens as well."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2, decoder_start_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    return transformers.BertForSequenceClassification(config)


def plain() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def generate(model: torch.nn.Module, prompt: torch.Tensor = PROMPT, new: int = 10) -> torch.Tensor:
    return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
