"""Dropout under accumulation: the same random numbers as a loop that accumulates by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memlab import Workload
from tests.loops import tolerances
from tests.loops.cases import CASES, Case, SelfJudging, Tower, TwoTowers, gpt2
from tests.loops.running import deviation, fitted, plain_loop

_PARTS = 4
_STEPS = 20


def _micro_batches(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        pieces = {key: value.tensor_split(_PARTS) for key, value in batch.items()}
        return [{key: value[i] for key, value in pieces.items()} for i in range(_PARTS)]
    pieces = [value.tensor_split(_PARTS) for value in batch]
    return list(zip(*pieces, strict=True))


def _targets(micro_batch: Any) -> int:
    if isinstance(micro_batch, dict):
        return int((micro_batch["labels"][:, 1:] != -100).sum())
    return len(micro_batch[1])


def accumulating_by_hand(case: Case) -> tuple[list[float], torch.nn.Module]:
    model = case.model()
    optimizer = case.optimizer(model)
    torch.manual_seed(7)
    losses = []
    for step in range(_STEPS):
        micro_batches = _micro_batches(case.batch(step))
        total = sum(map(_targets, micro_batches))
        whole = 0.0
        for micro_batch in micro_batches:
            loss = case.loss(model, micro_batch) * (_targets(micro_batch) / total)
            loss.backward()
            whole += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole)
    return losses, model


def joining_by_hand(case: Case, loss_of: Any) -> tuple[list[float], torch.nn.Module]:
    """Outputs of micro-batches, made one after another, and the loss over all of them."""
    model = case.model()
    optimizer = case.optimizer(model)
    torch.manual_seed(7)
    losses = []
    for step in range(_STEPS):
        inputs, targets = case.batch(step)
        loss = loss_of(model, [inputs.tensor_split(_PARTS), targets])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def under_memlab(case: Case, plan: str) -> tuple[list[float], torch.nn.Module]:
    model = case.model()
    optimizer = case.optimizer(model)
    with fitted(Workload(model, optimizer), plan):
        torch.manual_seed(7)
        return plain_loop(model, optimizer, case, _STEPS), model


def assert_same(found: tuple[list[float], torch.nn.Module], expected: tuple[list[float], torch.nn.Module]) -> None:
    assert deviation(found[0], expected[0]) <= tolerances.LOSS
    for mine, theirs in zip(found[1].parameters(), expected[1].parameters(), strict=True):
        # Adam turns a rounding difference of a gradient near zero into one of its step: lr 1e-3, 20 steps
        assert float((mine - theirs).abs().max()) <= 1e-3
        assert float((mine - theirs).norm()) <= 1e-3 * float(theirs.norm()) + 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "plan", ["--accumulate 4", "--accumulate 4 --checkpoint", "--accumulate 4 --offload activations"]
)
@pytest.mark.parametrize("name", ["gpt2", "module-loss"])
def test_fused_form(name: str, plan: str) -> None:
    build = {"gpt2": lambda: gpt2(0.1), "module-loss": lambda: SelfJudging(0.1)}[name]
    case = replace(CASES[name], build=build)
    assert_same(under_memlab(case, plan), accumulating_by_hand(case))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "plan", ["--accumulate 4", "--accumulate 4 --checkpoint", "--accumulate 4 --offload activations"]
)
def test_replay_form(plan: str) -> None:
    case = replace(CASES["module-logits"], build=lambda: Tower(dropout=0.1))

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(torch.cat([model(part) for part in inputs]), targets)

    assert_same(under_memlab(case, plan), joining_by_hand(case, loss_of))


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["--accumulate 4", "--accumulate 4 --checkpoint"])
def test_contrastive_loss_over_the_whole_batch(plan: str) -> None:
    case = replace(CASES["contrastive"], build=lambda: TwoTowers(0.1))

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        pairs = [model(part, part.roll(1, 1)) for part in batch[0]]
        left, right = (torch.cat(side) for side in zip(*pairs, strict=True))
        similarity, positives = left @ right.t() / 0.1, torch.arange(len(left))
        return (F.cross_entropy(similarity, positives) + F.cross_entropy(similarity.t(), positives)) / 2

    assert_same(under_memlab(case, plan), joining_by_hand(case, loss_of))


def test_checkpointing_draws_the_same_numbers_as_without() -> None:
    case = replace(CASES["gpt2"], build=lambda: gpt2(0.1))
    losses = [
        under_memlab(case, plan)[0] for plan in ("", "--checkpoint", "--checkpoint every:2", "--checkpoint selective")
    ]
    assert losses[1:] == [losses[0]] * 3
