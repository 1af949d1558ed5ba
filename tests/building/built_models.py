"""Small models of Transformers, by name: class and configuration."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_IDS = {"bos_token_id": 0, "eos_token_id": 0}


def families() -> dict[str, tuple[Any, Any]]:
    """Configurations are fresh, so that a test may look for changes in them."""
    gpt2 = hf.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=200, n_positions=32, **_IDS)
    beit = hf.BeitConfig(**_SMALL, image_size=16, patch_size=4)
    t5 = hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100)
    mamba = hf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100, **_IDS)
    return {
        "GPT-2": (hf.GPT2LMHeadModel, gpt2),
        "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**_SMALL, num_key_value_heads=2, vocab_size=200)),
        "BERT": (hf.BertForMaskedLM, hf.BertConfig(**_SMALL, vocab_size=200)),
        "T5": (hf.T5ForConditionalGeneration, t5),
        "BEiT": (hf.BeitForImageClassification, beit),
        "Mamba": (hf.MambaForCausalLM, mamba),
    }


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
