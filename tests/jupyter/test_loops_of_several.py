"""Loops that train several models: a step is recorded, and what is predicted for it is what its cells then need."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from memlab.plan import Plan
from memlab.session import sessions
from tests.jupyter.conftest import Cell

MAKE = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
def net(wide, out, width=64):
    return nn.Sequential(nn.Linear(wide, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))
G, D = net(16, 48), net(48, 1)
"""
JUDGED = """
for i in range(6):
    real = torch.randn(128, 48)
    fake = G(torch.randn(128, 16))
    optD.zero_grad()
    loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
    loss.backward()
    optD.step()
    optG.zero_grad()
"""
OF_EACH = "optG, optD = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (G, D))\n"
LOOPS = {
    "a judge of real and made ones": (
        OF_EACH,
        JUDGED
        + """    judged = -D(fake).mean()
    judged.backward()
    optG.step()
    total = 0.9 * loss.item() + judged.item()
""",
    ),
    "a penalty on gradients, and two updates of the judge": (
        OF_EACH,
        """
for i in range(12):
    real = torch.randn(128, 48)
    with torch.no_grad():
        fake = G(torch.randn(128, 16))
    mixed = (0.5 * real + 0.5 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(D(mixed).sum(), mixed, create_graph=True)
    loss = D(fake).mean() - D(real).mean() + (slope.norm(dim=1) - 1).square().mean()
    optD.zero_grad()
    loss.backward()
    optD.step()
    if i % 2:
        made = G(torch.randn(128, 16))
        judged = -D(made).mean()
        optG.zero_grad()
        judged.backward()
        optG.step()
""",
    ),
    "one optimizer, and gradients that live through the forward pass": (
        "opt = torch.optim.AdamW([*G.parameters(), *D.parameters()])\n",
        """
for i in range(6):
    x = torch.randn(128, 16)
    code = G(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = D(code)
    loss = out.float().square().mean() + code.abs().mean()
    opt.zero_grad(set_to_none=False)
    loss.backward()
    nn.utils.clip_grad_norm_([*G.parameters(), *D.parameters()], 1.0)
    opt.step()
""",
    ),
}
PLANS = ["--accumulate 1", "--accumulate 2", "--bf16", "--offload optimizer"]


def peaks(shell: Any) -> dict[str, Any]:
    return {row.plan: row for row in shell.run_line_magic("memfit", "report").measurements}


def most_of_what_is_needed(shell: Any, cell: Cell, made: str, loop: str) -> int:
    """Run a loop as it is written; return four fifths of its peak, in bytes."""
    cell(MAKE + made)
    cell(f"%%memfit\n{loop}")
    return int(peaks(shell)["as written"].peak_allocated_bytes * 0.8)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOOPS)
def test_a_recorded_step_tells_what_plans_need(shell: Any, cell: Cell, name: str) -> None:
    made, loop = LOOPS[name]
    cell(MAKE + made)
    assert cell(f"%%memfit\n{loop}").error is None
    predictions = {
        each.plan: each
        for each in shell.run_line_magic(
            "memfit", "predict --plans " + " ".join(f'"{flags}"' for flags in PLANS)
        ).predictions
    }
    for flags in PLANS:
        assert cell(f"%%memfit {flags}\n{loop}").error is None
        plan = "as written" if flags == PLANS[0] else flags
        measured, prediction = peaks(shell)[plan], predictions[plan]
        assert not prediction.refused
        assert prediction.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.04), flags
        assert prediction.samples_per_step == 128


def test_steps_and_rows_are_those_of_the_loop(shell: Any, cell: Cell) -> None:
    made, loop = LOOPS["a judge of real and made ones"]
    cell(MAKE + made)
    assert "6 steps" in cell(f"%%memfit\n{loop}").out
    assert peaks(shell)["as written"].samples_per_step == 128


