from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as of_torch
from torch.utils import _foreach_utils

from memlab.hardware.gpus import gpu
from memlab.trace.cuda_choices import cuda_choices
from tests.trace.cuda_twins import FAKE, Operators, fake, twin_of

A100 = gpu("A100 80GB")


def step(kind: Any, *, traced: bool = True, **settings: Any) -> list[str]:
    model = twin_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    model(fake(3, 4)).sum().backward()
    if not traced:
        with FAKE, Operators() as operators:
            optimizer.step()
        return operators.names
    with cuda_choices(A100), FAKE, Operators() as operators:
        optimizer.step()
    return operators.names


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_updates_are_made_of_all_parameters_at_once(kind: Any) -> None:
    assert any(name.startswith("_foreach_") for name in step(kind))
    assert not any(name.startswith("_foreach_") for name in step(kind, traced=False))


def test_what_the_user_has_set_is_kept() -> None:
    assert not any(name.startswith("_foreach_addc") for name in step(torch.optim.AdamW, foreach=False))
    assert "_fused_adamw_" in step(torch.optim.AdamW, fused=True)


def test_clipping_takes_the_norms_of_all_gradients_at_once() -> None:
    model = twin_of(nn.Linear(4, 4))
    model(fake(3, 4)).sum().backward()

    with cuda_choices(A100), Operators() as operators:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert {"_foreach_norm.Scalar", "_foreach_mul_.Tensor"} <= set(operators.names)


def test_torchs_own_names_are_put_back() -> None:
    before = [(module, dict(vars(module))) for module in (of_torch, _foreach_utils)]

    with cuda_choices(A100):
        assert "cpu" in _foreach_utils._get_foreach_kernels_supported_devices()

    assert all(vars(module) == names for module, names in before)
    assert "cpu" not in _foreach_utils._get_foreach_kernels_supported_devices()
