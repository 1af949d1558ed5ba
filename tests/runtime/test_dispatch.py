"""Modes that watch operators, beside the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.measuring.ledger import Ledger
from memlab.runtime.dispatch import WatchingMode


@pytest.mark.full
def test_a_mode_is_never_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model.compile(backend="eager")
    with Ledger():
        for rows in (2, 3, 4):
            model(torch.ones(rows, 4)).square().mean().backward()
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(Ledger.__torch_dispatch__.__code__)
    assert entries == []
    torch.compiler.reset()


def test_where_a_tensor_is_has_nothing_to_be_watched() -> None:
    seen = []

    class Watch(WatchingMode):
        def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs)

    with FakeTensorMode():
        fake = torch.empty(2)
    with Watch():
        assert fake.is_cpu  # asks the tensor, which is on the meta device
        assert fake.neg().is_cpu
    assert seen == ["aten.neg.default"]
