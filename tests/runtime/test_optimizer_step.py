"""Taking over a step: the hook, buckets, layers of state, gradient scalers, interruptions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers

from memlab.runtime.buckets import buckets
from memlab.runtime.optimizer_step import run_step
from memlab.runtime.plain_step import plain_stepper, standin, take_over
from memlab.runtime.state_entries import State
from memlab.runtime.state_layers import remove_layer
from tests.driving import (
    Doubling,
    FailingAt,
    applied,
    assert_recovers_anywhere,
    deviation,
    loss_of,
    mlp,
    same,
    snapshot,
    techniques_of,
    train,
    with_gradients,
)

Optimizer = torch.optim.Optimizer
Make = Callable[[list[torch.nn.Parameter]], Optimizer]


class SuperStep(torch.optim.AdamW):
    """Calls the step of its base, which torch has wrapped a second time."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adam-single": lambda p: torch.optim.Adam(p, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "bnb": lambda p: bitsandbytes.optim.AdamW8bit(p),
    "adafactor": lambda p: transformers.Adafactor(p, lr=1e-3, relative_step=False, scale_parameter=False),
    "torch-adafactor": lambda p: torch.optim.Adafactor(p),
    "subclass": lambda p: SuperStep(p),
}


# --- the hook -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stepping_a_standin_does_nothing(name: str) -> None:
    model, optimizer = with_gradients(OPTIMIZERS[name])
    before = snapshot(model, optimizer)
    double = standin(optimizer)
    assert type(double) is type(optimizer)
    assert double.step(lambda: 3.0) == 3.0
    assert same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_step_taken_over_is_the_same_step(name: str) -> None:
    runs = []
    for is_taken_over in (False, True):
        model = mlp()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        if is_taken_over:
            optimizer.register_step_pre_hook(take_over(lambda live: run_step(live, [], 2**14)))
        runs.append((train(model, optimizer, range(5)), snapshot(model, optimizer)["state"]))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_runs_once_with_gradients_and_step_returns_its_loss(name: str, as_keyword: bool) -> None:
    model, optimizer = with_gradients(OPTIMIZERS[name])
    evaluations: list[bool] = []

    def closure() -> float:
        evaluations.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    optimizer.register_step_pre_hook(take_over(lambda live: run_step(live, [])))
    before = loss_of(model, 0).item()
    with torch.no_grad():
        returned = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)  # type: ignore[arg-type]
    assert evaluations == [True]
    assert returned == before
    assert loss_of(model, 0).item() != before


def test_hooks_of_the_user_run_once() -> None:
    _, optimizer = with_gradients(OPTIMIZERS["subclass"])
    calls: list[Optimizer] = []
    optimizer.register_step_post_hook(lambda live, args, kwargs: calls.append(live))
    optimizer.register_step_pre_hook(take_over(lambda live: run_step(live, [])))
    optimizer.step()
    assert calls == [optimizer]


def test_plain_stepper_updates_the_given_parameters_and_keeps_the_lists() -> None:
    model, optimizer = with_gradients(OPTIMIZERS["adamw"])
    first, *others = optimizer.param_groups[0]["params"]
    params, before = optimizer.param_groups[0]["params"], snapshot(model, optimizer)["parameters"]
    plain_stepper(optimizer)([first])
    after = snapshot(model, optimizer)["parameters"]
    assert [name for name in before if not same(before[name], after[name])] == ["0.weight"]
    assert optimizer.param_groups[0]["params"] is params
    assert list(optimizer.state) == [first]
    assert others[0] not in optimizer.state


def test_plain_stepper_keeps_the_lists_when_the_step_raises() -> None:
    _, optimizer = with_gradients(OPTIMIZERS["adamw"])
    params = optimizer.param_groups[0]["params"]
    with pytest.raises(torch.OutOfMemoryError), FailingAt(3):
        plain_stepper(optimizer)(params[:2])
    assert optimizer.param_groups[0]["params"] is params


# --- buckets --------------------------------------------------------------------------------------


def test_buckets_keep_the_order_and_hold_what_fits() -> None:
    model, optimizer = with_gradients(OPTIMIZERS["adamw"])
    parameters = list(model.parameters())
    assert [len(bucket) for bucket in buckets(optimizer, 2**30)] == [len(parameters)]
    assert [len(bucket) for bucket in buckets(optimizer, 1)] == [1] * len(parameters)
    small = list(buckets(optimizer, 8 * (96 * 16 + 96)))
    assert [p.shape for bucket in small for p in bucket] == [p.shape for p in parameters]
    assert [len(bucket) for bucket in small] == [2, 1, 3]


def test_parameters_without_a_gradient_are_in_no_bucket() -> None:
    model, optimizer = with_gradients(OPTIMIZERS["adamw"])
    model.get_parameter("0.weight").grad = None
    assert model.get_parameter("0.weight") not in {p for bucket in buckets(optimizer, 1) for p in bucket}


def test_an_optimizer_of_unknown_kind_gets_one_bucket() -> None:
    _, optimizer = with_gradients(OPTIMIZERS["subclass"])
    assert len(list(buckets(optimizer, 1))) == 1


# --- layers of state ------------------------------------------------------------------------------


