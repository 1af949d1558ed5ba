"""The loops of `tests/loops` on a GPU: what they compute under a plan is what they compute without it."""

from __future__ import annotations

import pytest
import torch

from tests.loops import tolerances
from tests.loops.cases import CASES
from tests.loops.running import deviation, everything_for, plain_loop, plans_for
from tests.loops.test_handwritten import HALF, LOOPS, PLANS, _without_fingerprint, scaled, traces

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STEPS = 6
_EVERYTHING = "--accumulate 3 --checkpoint --offload activations,optimizer,params"
_EACH = [(name, plan) for name, case in CASES.items() for plan in (*plans_for(case), everything_for(case))]
_LOSSY = [(name, plan) for plan, by_name in tolerances.LOSSY.items() for name in by_name]


@pytest.mark.few
@pytest.mark.parametrize("plan", [*PLANS, _EVERYTHING])
@pytest.mark.parametrize("name", ["tied", "tied-criterion"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_under_every_plan(loop: str, name: str, plan: str) -> None:
    case = CASES[name].on("cuda")
    if loop == "scheduling":
        found, expected = _without_fingerprint(case, LOOPS[loop], plan)
    else:
        found, expected = traces(case, LOOPS[loop], plan, STEPS)
    assert deviation(found, expected) <= tolerances.LOSS


@pytest.mark.few(30)
@pytest.mark.parametrize(("name", "plan"), _EACH)
def test_every_model_under_every_plan(name: str, plan: str) -> None:
    found, expected = traces(CASES[name].on("cuda"), plain_loop, plan, STEPS)
    assert deviation(found, expected) <= tolerances.LOSS


@pytest.mark.few
@pytest.mark.parametrize(("name", "plan"), _LOSSY)
def test_what_rounds_stays_near(name: str, plan: str) -> None:
    found, expected = traces(CASES[name].on("cuda"), plain_loop, plan, STEPS, exact=False)
    # steps that fp16 skips while its scale is found are not in `tolerances.LOSSY`
    bound = 5e-2 if "fp16" in plan else tolerances.LOSSY[plan][name]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= bound * expected[0]


@pytest.mark.few
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["tied", "tied-criterion"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_grad_scaler_in_the_loop(dtype: torch.dtype, name: str, plan: str) -> None:
    loop = scaled(dtype, clips=True, enabled=dtype is torch.float16, device="cuda")
    found, expected = traces(CASES[name].on("cuda"), loop, plan, STEPS)
    assert deviation(found, expected) <= HALF[dtype]
