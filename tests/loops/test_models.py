"""Every kind of model in the plain loop: gradients and losses under each lossless plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from memlab import Workload
from tests.loops import tolerances
from tests.loops.cases import CASES, Case
from tests.loops.running import (
    deviation,
    everything_for,
    fitted,
    gradient_error,
    gradients,
    losses_under,
    plain_loop,
    plans_for,
    untouched,
)

_EACH = [(name, plan) for name, case in CASES.items() for plan in plans_for(case)]
_TOGETHER = [(name, everything_for(case)) for name, case in CASES.items()]
# Transformers' causal models compute their loss in fp32 whatever they are themselves
_CAST_TO_FP32 = ("gpt2", "llama", "frozen", "prompt-tuning")


def _in_fp64(case: Case) -> Case:
    def widened(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return replace(case, build=lambda: case.build().double(), batch=lambda step: tree_map(widened, case.batch(step)))


@pytest.mark.few(15, full=60)
@pytest.mark.parametrize(("name", "plan"), [*_EACH, *_TOGETHER])
def test_gradients_are_those_of_the_untouched_model(name: str, plan: str) -> None:
    case = CASES[name]
    model = case.model()
    expected = [gradients(model, case, step) for step in range(2)]
    with fitted(Workload(model, case.optimizer(model)), plan):
        found = [gradients(model, case, step) for step in range(2)]
    for step in range(2):
        error = gradient_error(found[step], expected[step])
        if error > tolerances.GRADIENT:
            true_case = _in_fp64(case)
            rounding = gradient_error(expected[step], gradients(true_case.model(), true_case, step))
            assert error <= 2 * rounding, (error, rounding)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "plan"), [row for row in _TOGETHER if row[0] not in _CAST_TO_FP32])
def test_in_fp64_they_agree_to_the_last_digits(name: str, plan: str) -> None:
    case = _in_fp64(CASES[name])
    model = case.model()
    expected = gradients(model, case)
    with fitted(Workload(model, case.optimizer(model)), plan):
        assert gradient_error(gradients(model, case), expected) <= tolerances.GRADIENT_FP64


@pytest.mark.few(0, full=1)
@pytest.mark.parametrize("name", CASES)
def test_losses_of_a_hundred_steps(name: str) -> None:
    # activations to disk are exact and slow on tiny models: they have their own, shorter run
    plan = everything_for(CASES[name]).replace("activations,", "")
    losses = losses_under(name, plain_loop, plan, 100)
    assert deviation(losses, untouched(name, plain_loop, 100)) <= tolerances.LOSS


@pytest.mark.few(0, full=1)
@pytest.mark.parametrize("plan", plans_for(CASES["gpt2"]))
def test_losses_of_a_hundred_steps_under_each_plan(plan: str) -> None:
    steps = 10 if "activations" in plan else 100
    losses = losses_under("gpt2", plain_loop, plan, steps)
    assert deviation(losses, untouched("gpt2", plain_loop, steps)) <= tolerances.LOSS


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "plan", ["--checkpoint", "--offload activations,optimizer", "--checkpoint --offload activations,optimizer,params"]
)
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "tied"])
def test_what_keeps_the_batch_whole_is_exact_to_the_bit(name: str, plan: str) -> None:
    assert losses_under(name, plain_loop, plan, 10) == list(untouched(name, plain_loop, 10))


@pytest.mark.full
def test_the_losses_fall() -> None:
    for name in ("module-logits", "contrastive", "time-first", "tied"):
        losses = untouched(name, plain_loop, 100)
        assert losses[-1] < 0.7 * losses[0], name
