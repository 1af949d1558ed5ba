"""Plans changed while training on a GPU: losses and weights are those of the run that nobody touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.needs import needs
from tests.loops.cases import CASES
from tests.loops.running import deviation, plain_loop
from tests.loops.tolerances import LOSS
from tests.rescue.test_switching import Move, moves, plans, run, sequences

pytestmark = [needs(gpu=1), pytest.mark.timeout(600)]

MOST_SWITCHES = 10
_OFFLOADS = ("", "optimizer", "activations", "params", "activations,optimizer,params")


@sequences(20, 100)
@given(moves(plans(offloads=_OFFLOADS), MOST_SWITCHES), st.sampled_from(["gpt2", "tied"]))
def test_exact_plans_change_nothing(sequence: list[Move], name: str) -> None:
    case = CASES[name].on("cuda")
    losses, _ = run(case, sequence)
    model = case.model()
    assert deviation(losses, plain_loop(model, case.optimizer(model), case, len(losses))) <= LOSS
