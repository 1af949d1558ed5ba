"""Ctrl-C at any line of a loop in training: it arises in the loop, and the next cell goes on from whole steps.

All plans, a thousand times: ``python -m tests.helpers.interruptions 22``.
"""

from __future__ import annotations

import gc
from typing import Any, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from memlab import Workload, fit
from memlab.errors import RefusalError
from memlab.rescue.loop_code import LoopCode
from tests.driving import loss_of, mlp
from tests.helpers.ctrl_c import interrupt, pythons_own_handler  # noqa: F401 - a fixture
from tests.helpers.interruptions import Rescue, at_line, campaign

pytestmark = pytest.mark.usefixtures("pythons_own_handler")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("plan", "rescue", "zeroes"),
    [
        ("", True, "first"),
        ("", "needed", "first"),
        ("--accumulate 2 --offload activations", False, "first"),
        ("--offload optimizer", False, "last"),
        ("--offload optimizer,activations,params --checkpoint", True, "first"),
        ("--release-grads", False, "first"),
        ("--release-grads", True, "last"),
        ("--release-grads --offload optimizer", False, "first"),
        ("--precision pure-bf16 --adam8bit", False, "first"),
        ("--fp16", True, "last"),
    ],
)
def test_the_next_cell_goes_on_from_whole_steps(plan: str, rescue: Rescue, zeroes: str) -> None:
    assert campaign(plan, 6, rescue=rescue, zeroes=zeroes) == {}


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", ["--checkpoint --fp16", "--chunk-loss --bf16", "--tile 2 --bf16"])
def test_no_casts_of_weights_are_kept_after_ctrl_c_while_torch_enters_autocast(plan: str) -> None:
    """They would be those of that moment for good: later steps would run with old weights."""
    assert campaign(plan, 40, rescue=False, zeroes="first", file="/autocast_mode.py") == {}


def test_an_interrupted_backward_pass_updates_all_parameters_first() -> None:
    """Without gradient release no parameter would be updated yet; with it some are, and cannot be put back."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = None
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(3):
            if step == 2:  # at the last gradient of all, when most parameters are updated
                handle = model[0].weight.register_hook(lambda _gradient: interrupt())
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step == 2:
                with pytest.raises(KeyboardInterrupt):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
        assert handle is not None
        handle.remove()
        loss_of(model, 3).backward()
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("watched", [True, False])
def test_an_error_in_a_backward_pass_leaves_a_loop_that_can_go_on(watched: bool) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(0 if watched else 2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        optimizer.zero_grad()
        handle = model[0].weight.register_hook(_stop)
        with pytest.raises(StopIteration):
            loss_of(model, 2).backward()
        handle.remove()
        if not watched:  # some weights are one update ahead by then
            with pytest.raises(RefusalError, match="goes on after an error has ended a backward pass"):
                optimizer.zero_grad()
        for step in range(3, 5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert len({float(state["step"]) for state in optimizer.state.values()}) == (1 if watched else 2)


def _stop(_gradient: torch.Tensor) -> None:
    raise StopIteration


def test_a_refused_loop_may_be_mended_and_run_again() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--release-grads"):
        loss_of(model, 0).backward()
        with pytest.raises(RefusalError, match="takes the norm of all gradients"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_a_closure_can_be_interrupted() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    reached = []

    def closure() -> torch.Tensor:
        interrupt()
        reached.append("past it")
        return loss_of(model, 0)

    with fit(Workload(model, optimizer), "--offload optimizer"), pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert reached == []


class _Nobody:
    """Rescuer of a loop's code that never runs."""


class _OfTheLoop(TorchFunctionMode):
    """A function mode of the loop's own."""


def test_watching_the_loops_code_begins_and_ends_whole_or_not_at_all() -> None:
    """What is exchanged of torch's, the loop's own modes among it, is there again after a Ctrl-C at any line."""
    callbacks = torch._dynamo.callback.callback_handler.start_callbacks
    before = [*callbacks]
    nth, came = 0, True
    while came:
        nth, came, code = nth + 1, False, LoopCode(cast("Any", _Nobody()))
        with _OfTheLoop() as mine:
            try:
                with at_line(nth):
                    code.begin()
                    code.begin()
                    code.end()
            except KeyboardInterrupt:
                came = True
            assert [mode for mode in _get_current_function_mode_stack() if mode is not code] == [mine]
            assert len(callbacks) <= len(before) + 1
            code.end()
            assert callbacks == before
            assert _get_current_function_mode_stack() == [mine]
    gc.enable()  # the last Ctrl-C may come where `at_line` itself ends
    assert nth > 30
