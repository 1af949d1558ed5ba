"""Entries of `optimizer.state` that the loop holds: after a plan they are the live ones again, as without memlab."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.runtime.state_entries import kept_of

PLANS = (
    "--offload optimizer",
    "--adam8bit",
    "--precision pure-bf16",
    "--optim adafactor",
    "--optim adamw4bit",
    "--adam8bit --offload optimizer",
)


def train(workload: Workload, steps: int) -> None:
    for _ in range(steps):
        workload.model(torch.randn(8, 16)).square().mean().backward()
        workload.optimizers[0].step()
        workload.optimizers[0].zero_grad()


def trained() -> tuple[Workload, nn.Parameter]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    workload = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(workload, 2)
    return workload, model[0].weight


@pytest.mark.parametrize("flags", PLANS)
def test_an_entry_that_is_held_is_the_live_one_again(flags: str) -> None:
    workload, weight = trained()
    state = workload.optimizers[0].state
    before = state[weight]
    session = fit(workload, flags)
    train(workload, 2)
    during = state[weight]
    session.switch(f"{flags} --checkpoint")
    train(workload, 1)
    session.undo()
    assert state[weight] is before
    assert before.keys() == during.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(before[name] is during[name] for name in before)  # what is done to one of them is done to the live ones
    before["exp_avg"].zero_()
    train(workload, 1)
    assert all(before[name] is state[weight][name] for name in before)


@pytest.mark.parametrize("flags", ["--offload optimizer", "--adam8bit"])
def test_what_the_loop_does_with_an_entry_after_the_plan_counts(flags: str) -> None:
    weights = []
    for plan in ("", flags):
        workload, weight = trained()
        entry = workload.optimizers[0].state[weight]
        with fit(workload, plan):
            pass
        entry["exp_avg"].zero_()
        train(workload, 1)
        weights.append(weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4 if "8bit" in flags else 0)


def test_an_entry_from_before_a_state_dict_was_loaded_is_no_live_one() -> None:
    workload, weight = trained()
    (optimizer,) = workload.optimizers
    before = optimizer.state[weight]
    with fit(workload, "--offload optimizer"):
        optimizer.load_state_dict(optimizer.state_dict())
        train(workload, 1)
    assert optimizer.state[weight] is not before


@pytest.mark.parametrize("flags", ["--precision pure-bf16", "--precision pure-bf16 --offload optimizer"])
def test_packed_moments_are_read_in_the_loops_own_format(flags: str) -> None:
    workload, weight = trained()
    with fit(workload, flags):
        train(workload, 1)
        entry = workload.optimizers[0].state[weight]
        assert entry["exp_avg"].dtype is torch.float32
        assert torch.dot(weight.data.flatten(), entry["exp_avg"].flatten()).isfinite()
        train(workload, 1)
        kept = {name: value for name, value in kept_of(workload.optimizers[0].state[weight]).items() if value.dim()}
        assert {value.dtype for value in kept.values()} == {torch.bfloat16}


def test_an_entry_that_the_loop_lets_go_of_is_kept_no_longer() -> None:
    workload, _weight = trained()
    saved = workload.optimizers[0].state_dict()  # torch hands out the live entries
    with fit(workload, "--precision pure-bf16"):
        moments = weakref.ref(saved["state"][0]["exp_avg"])
        del saved
        train(workload, 1)
        assert moments() is None


def test_an_entry_is_the_live_one_again_after_a_step_that_failed() -> None:
    workload, weight = trained()
    (optimizer,) = workload.optimizers
    entry = optimizer.state[weight]
    with fit(workload, "--precision pure-bf16"):
        train(workload, 1)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(TypeError):
            train(workload, 1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        train(workload, 1)
    assert optimizer.state[weight] is entry


def test_two_models_under_one_optimizer_keep_their_entries() -> None:
    models = [nn.Linear(16, 64), nn.Linear(64, 1)]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])

    def step() -> None:
        models[1](models[0](torch.randn(4, 16))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    entries = {p: optimizer.state[p] for model in models for p in model.parameters()}
    live = [fit(Workload(model, optimizer), "") for model in models]
    for plan in ("--adam8bit", ""):
        for session in live:
            session.switch(plan)
        step()
    for session in live:
        session.undo()
    assert all(optimizer.state[p] is entry for p, entry in entries.items())
