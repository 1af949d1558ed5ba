"""`Here`: models and data whose size follows the machine, so that one notebook runs on a laptop, on a T4 and on a large GPU."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from memlab.extras import require
from memlab.hardware.host import host_bytes
from memlab.units import GIB

# parameters by width, heads and layers; rows and tokens of a batch; entries of the vocabulary
_SIZES = {
    "small CPU": {"layers": 4, "width": 128, "heads": 4, "rows": 8, "tokens": 96, "vocabulary": 2000},
    "cpu": {"layers": 6, "width": 192, "heads": 6, "rows": 8, "tokens": 96, "vocabulary": 4000},
    "small GPU": {"layers": 12, "width": 768, "heads": 12, "rows": 8, "tokens": 512, "vocabulary": 8000},
    "large GPU": {"layers": 24, "width": 1024, "heads": 16, "rows": 16, "tokens": 1024, "vocabulary": 16000},
}
_LARGE_BYTES = 30 * GIB
_SMALL_HOST_BYTES = 4 * GIB  # below it, a chapter is to need no more than one
_FILES = 60


@dataclass(frozen=True)
class Here:
    """Model and data that a notebook trains on this machine."""

    kind: str  # "cpu", "small GPU" (up to 30 GiB) or "large GPU"
    device: torch.device  # where models and batches live
    rows: int  # rows of a batch
    tokens: int  # tokens of a row
    vocabulary: int  # entries of the tokenizer's
    layers: int  # of the model
    width: int  # of the model
    heads: int  # of its attention

    def gpt2(self, *, attention: str = "sdpa", **changes: Any) -> Any:
        """A GPT-2 of this machine's size with random weights, in train mode, without dropout."""
        require("transformers")
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = {"n_layer": self.layers, "n_embd": self.width, "n_head": self.heads, "n_positions": self.tokens}
        settings = {**sizes, "vocab_size": self.vocabulary, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
                    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
        config = GPT2Config(**{**settings, **changes}, attn_implementation=attention)
        model = GPT2LMHeadModel(config).to(self.device).train()
        model.loss_type = "ForCausalLM"  # Transformers guesses it from the class's name, and says so each time
        return model

    def batches(
        self, rows: int | None = None, tokens: int | None = None, vocabulary: int | None = None
    ) -> Iterator[torch.Tensor]:
        """Batches of real text without end: Python's standard library, in tokens learned from it.

        Yields:
            Token ids of shape [rows, tokens].
        """
        ids, length = library_tokens(vocabulary or self.vocabulary), tokens or self.tokens
        size = (rows or self.rows) * length
        while True:
            for start in range(0, len(ids) - size + 1, size):
                # a copy, since a view would keep the whole text on the device
                yield ids[start : start + size].view(-1, length).clone().to(self.device)

    def __str__(self) -> str:
        model = f"GPT-2 with {self.layers} layers of width {self.width}"
        return f"{self.kind}: {model}, batches of {self.rows} × {self.tokens} tokens"


def here() -> Here:
    """Return what suits this machine.

    Example:
        >>> here().rows
        8
    """
    kind = _kind()
    granted = host_bytes()
    is_small = torch.get_num_threads() == 1 or (granted is not None and granted < _SMALL_HOST_BYTES)
    size = "small CPU" if kind == "cpu" and is_small else kind
    return Here(kind, torch.device("cpu" if kind == "cpu" else "cuda"), **_SIZES[size])


def _kind() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return "large GPU" if torch.cuda.get_device_properties(0).total_memory > _LARGE_BYTES else "small GPU"


@lru_cache(maxsize=4)
def library_tokens(vocabulary: int) -> torch.Tensor:
    """Text of Python's standard library as token ids, by a byte-pair tokenizer that is trained on it.

    Returns:
        Ids of shape [tokens], about a million.
    """
    tokenizers = require("tokenizers")
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(library.glob("*.py"))[:_FILES]]
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
    return torch.tensor([token for each in tokenizer.encode_batch(texts) for token in each.ids], device="cpu")
