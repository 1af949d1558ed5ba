"""The work: models with random weights and their data, at three scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

Rows = list[dict[str, np.ndarray]]

_BERT = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 256},
    "small": {
        "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768, "vocab_size": 4096,
    },
    "full": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}  # fmt: skip
_BERT_TOKENS = {"tiny": 16, "small": 128, "full": 512}
_GPT2 = {
    "tiny": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256},
    "small": {"n_layer": 4, "n_embd": 192, "n_head": 4, "vocab_size": 2048},
    "full": {},
}
_GPT2_TOKENS = {"tiny": 16, "small": 64, "full": 512}
_VOCABULARY = {"tiny": 4096, "small": 16384, "full": 50257}


@dataclass(frozen=True)
class Work:
    """A model to train and what to train it on.

    Args:
        model: in train mode, on its device.
        rows: the data set, as arrays on the host, so that no ledger of tensors counts it.
        batch_rows: rows of a batch.
    """

    model: nn.Module
    rows: Rows
    batch_rows: int

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def batch(self, number: int, rows: int | None = None) -> dict[str, torch.Tensor]:
        """A batch of consecutive rows on the device; after the last row comes the first."""
        rows = rows or self.batch_rows
        picked = [self.rows[(number * rows + each) % len(self.rows)] for each in range(rows)]
        return {key: torch.from_numpy(np.stack([row[key] for row in picked])).to(self.device) for key in picked[0]}


def bert(scale: str, device: torch.device, *, attention: str = "eager", batch_rows: int = 4) -> Work:
    """The classifier of the published table, with its dropout: BERT-large on batches of 4 × 512, or a cut of it."""
    torch.manual_seed(0)
    config = BertConfig(**_BERT[scale], num_labels=2, attn_implementation=attention)
    model = BertForSequenceClassification(config).to(device).train()
    random = np.random.default_rng(0)
    tokens = _BERT_TOKENS[scale]
    rows = [
        {"input_ids": random.integers(100, config.vocab_size, tokens), "labels": np.asarray(each % 2)}
        for each in range(64)
    ]
    return Work(model, rows, batch_rows)


def gpt2(scale: str, device: torch.device, *, batch_rows: int = 8, large_vocabulary: bool = False) -> Work:
    """GPT-2 without dropout, or a cut of it, on random tokens with ragged targets."""
    torch.manual_seed(0)
    sizes: Mapping[str, Any] = _GPT2[scale] | ({"vocab_size": _VOCABULARY[scale]} if large_vocabulary else {})
    config = GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).to(device).train()
    random = np.random.default_rng(0)
    return Work(
        model, [_ragged(random, config.vocab_size, _GPT2_TOKENS[scale], each) for each in range(64)], batch_rows
    )


def _ragged(random: np.random.Generator, vocabulary: int, tokens: int, row: int) -> dict[str, np.ndarray]:
    """A row of tokens, of which the last eighths are no targets."""
    ids = random.integers(0, vocabulary, tokens)
    labels = ids.copy()
    labels[tokens - tokens * (row % 8) // 16 :] = -100
    return {"input_ids": ids, "labels": labels}


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    """The optimizer of all hand-written loops here."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **settings)


@torch.no_grad()
def result_loss(work: Work) -> float:
    """Loss of the trained model on the first batch, in eval mode."""
    work.model.eval()
    return float(work.model(**work.batch(0)).loss)
