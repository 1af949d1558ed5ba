"""Training runs for engines in this process: losses of a loop, and the workload it leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from memlab import Workload

STEPS = 10
IDS = torch.randint(0, 131, (STEPS, 4, 17), generator=torch.Generator().manual_seed(1))  # [steps, b, s]
LABELS = torch.randint(0, 3, (STEPS, 4), generator=torch.Generator().manual_seed(2))  # [steps, b]
ROWS = torch.randn(STEPS, 4, 37, generator=torch.Generator().manual_seed(3))  # [steps, b, features]


class Tower(nn.Module):
    """Residual blocks of an odd width with dropout, and BatchNorm."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))
            for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, rows: torch.Tensor) -> Any:
        for block in self.blocks:
            rows = rows + block(rows)
        return self.head(self.norm(rows))


def tower(width: int = 37) -> Workload:
    """With a frozen block and three groups, and rates that fall."""
    torch.manual_seed(0)
    model = Tower(width)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    groups = [
        {"params": [*model.blocks.parameters()]},
        {"params": [*model.norm.parameters()], "weight_decay": 0.3},
        {"params": [*model.head.parameters()], "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return Workload(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))


def bert() -> Workload:
    """A BERT of two blocks, with dropout."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=131, hidden_size=36, num_hidden_layers=2, num_attention_heads=4, intermediate_size=53, num_labels=3
    )
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01)
    return Workload(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))


def loss_of(workload: Workload, step: int) -> torch.Tensor:
    """The loss of a workload's model on a batch."""
    model = workload.model
    rows, ids, labels = (each[step].to(workload.device) for each in (ROWS, IDS, LABELS))
    if isinstance(model, Tower):
        width = model.head.in_features
        return nn.functional.cross_entropy(model(rows.repeat(1, 1 + width // 37)[:, :width]), labels)
    is_classifier = isinstance(model, BertForSequenceClassification)
    loss: torch.Tensor = model(input_ids=ids, labels=labels if is_classifier else ids).loss
    return loss


def go(
    workload: Workload, first: int, last: int, *, every: int = 1, clips: bool = True, to_none: bool = True
) -> list[float]:
    """Train as people do on batches from `first` to `last`, then evaluate; random numbers are those of `first`.

    Args:
        workload: with a scheduler.
        first: number of the first batch.
        last: number of the batch after the last.
        every: batches per step.
        clips: whether the loop clips.
        to_none: how gradients are cleared.

    Returns:
        Losses.
    """
    (optimizer,) = workload.optimizers
    torch.manual_seed(first)
    losses = []
    for step in range(first, last):
        loss = loss_of(workload, step)
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % every:
            continue
        if clips:
            nn.utils.clip_grad_norm_(workload.model.parameters(), 0.3)
        optimizer.step()
        workload.scheduler.step()
        optimizer.zero_grad(set_to_none=to_none)
    workload.model.eval()
    with torch.no_grad():
        losses.append(loss_of(workload, first).item())
    workload.model.train()
    return losses