@pytest.mark.full
def test_a_plan_is_found_for_all_of_them_by_running_steps_of_their_loop(shell: Any, cell: Cell) -> None:
    made, loop = LOOPS["a judge of real and made ones"]
    budget_bytes = most_of_what_is_needed(shell, cell, made, loop)
    before = [p.clone() for name in ("G", "D") for p in shell.user_ns[name].parameters()]
    found = shell.run_line_magic("memfit", f"find --budget {budget_bytes}B")
    assert found.measurement.peak_allocated_bytes <= budget_bytes
    assert found.plan.changes()
    predicted = {each.plan: each.peak_allocated_bytes for each in found.predictions}
    for trial in found.trials:
        assert trial.peak_allocated_bytes == pytest.approx(predicted[trial.plan], rel=0.04), trial.plan
    after = [p for name in ("G", "D") for p in shell.user_ns[name].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {each.workload.name: each.plan.label for each in sessions()} == {"G": "as written", "D": "as written"}
    assert cell(f"%%memfit {found.plan.label}\n{loop}").error is None
    *_, ran = peaks(shell).values()
    assert ran.peak_allocated_bytes <= 1.04 * found.measurement.peak_allocated_bytes


@pytest.mark.full
def test_a_budget_is_kept_by_a_plan_that_is_chosen_once_a_step_is_known(shell: Any, cell: Cell) -> None:
    made, loop = LOOPS["a judge of real and made ones"]
    budget_bytes = most_of_what_is_needed(shell, cell, made, loop)
    cell("%memfit undo")
    cell(MAKE + made)
    ran = cell(f"%%memfit --budget {budget_bytes}B\n{loop}")
    assert ran.error is None
    *_, chosen = peaks(shell).values()
    (prediction,) = [each for each in shell.run_line_magic("memfit", "report").predictions if each.plan == chosen.plan]
    assert chosen.plan != "as written"
    # which plan it is depends on speeds of this machine; so small, blocks that run again need 3 % more or less than is predicted
    assert chosen.peak_allocated_bytes <= 1.04 * prediction.peak_allocated_bytes
    assert prediction.peak_allocated_bytes <= budget_bytes


def test_a_plan_that_was_chosen_for_one_model_and_does_not_apply_to_the_next_ends_no_loop(
    shell: Any, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = iter(["--fp16", "--checkpoint"])  # fp16 as for a GPU without bf16
    monkeypatch.setattr("memlab.search.choose_plan", lambda *_, **__: (Plan.parse(next(chosen)), []))
    made, loop = LOOPS["a judge of real and made ones"]
    cell(MAKE + made)
    ran = cell(f"%%memfit --budget 8GiB\n{loop}")
    assert ran.error is None, ran.err
    assert [session.plan.label for session in sessions()] == ["--checkpoint", "--checkpoint"]
    assert "D: step 1: refused --fp16: precision: this cell trains G and D, and --fp16 treats" in " ".join(
        ran.out.split()
    )
    assert "G: step 2: --fp16 → as written" in ran.out


def test_trials_run_the_step_of_the_loop(shell: Any, cell: Cell) -> None:
    made, loop = LOOPS["a judge of real and made ones"]
    cell(MAKE + made)
    cell(f"%%memfit\n{loop}")
    before = [p.clone() for name in "GD" for p in shell.user_ns[name].parameters()]
    compared = shell.run_line_magic("memfit", 'compare "--bf16"')
    measured_bytes = peaks(shell)["as written"].peak_allocated_bytes
    assert compared.measurements[0].peak_allocated_bytes == pytest.approx(measured_bytes, rel=1e-3)
    assert all(map(torch.equal, before, [p for name in "GD" for p in shell.user_ns[name].parameters()]))


OF_THE_LOOP = (
    """
import copy
if "averaged" not in globals():
    averaged, running, frozen = copy.deepcopy(G), torch.zeros(1), net(48, 8).requires_grad_(False)
"""
    + JUDGED
    + """    judged = -D(fake).mean() + (frozen(fake) - frozen(real)).square().mean()
    judged.backward()
    optG.step()
    running.mul_(0.9).add_(loss.detach() + judged.detach())
    with torch.no_grad():
        for one, other in zip(averaged.parameters(), G.parameters()):
            one.lerp_(other, 0.01)
"""
)


def test_a_trial_leaves_what_the_loop_has_made_beside_its_models(shell: Any, cell: Cell) -> None:
    cell(MAKE + OF_EACH)
    assert cell(f"%%memfit\n{OF_THE_LOOP}").error is None
    names = shell.user_ns
    before = [names["running"].clone(), *(p.clone() for p in names["averaged"].parameters())]
    compared = shell.run_line_magic("memfit", 'compare "--bf16"')
    assert compared.measurements[0].peak_allocated_bytes == pytest.approx(
        peaks(shell)["as written"].peak_allocated_bytes, rel=5e-3
    )
    assert all(map(torch.equal, before, [names["running"], *names["averaged"].parameters()]))
    (predicted,) = shell.run_line_magic("memfit", 'predict --plans "--accumulate 1"').predictions
    assert predicted.peak_allocated_bytes == pytest.approx(compared.measurements[0].peak_allocated_bytes, rel=0.01)


def test_a_model_that_is_not_trained_is_freed_when_it_is_deleted(shell: Any, cell: Cell) -> None:
    cell(MAKE + OF_EACH)
    assert cell(f"%%memfit\n{OF_THE_LOOP}").error is None
    frozen = weakref.ref(shell.user_ns["frozen"][0].weight)
    cell("del frozen")
    gc.collect()
    assert frozen() is None
    said = cell('%memfit predict --plans "--bf16"')
    assert "cannot be run by itself: a model is gone whose parameters it used; measure plans" in said.err + said.out


@pytest.mark.parametrize("fails", ["D(fake[:, :3])", "fake @ fake"])
def test_an_error_that_the_loop_catches_is_its_own(shell: Any, cell: Cell, fails: str) -> None:
    loop = OF_THE_LOOP.replace(
        "    judged =", f"    try:\n        {fails}\n    except RuntimeError:\n        caught = i\n    judged ="
    )
    left = []
    for flags in ("", "%%memfit\n"):
        cell(MAKE + OF_EACH + "for name in ('averaged', 'caught'): globals().pop(name, None)")
        assert cell(f"{flags}{loop}").error is None
        assert shell.user_ns["caught"] == 5
        left.append(shell.user_ns["running"].item())
    assert left[0] == left[1]
    assert not torch.overrides._get_current_function_mode_stack()
    assert cell('%memfit predict --plans "--bf16"').error is None


def test_a_step_that_cannot_be_run_again_is_not_predicted(shell: Any, cell: Cell) -> None:
    made, _ = LOOPS["a judge of real and made ones"]
    cell(MAKE + made)
    cell(
        "%%memfit\nshift = torch.ones(8, 1, requires_grad=True) + 1\nfor _ in range(4):\n"
        "    loss = (D(G(torch.randn(8, 16))) + shift).mean()\n"
        "    optG.zero_grad(); optD.zero_grad(); loss.backward(); optG.step(); optD.step()\n"
    )
    ran = cell("%memfit predict")
    assert (
        "a step of the loop that trains G and D cannot be run by itself: a tensor with a graph was made"
        in ran.err + ran.out
    )
