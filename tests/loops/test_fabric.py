"""Loops written with Lightning Fabric."""

from __future__ import annotations

import functools
from contextlib import ExitStack

import pytest

from memlab import Workload, fit
from tests.loops import tolerances
from tests.loops.cases import CASES, Case
from tests.loops.running import deviation

fabric_module = pytest.importorskip("lightning_fabric")

STEPS = 10
PLANS = (
    "--accumulate 4",
    "--checkpoint",
    "--accumulate 4 --checkpoint",
    "--offload activations",
    "--offload optimizer",
    "--chunk-loss",
    "--accumulate 4 --checkpoint --offload activations,optimizer --chunk-loss",
)


def run(case: Case, plan: str | None, attached: str, precision: str) -> list[float]:
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = case.model()
    optimizer = case.optimizer(model)
    own_model, own_optimizer = model, optimizer
    seen = []
    with ExitStack() as stack:
        if plan is not None and attached == "before":
            stack.enter_context(fit(Workload(model, optimizer), plan))
        model, optimizer = fabric.setup(model, optimizer)
        if plan is not None and attached == "after":
            workload = Workload.find({"model": model, "optimizer": optimizer, "fabric": fabric})
            assert workload is not None
            assert (workload.model, workload.optimizers) == (own_model, [own_optimizer])
            stack.enter_context(fit(workload, plan))
        for step in range(STEPS):
            loss = case.loss(model, case.batch(step))
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), float(norm)]
    assert "forward" not in vars(own_model)
    return seen


@functools.cache
def untouched(case: Case, precision: str) -> list[float]:
    return run(case, None, "before", precision)


@pytest.mark.few(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("name", ["tied", "module-logits"])
def test_the_loop_in_fp32(name: str, attached: str, plan: str) -> None:
    case = CASES[name]
    if not case.has_head:
        plan = plan.replace("--chunk-loss", "").strip()
    found, expected = run(case, plan, attached, "32-true"), untouched(case, "32-true")
    # norms of gradients at weights that have moved apart by rounding
    assert deviation(found, expected) <= 3 * tolerances.LOSS


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("name", ["tied", "module-logits"])
def test_the_loop_in_bf16_mixed(name: str, attached: str, plan: str) -> None:
    case = CASES[name]
    if not case.has_head:
        plan = plan.replace("--chunk-loss", "").strip()
    found, expected = run(case, plan, attached, "bf16-mixed"), untouched(case, "bf16-mixed")
    if "accumulate" in plan or "chunk" in plan:
        assert deviation(found, expected) <= 5e-2
    else:
        assert found == expected
