"""A block whose forward changes whatever a forward can reach: what runs it again has to leave all of that as one run does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

LOG: list[torch.Size] = []
CALLS = 0
GENERATOR = torch.Generator()


def _noted(hidden: torch.Tensor) -> torch.Tensor:
    """A helper of a forward: what it changes belongs to no module."""
    global CALLS
    CALLS += 1
    LOG.append(hidden.shape)
    return hidden + 0.1 * torch.randn(hidden.shape, generator=GENERATOR)


class Chatty(nn.Module):
    """Changes globals, its class, a closure, an array, attributes and a buffer, and draws from two generators."""

    calls = 0

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.totals = np.zeros(2)
        self.times = 0
        self.generator = torch.Generator()
        self.register_buffer("count", torch.zeros(()))
        self._note = lambda: seen.append(len(seen))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        Chatty.calls += 1
        self._note()
        self.totals += 1
        self.times += 1
        self.count += 1
        noise = torch.randn(hidden.shape, generator=self.generator)
        return torch.tanh(self.inner(_noted(hidden))) + 0.1 * noise


def chatty(blocks: int) -> tuple[nn.Sequential, list[int]]:
    """Make a model of such blocks, with all that they change as it is at first; and the list that a closure holds."""
    global CALLS
    CALLS, Chatty.calls = 0, 0
    LOG.clear()
    GENERATOR.manual_seed(1)
    torch.manual_seed(0)
    seen: list[int] = []
    return nn.Sequential(*(Chatty(seen) for _ in range(blocks))), seen


def changed(model: nn.Sequential, seen: list[int]) -> tuple[object, ...]:
    """Return all that the forward of such a model changes, and its weights."""
    first: Any = model[0]
    own = (first.totals.tolist(), first.times, first.count.item(), first.generator.get_state().tolist())
    weights = [parameter.tolist() for parameter in model.parameters()]
    return CALLS, Chatty.calls, [*LOG], [*seen], GENERATOR.get_state().tolist(), own, weights
