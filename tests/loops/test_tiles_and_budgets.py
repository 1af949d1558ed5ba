"""Every kind of model in the plain loop, with its feed-forward parts in tiles and its blocks held to a budget."""

from __future__ import annotations

import pytest

from memlab import Workload
from memlab.techniques.tiling import tiling
from tests.loops import tolerances
from tests.loops.cases import CASES
from tests.loops.running import deviation, fitted, gradient_error, gradients, losses_under, plain_loop, untouched

PLANS = ("--tile 3", "--checkpoint budget:96KiB", "--accumulate 4 --checkpoint budget:32KiB --tile 2")


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "LARGE_BYTES", 1)


@pytest.mark.few(5, full=18)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_blocks])
def test_gradients_are_those_of_the_untouched_model(name: str, plan: str) -> None:
    case = CASES[name]
    model = case.model()
    load = Workload(model, case.optimizer(model))
    expected = [gradients(model, case, step) for step in range(2)]
    with fitted(load, plan):
        found = [gradients(model, case, step) for step in range(2)]
    for step in range(2):
        # a LayerNorm bias of BERT is where fp32 itself is less exact, as in test_models
        assert gradient_error(found[step], expected[step]) <= (4e-6 if "bert" in name else tolerances.GRADIENT)


@pytest.mark.few(0, full=2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt2", "tied", "llama"])
def test_losses_of_a_hundred_steps(name: str, plan: str) -> None:
    losses = losses_under(name, plain_loop, plan, 100)
    assert deviation(losses, untouched(name, plain_loop, 100)) <= tolerances.LOSS
