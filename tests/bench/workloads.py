"""Real models at a size that the device can train in seconds."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memlab import Workload


def gpt2(device: torch.device, *, batch: int, tokens: int, small: bool = False) -> Workload:
    """GPT-2 124M (or 2 of its 12 layers) on random tokens with ragged targets.

    Args:
        device: where to train.
        batch: rows.
        tokens: tokens per row.
        small: two layers instead of twelve.
    """
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2 if small else 12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).to(device).train()
    ids = torch.randint(0, config.vocab_size, (batch, tokens), device=device)  # [b, s]
    labels = ids.clone()
    for row in range(batch):
        labels[row, tokens - row * tokens // (2 * batch) :] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, optimizer, batch={"input_ids": ids, "labels": labels}, name="gpt2")
