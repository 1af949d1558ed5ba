"""Optimizers of other packages: watched, guarded and offloaded, they train as without memlab, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from memlab import Workload, fit
from tests.driving import loss_of, same, tiny_gpt2

bitsandbytes = pytest.importorskip("bitsandbytes")
prodigyopt = pytest.importorskip("prodigyopt")
schedulefree = pytest.importorskip("schedulefree")

Parameters = list[torch.nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "schedule-free AdamW": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=1e-3, warmup_steps=2),
    "schedule-free SGD": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=1e-2),
    "Prodigy": lambda parameters: prodigyopt.Prodigy(parameters, safeguard_warmup=True),
    "Lion": lambda parameters: bitsandbytes.optim.Lion(parameters, lr=1e-4),
    "Adafactor": lambda parameters: transformers.Adafactor(parameters, lr=None, relative_step=True),
}
# plan and protection by step: as written, protected, offloaded and on the way
PLANS: dict[str, Callable[[int], tuple[str, bool]]] = {
    "watched": lambda _step: ("", False),
    "guarded": lambda _step: ("", True),
    "offloaded": lambda _step: ("--offload optimizer", True),
    "parameters offloaded": lambda _step: ("--offload params", False),
    "switched": lambda step: (("", "--offload optimizer", "--offload params", "")[step], False),
}
_STEPS = 4


def _run(name: str, plan: Callable[[int], tuple[str, bool]] | None) -> tuple[list[float], Any, Any]:
    model = tiny_gpt2()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    has_modes = hasattr(optimizer, "eval")  # schedule-free ones have other weights for an evaluation
    losses = []
    for step in range(_STEPS):
        flags, rescue = (None, False) if plan is None else plan(step)
        with nullcontext() if flags is None else fit(Workload(model, optimizer), flags, rescue=rescue):
            if has_modes:
                optimizer.train()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if has_modes:
                optimizer.eval()
                losses.append(loss_of(model, step).item())
    return losses, dict(model.named_parameters()), optimizer.state_dict()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_train_as_without_memlab(name: str, plan: str) -> None:
    expected, found = _run(name, None), _run(name, PLANS[plan])
    assert found[0] == expected[0]
    assert same(found[1], expected[1])
    assert same(found[2], expected[2])
