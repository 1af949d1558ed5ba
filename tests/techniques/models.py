"""Small models and batches for the tests of techniques."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload


def gpt2(vocabulary: int = 4096, layers: int = 2, dropout: float = 0.0, width: int = 64) -> nn.Module:
    """GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_layer": layers, "n_head": 2, "n_embd": width, "vocab_size": vocabulary, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0)).train()


def ragged_batch(vocabulary: int = 4096, rows: int = 8, length: int = 32) -> dict[str, torch.Tensor]:
    """Token ids with targets of which every row counts another number."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, length - 3 * row - 1 :] = -100
    return {"input_ids": ids, "labels": labels}


def workload(model: nn.Module, lr: float = 1e-3, **batch: torch.Tensor) -> Workload:
    """A model with AdamW, ready to be measured."""
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=lr), batch=batch or None)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all gradients; they are then dropped."""
    found = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest relative distance of a gradient to what it should be."""
    assert len(found) == len(expected)
    largest = max(float(b.norm()) for b in expected)
    return max(
        float((a - b).norm()) / max(float(b.norm()), 1e-3 * largest) for a, b in zip(found, expected, strict=True)
    )


class Regressor(nn.Module):
    """A network whose forward takes inputs and targets and returns a loss of a chosen kind."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.reduction = reduction

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.layers(inputs)
        if self.reduction == "contrastive":
            return F.cross_entropy(logits @ logits.t(), torch.arange(len(logits)))
        if self.reduction == "root":
            return F.cross_entropy(logits, targets).sqrt()
        return F.cross_entropy(logits, targets, reduction=self.reduction)


def regression_batch(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and class targets."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


class Masked(nn.Module):
    """Writes to its outputs through `.data` once others have used them, as models of speech do that mask padding."""

    def __init__(self, *, in_blocks: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(32, 32)
        parts = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3 if in_blocks else 1)]
        self.parts = nn.ModuleList(parts) if in_blocks else parts[0]

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = output = self.enter(inputs).tanh()
        for part in self.parts if isinstance(self.parts, nn.ModuleList) else [self.parts]:
            output = output + part(output)
        hidden.data.masked_fill_(mask, 0.0)
        hidden[:, :4].data.mul_(2)
        return torch.cat([hidden[:, :4], output], 1)
