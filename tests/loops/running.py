"""Running one loop twice, untouched and under a plan, and comparing what came out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memlab import Workload, fit
from memlab.session import Session
from memlab.session.snapshot import Snapshot
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.snapshots import changed_between
from tests.loops.cases import CASES, Case

Optimizer = torch.optim.Optimizer
Loop = Callable[[nn.Module, Optimizer, Case, int], list[float]]

LOSSLESS_PLANS = (
    "--accumulate 4",
    "--checkpoint",
    "--accumulate 4 --checkpoint",
    "--offload activations",
    "--offload optimizer",
    "--offload params",
    "--checkpoint --offload params,optimizer",
    "--chunk-loss",
)
EVERYTHING = "--accumulate 4 --checkpoint --offload activations,optimizer,params"


def plans_for(case: Case) -> list[str]:
    """Plans of lossless techniques that apply to a case."""
    return [
        plan
        for plan in LOSSLESS_PLANS
        if (case.has_blocks or ("checkpoint" not in plan and "params" not in plan))
        and (case.has_head or "chunk" not in plan)
    ]


def everything_for(case: Case) -> str:
    """All lossless techniques that apply to a case, at once."""
    plan = EVERYTHING if case.has_blocks else EVERYTHING.replace("--checkpoint ", "").replace(",params", "")
    return plan + (" --chunk-loss" if case.has_head else "")


@contextmanager
def fitted(workload: Workload, plan: str, schedulers: Sequence[Any] = (), *, exact: bool = True) -> Iterator[Session]:
    """A session whose undo is checked: structure as before, and (when exact) every value as before the undo."""
    optimizers = list(workload.optimizers)  # one that is made later has no before
    before = fingerprint(workload.model, optimizers, schedulers)
    values = Snapshot(workload)
    fit(workload, plan).undo()
    if exact:
        assert changed_between(values, Snapshot(workload)) == []
    assert differing(before, fingerprint(workload.model, optimizers, schedulers)) == []
    session = fit(workload, plan)
    try:
        yield session
        values = Snapshot(workload)
    finally:
        session.undo()
    if exact:
        assert changed_between(values, Snapshot(workload)) == []
    after = fingerprint(workload.model, optimizers, schedulers)
    assert differing(before, after) == []


def plain_loop(model: nn.Module, optimizer: Optimizer, case: Case, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = case.loss(model, case.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(model: nn.Module, case: Case, step: int = 0) -> dict[str, torch.Tensor]:
    """The gradient of one batch, per parameter; the model is left without gradients."""
    case.loss(model, case.batch(step)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative distance over parameters.

    The norm of the difference over the norm of the gradient; for parameters whose gradient is next to
    nothing (under a thousandth of the largest one, such as the bias of attention keys, whose true gradient
    is zero) over a thousandth of the largest.
    """
    assert found.keys() == expected.keys()
    largest = max(float(g.double().norm()) for g in expected.values())
    return max(
        float((found[name].double() - g.double()).norm()) / max(float(g.double().norm()), 1e-3 * largest)
        for name, g in expected.items()
    )


@functools.cache
def untouched(name: str, loop: Loop, steps: int) -> tuple[float, ...]:
    """Losses of a loop without memlab."""
    case = CASES[name]
    model = case.model()
    return tuple(loop(model, case.optimizer(model), case, steps))


def losses_under(name: str, loop: Loop, plan: str, steps: int, *, exact: bool = True) -> list[float]:
    """Losses of the same loop under a plan."""
    case = CASES[name]
    model = case.model()
    optimizer = case.optimizer(model)
    with fitted(Workload(model, optimizer), plan, exact=exact):
        return loop(model, optimizer, case, steps)


def deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative distance between two runs, step by step."""
    assert len(losses) == len(reference)
    return max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(losses, reference, strict=True))
