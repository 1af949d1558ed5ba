"""Number formats and converted optimizers over 100 steps, against fp32; the tolerances are in one table."""

from __future__ import annotations

import functools

import pytest
import torch

from memlab import Workload
from tests.helpers.needs import needs
from tests.loops import tolerances
from tests.loops.cases import CASES, Case
from tests.loops.running import Loop, fitted, plain_loop

_STEPS = 100
_ROWS = [(plan, name, bound) for plan, models in tolerances.LOSSY.items() for name, bound in models.items()]


def skipping(skipped: frozenset[int]) -> Loop:
    """The plain loop, leaving out the updates of some steps."""

    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            loss = case.loss(model, case.batch(step))
            loss.backward()
            if step not in skipped:
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


@functools.cache
def in_fp32(name: str, skipped: frozenset[int]) -> list[float]:
    model = CASES[name].model()
    return skipping(skipped)(model, CASES[name].optimizer(model), CASES[name], _STEPS)


@pytest.mark.few(0, full=4)
@needs(extra="bitsandbytes")
@pytest.mark.parametrize(("plan", "name", "bound"), _ROWS)
def test_losses_stay_close_to_fp32(plan: str, name: str, bound: float) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = case.optimizer(model)
    with fitted(Workload(model, optimizer), plan, exact=False) as session:
        losses = plain_loop(model, optimizer, case, _STEPS)
        # the loss scale is found by trying: fp32 leaves out the updates that fp16 had to skip
        skipped = frozenset(entry.step - 1 for entry in session.log if "update skipped" in entry.text)
    assert len(skipped) <= 4
    reference = in_fp32(name, skipped)
    distance = max(abs(a - b) for a, b in zip(losses, reference, strict=True)) / reference[0]
    assert distance <= bound, distance


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt2", "vit", "contrastive"])
def test_fp16_skips_what_a_grad_scaler_would_skip(name: str) -> None:
    case = CASES[name]
    model = case.model()
    optimizer = case.optimizer(model)
    scaler = torch.amp.GradScaler("cpu")
    expected = []
    for step in range(20):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = case.loss(model, case.batch(step))
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        expected += [step] if scaler.get_scale() < before else []
        optimizer.zero_grad()
    model = case.model()
    optimizer = case.optimizer(model)
    with fitted(Workload(model, optimizer), "--fp16") as session:
        plain_loop(model, optimizer, case, 20)
    assert [entry.step - 1 for entry in session.log if "update skipped" in entry.text] == expected
