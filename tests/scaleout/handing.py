"""Handing a run over in its middle, beside one that stays here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, launch
from tests.helpers.needs import needs
from tests.scaleout.runs import gpt2, trained


def case(flags: str, *others: Any, **options: Any) -> Any:
    """Flags, and what goes with them, as a case of a test; it is skipped where what they need is missing."""
    return pytest.param(flags, *others, marks=[needs(extra="deepspeed")] if "zero" in flags else [], **options)


def engines(*flags: str) -> list[Any]:
    """Flags as cases of a test."""
    return [case(each) for each in flags]


def assert_alike(one: nn.Module, other: nn.Module, *, rtol: float, atol: float) -> None:
    """Two models have the same weights, up to rounding."""
    for (name, here), there in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))


def handed_over(
    flags: str,
    nproc: int,
    batches: Sequence[torch.Tensor],
    train: Callable[[Workload, Any], list[float]] = trained,
    make: Callable[[], Workload] = gpt2,
) -> tuple[list[float], list[float], Workload, Workload]:
    """Losses and workloads: of a run in this process, and of one with its middle third elsewhere."""
    third = len(batches) // 3
    reference, workload = make(), make()
    expected = train(reference, batches[:third]) + train(reference, batches[third : 2 * third])
    expected += train(reference, batches[2 * third :])
    losses = train(workload, batches[:third])
    kept = [*workload.model.parameters()], workload.optimizers[0], workload.model
    middle = batches[third : 2 * third]
    losses += launch(lambda there: train(there, middle), workload, f"--scale {flags}", nproc=nproc).value
    assert all(a is b for a, b in zip(kept[0], workload.model.parameters(), strict=True))
    assert "forward" not in vars(workload.model)
    losses += train(workload, batches[2 * third :])
    return expected, losses, reference, workload
