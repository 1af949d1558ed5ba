"""Fake twins, and a mode that lists the operators a step on them dispatches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.runtime.dispatch import TORCH

# torch 2.14 gives grouped heads to the efficient kernel, and on a B200 256 channels to cuDNN
SINCE_2_14 = TORCH >= (2, 14)
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Operators(TorchDispatchMode):
    """Lists every aten operator, with the dtype of its first result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if func.name().startswith("aten::"):
            self.seen.append((func.name().removeprefix("aten::"), getattr(first, "dtype", None)))
        return out

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]

    def dtypes(self, name: str) -> list[torch.dtype | None]:
        return [dtype for seen, dtype in self.seen if seen == name]

    def count(self, name: str) -> int:
        return self.names.count(name)


def twin_of(model: nn.Module) -> nn.Module:
    with FakeCopyMode(FAKE):
        return copy.deepcopy(model)


def fake(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = False) -> torch.Tensor:
    with FAKE:
        return torch.empty(shape, dtype=dtype, requires_grad=trained)
