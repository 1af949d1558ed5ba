"""Other processes get a model as it is, and have it to themselves."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.techniques.offload import pool
from tests.techniques.models import gpt2, ragged_batch


def total(model: nn.Module) -> float:
    with torch.no_grad():
        return float(sum(p.double().sum() for p in model.parameters()))


def _spoils(model: nn.Module, optimizer: torch.optim.Optimizer, go: Any, said: Any) -> None:
    """Reads what it has once the process it comes from has gone on, then writes all over it."""
    go.get()
    said.put(total(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        for state in optimizer.state.values():
            state["exp_avg"].mul_(2.0)
    said.put(total(model))


@pytest.mark.skipif(not hasattr(pool.os, "register_at_fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("is_full", [False, True])
def test_a_process_that_is_forked_off_shares_nothing(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_descriptor: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    def losses(flags: str) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        context, seen, child = multiprocessing.get_context("fork"), [], []
        with fit(Workload(model, optimizer), flags):
            for step in range(4):
                loss = model(**ragged_batch()).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
                if step == 1:
                    go, said = context.SimpleQueue(), context.SimpleQueue()
                    process = context.Process(target=_spoils, args=(model, optimizer, go, said))
                    with monkeypatch.context() as patch:
                        if is_full:
                            patch.setattr(pool, "_reserve", no_room)
                        process.start()
                if step == 2:
                    go.put(None)
                    child = [said.get(), said.get()]
                    process.join()
        return seen, child

    expected = losses("")
    assert expected[1][0] != expected[1][1]
    assert losses("--offload optimizer,params") == expected


def _weighs(model: nn.Module, said: Any) -> None:
    said.put(total(model))


def test_a_process_that_is_spawned_gets_the_weights_under_pure_bf16() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--precision pure-bf16"):
        model(torch.ones(2, 8)).mean().backward()
        process = context.Process(target=_weighs, args=(model, said))
        process.start()
        assert said.get() == total(model)
        process.join()