def test_only_layers_down_to_the_lowest_per_step_one_are_opened() -> None:
    log: list[str] = []
    layers = [Doubling("a", log, per_step=False), Doubling("b", log, per_step=True), Doubling("c", log, per_step=False)]
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with applied(optimizer, layers):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert log == ["+b", "+c", "-c", "-b", "+b", "+c"]
        log.clear()
        optimizer.state_dict()
        assert log == ["-c", "-b", "-a"]


# --- gradient scalers -----------------------------------------------------------------------------


def losses_with_scaler(flags: str, is_fused: bool, is_scaled: bool) -> list[float]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_scaled)
    losses = []
    with applied(optimizer, flags):
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    return losses


# SGD shows a gradient that was not unscaled; Adam hardly does
@pytest.mark.parametrize("flags", ["", "--adam8bit", "--optim sgd", "--adam8bit --offload optimizer"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_gradient_scaler_is_served(flags: str, is_fused: bool) -> None:
    expected = losses_with_scaler(flags, is_fused, is_scaled=False)
    assert deviation(losses_with_scaler(flags, is_fused, is_scaled=True), expected) < 1e-6


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_with_infinite_gradients_is_skipped(is_fused: bool) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with applied(optimizer, "--adam8bit"):
        train(model, optimizer, range(1))
        before = snapshot(model, optimizer)
        scaler.scale(loss_of(model, 1) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same(snapshot(model, optimizer), before)
    assert scaler.get_scale() == 512.0


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "bnb"])
@pytest.mark.parametrize("seen", [0, 2])
def test_a_plain_step_interrupted_anywhere_can_be_completed(name: str, seen: int) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, range(seen))
    optimizer.zero_grad()
    loss_of(model, seen).backward()
    assert_recovers_anywhere(model, optimizer, [])


def test_without_backup_no_entry_is_half_made() -> None:
    for operation in range(0, 60, 7):
        _, optimizer = with_gradients(OPTIMIZERS["adam-single"])
        with pytest.raises(torch.OutOfMemoryError), FailingAt(operation):
            run_step(optimizer, [], 2**14, backup=False)
        assert all({"step", "exp_avg", "exp_avg_sq"} == state.keys() for state in optimizer.state.values())


def test_state_is_packed_even_when_packing_is_interrupted() -> None:
    class Interrupted(Doubling):
        has_raised = False

        def pack_state(self, optimizer: Optimizer, parameter: torch.nn.Parameter, state: State) -> State:
            if not self.has_raised and len(self.log) == 3:
                self.has_raised = True
                raise KeyboardInterrupt
            return super().pack_state(optimizer, parameter, state)

    (model, optimizer), (twin, plain) = with_gradients(OPTIMIZERS["adamw"]), with_gradients(OPTIMIZERS["adamw"])
    technique = Interrupted("a", [], per_step=True)
    done: set[torch.nn.Parameter] = set()
    with pytest.raises(KeyboardInterrupt):
        run_step(optimizer, [technique], done=done)
    assert done == set(model.parameters())
    remove_layer(optimizer, technique)
    plain.step()
    assert same(snapshot(model, optimizer), snapshot(twin, plain))


def test_offload_under_an_interrupted_stepper_keeps_its_files() -> None:
    model, optimizer = with_gradients(OPTIMIZERS["adamw"])
    with applied(optimizer, techniques_of("--offload optimizer")) as techniques:
        optimizer.step()
        before, stored = snapshot(model, optimizer), techniques[0].host_bytes
        with pytest.raises(torch.OutOfMemoryError), FailingAt(40):
            optimizer.step()
        assert same(snapshot(model, optimizer), before)
        assert techniques[0].host_bytes == stored


_RAISES_IN_ITS_STEP = """
import torch
from memlab import Workload, fit

class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("in the step")

def train():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    optimizer = Failing(model.parameters(), lr=0.1)
    fit(Workload(model, optimizer), "--precision pure-bf16")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()

try:
    train()
except RuntimeError as error:
    print(error)
"""


def test_a_program_ends_as_ever_after_a_step_that_raised() -> None:
    ran = subprocess.run([sys.executable, "-c", _RAISES_IN_ITS_STEP], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "in the step\n", "")


def test_settings_of_single_parameters_stay_theirs_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = bitsandbytes.optim.GlobalOptimManager
    states = []
    for bucket_bytes in (2**30, 1):
        monkeypatch.setattr(manager, "_instance", None)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        # by its place in the groups, as Trainer does for embeddings
        manager.get_instance().register_module_override(model[1], "weight", {"optim_bits": 32})
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            gradients = [p.grad for p in model.parameters()]
            run_step(optimizer, [], bucket_bytes)
            assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
        states.append([optimizer.state[layer.weight]["state1"].dtype for layer in model])
    assert states == [[torch.uint8, torch.float32, torch.uint8]] * 2


@pytest.mark.parametrize("make", [torch.optim.AdamW, bitsandbytes.optim.AdamW])
def test_a_state_that_is_saved_in_the_middle_of_an_update_is_whole(make: Make) -> None:
    """As by another thread, for a checkpoint or a log."""
    model, optimizer = with_gradients(make)
    parameters = list(model.parameters())
    update = plain_stepper(optimizer)
    update(parameters)
    saved = []

    class Saving(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            saved.append(optimizer.state_dict())
            return func(*args, **(kwargs or {}))

    with Saving():
        update(parameters[:1])
    assert {len(each["param_groups"][0]["params"]) for each in saved} == {len(parameters)}
