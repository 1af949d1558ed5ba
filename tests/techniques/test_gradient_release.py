"""Updates inside the backward pass: the same training, gradients gone, and every loop that cannot have it told so."""

from __future__ import annotations

import copy
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from memlab import Workload, fit, measure, predict
from memlab.errors import PlanError, RefusalError, SessionError
from memlab.live.live_model import steps_of
from memlab.measuring.device import Device
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.observer import Observer
from memlab.session.snapshot import Snapshot
from memlab.techniques.gradient_release.gradient_release import GradientRelease
from memlab.techniques.gradient_release.leftover import NOT_DROPPED
from tests.driving import FailingAt, loss_of, mlp, tiny_gpt2
from tests.helpers.needs import needs
from tests.helpers.snapshots import changed_between
from tests.loops.cases import CASES
from tests.loops.running import fitted, plain_loop
from tests.techniques.models import gpt2, ragged_batch, workload

Optimizer = torch.optim.Optimizer
Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@pytest.fixture(autouse=True)
def _nothing_stays_on_the_stack() -> Iterator[None]:
    yield
    assert _get_current_function_mode_stack() == []


def step_of(model: nn.Module, optimizer: Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    return loss.item()


class Seen(Observer):
    """How many gradients there are when a step begins, and how often some were complete before it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.left: list[int] = []
        self.completed = 0

    def gradients_complete(self) -> None:
        self.completed += 1

    def step_begins(self, optimizer: Optimizer) -> None:
        self.left.append(sum(p.grad is not None for p in self.model.parameters()))


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.few(1, full=5)
@pytest.mark.parametrize("name", CASES)
def test_forty_steps_are_the_same_bit_by_bit(name: str) -> None:
    case = CASES[name]
    runs = []
    for flags in ("", "--release-grads"):
        model = case.model()
        optimizer = case.optimizer(model)
        with fitted(Workload(model, optimizer), flags) as session:
            seen = Seen(model)
            session.observers.add(seen)
            losses = plain_loop(model, optimizer, case, 40)
        assert (seen.completed > 0) == bool(flags)
        runs.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_as_ever(name: str) -> None:
    runs = []
    for flags in ("", "--release-grads"):
        model = mlp()
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        load = Workload(model, optimizer, scheduler=scheduler)
        losses = []
        with fit(load, flags):
            for step in range(20):
                losses.append(step_of(model, optimizer, step))
                scheduler.step()
        runs.append((losses, [p.detach().clone() for p in model.parameters()], optimizer.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
    torch.testing.assert_close(runs[0][2], runs[1][2], rtol=0, atol=0)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "flags",
    [
        "--accumulate 4",
        "--checkpoint",
        "--checkpoint selective",
        "--offload optimizer",
        "--offload activations",
        "--chunk-loss",
        "--precision bf16",
        "--precision pure-bf16",
        "--optim adafactor",
        pytest.param("--adam8bit", marks=needs(extra="bitsandbytes")),
        pytest.param("--adam8bit --offload optimizer --checkpoint", marks=needs(extra="bitsandbytes")),
    ],
)
def test_other_techniques_do_the_same_with_it(flags: str) -> None:
    runs = []
    for more in ("", " --release-grads"):
        model = gpt2()
        load = workload(model)
        losses = []
        with fit(load, flags + more) as session:
            seen = Seen(model)
            session.observers.add(seen)
            for _ in range(6):
                loss = model(**ragged_batch()).loss
                loss.backward()
                load.optimizers[0].step()
                load.optimizers[0].zero_grad()
                losses.append(loss.item())
        assert (seen.completed > 0) == bool(more)
        runs.append((losses, [p.detach().clone() for p in model.parameters()], load.optimizers[0].state_dict()))
    if "pure" in flags:  # moments are rounded by random numbers, which are drawn in another order
        assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-3)
        return
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
    torch.testing.assert_close(runs[0][2], runs[1][2], rtol=0, atol=0)


def test_switching_on_and_off_in_training_keeps_moments_and_counts() -> None:
    runs = []
    for plans in (("", "", ""), ("--release-grads", "", "--release-grads --checkpoint")):
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = [step_of(model, optimizer, step) for step in range(3)]
        with fit(Workload(model, optimizer)) as session:
            for number, flags in enumerate(plans):
                session.switch(flags)
                losses += [step_of(model, optimizer, 3 + 4 * number + step) for step in range(4)]
        losses += [step_of(model, optimizer, 20 + step) for step in range(3)]
        assert session.steps == 12
        runs.append((losses, optimizer.state_dict()))
    assert runs[0][0] == runs[1][0]
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=0)


def test_most_gradients_are_gone_when_the_step_begins_and_all_when_it_is_over() -> None:
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--release-grads", [seen := Seen(model)]):
        for step in range(3):
            step_of(model, optimizer, step)
            with torch._C.DisableTorchFunction():  # what stands for them takes no memory
                assert all(p.grad is None for p in model.parameters())
    first, *others = seen.left
    assert first == len(list(model.parameters()))
    assert all(left < first / 4 for left in others)


def test_two_optimizers_of_one_model_step_each_their_own() -> None:
    runs = []
    for flags in ("", "--release-grads"):
        model = mlp()
        body, head = list(model[:3].parameters()), list(model[3:].parameters())
        optimizers = [torch.optim.AdamW(body, lr=1e-3), torch.optim.SGD(head, lr=1e-2, momentum=0.9)]
        losses = []
        with fit(Workload(model, optimizers), flags, [seen := Seen(model)]):
            for step in range(8):
                model.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                losses.append(loss.item())
        assert (seen.completed > 0) == bool(flags)
        runs.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def test_sparse_gradients_go_as_others_do() -> None:
    runs = []
    for flags in ("", "--release-grads"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 2))
        optimizers = [torch.optim.SparseAdam([*model[0].parameters()]), torch.optim.Adam(model[1].parameters())]
        with fit(Workload(model, optimizers), flags, [seen := Seen(model)]):
            for _ in range(4):
                model.zero_grad()
                model(torch.randint(0, 20, (6, 3))).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        assert (seen.completed > 0) == bool(flags)
        runs.append([*model.parameters()])
    assert all(map(torch.equal, *runs))


def test_parameters_of_no_optimizer_keep_their_gradients() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(3):
            model.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_an_optimizer_made_later_is_watched_from_its_second_step() -> None:
    model = mlp()
    with fit(Workload(model), "--release-grads", [seen := Seen(model)]):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        counts = []
        for step in range(4):
            step_of(model, optimizer, step)
            counts.append(seen.completed)
    assert counts[:2] == [0, 0]
    assert counts[2] > 0


def test_an_optimizer_made_again_updates_from_then_on() -> None:
    runs = []
    for flags in ("", "--release-grads"):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = Optimizer.add_param_group
        with fit(Workload(model, optimizer), flags) as session:
            for step in range(6):
                if step == 3:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                step_of(model, optimizer, step)
            notes = session.notes
        assert Optimizer.add_param_group is before
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *runs))
    assert notes[-1] == "gradients of parameters that a second optimizer has got are kept from then on"


def test_a_model_around_one_that_releases_its_gradients_is_refused() -> None:
    model = mlp()
    load = Workload(model, torch.optim.SGD(model.parameters()))
    with fit(load, "--release-grads"), pytest.raises(RefusalError) as caught:
        fit(Workload(nn.Sequential(model)), "--release-grads")
    assert str(caught.value) == (
        "gradients: Sequential has parameters of a model that is under --release-grads already; undo that first "
        "(%memfit undo all)"
    )


def test_the_step_returns_what_it_always_returns() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            assert optimizer.step() is None


# -- memory ----------------------------------------------------------------------------------------


def _small_batch_load(make: Make = OPTIMIZERS["adamw"]) -> Workload:
    model = gpt2(vocabulary=512, layers=6, width=96)
    return Workload(model, make(model.parameters()), batch=ragged_batch(512, rows=2, length=16))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--checkpoint",
        "--accumulate 2",
        "--offload optimizer",
        "--precision pure-bf16",
        pytest.param("--adam8bit", marks=needs(extra="bitsandbytes")),
    ],
)
def test_what_is_predicted_is_measured(flags: str) -> None:
    load = _small_batch_load()
    plan = f"{flags} --release-grads"
    predicted, measured = predict(load, plan), measure(load, plan, steps=1)
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=1e-3)
    assert predicted.breakdown.keys() == measured.breakdown.keys()


def test_the_peak_falls_by_nearly_all_gradients() -> None:
    load = _small_batch_load()
    gradients_bytes = 4 * sum(p.numel() for p in load.model.parameters())
    before, after = (measure(load, flags, steps=1) for flags in ("--checkpoint", "--checkpoint --release-grads"))
    # measured: 0.77 of them; the rest is what waits, and what the update takes for the largest parameter
    assert before.peak_allocated_bytes - after.peak_allocated_bytes >= 0.75 * gradients_bytes


@pytest.mark.parametrize("name", ["adamw", "nesterov"])
@pytest.mark.parametrize("flags", ["--release-grads", "--checkpoint --release-grads"])
def test_the_watched_step_needs_no_more_than_those_that_follow(name: str, flags: str) -> None:
    load = _small_batch_load(OPTIMIZERS[name])
    device = Device()
    meter = Meter(load.model, load.optimizers, device)
    with fit(load, flags, [meter]):
        for _ in range(3):
            load.model(**load.batch).loss.backward()
            load.optimizers[0].step()
            load.optimizers[0].zero_grad()
    meter.close()
    watched, usual = (step.peak_allocated_bytes for step in meter.steps[:2])
    device.close()
    assert watched is not None
    assert usual is not None
    assert watched <= 1.05 * usual


def _dropped(optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def _zeroed(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


# -- undo ------------------------------------------------------------------------------------------


def test_undo_is_exact_and_the_loop_goes_on() -> None:
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    load = Workload(model, optimizer)
    for step in range(2):
        step_of(model, optimizer, step)
    with fitted(load, "--release-grads"):
        for step in range(2, 5):
            step_of(model, optimizer, step)
    step_of(model, optimizer, 5)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("drops", [True, False])
def test_undo_says_where_the_loop_has_not_dropped_freed_gradients(drops: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with fit(Workload(model, optimizer), "--release-grads") as session:
        for step in range(3):
            step_of(model, optimizer, step)
        if drops:
            optimizer.zero_grad()
    assert (session.log[-1].text == NOT_DROPPED) is not drops


@pytest.mark.parametrize("plan", ["", "--checkpoint"])
@pytest.mark.parametrize("drops", [_dropped, _zeroed, None])
def test_a_loop_under_another_plan_does_not_add_to_freed_gradients(
    drops: Callable[[Optimizer], None] | None, plan: str
) -> None:
    def losses(flags: str) -> list[float]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with fit(Workload(model, optimizer), flags) as session:
            found = [step_of(model, optimizer, step) for step in range(3)]
            if flags:
                session.switch(Plan.parse(plan))
            for step in range(3, 6):
                loss = loss_of(model, step)
                if drops is not None:
                    drops(optimizer)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    if drops is not None:
        assert losses("--release-grads") == losses("")
        return
    with pytest.raises(SessionError, match="adds to gradients of the last step under --release-grads"):
        losses("--release-grads")


def test_undo_between_backward_and_step_leaves_the_rest_to_the_step() -> None:
    runs = []
    for flags in ("", "--release-grads"):
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        session = fit(Workload(model, optimizer), flags)
        for step in range(3):
            step_of(model, optimizer, step)
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        session.undo()
        optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, runs[0], runs[1]))


def test_a_model_that_is_dropped_is_freed() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit(Workload(model, optimizer), "--release-grads")
    for step in range(3):
        step_of(model, optimizer, step)
    optimizer.zero_grad()  # the first one after the first watched step ends the watch of this thread
    model(torch.zeros(1, 16))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    _end_watches()
    with pytest.raises(KeyboardInterrupt):  # which the loop was to hear of first
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_a_library_has_put_in_place_of_add_param_group_stays(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    seen: list[str] = []
    torchs = Optimizer.add_param_group

    def patch() -> None:
        below = Optimizer.add_param_group

        def librarys(optimizer: Optimizer, group: dict) -> None:
            seen.append("library")
            below(optimizer, group)

        monkeypatch.setattr(Optimizer, "add_param_group", librarys)

    if when == "before":
        patch()
    model = mlp()
    for _ in range(2):
        with fit(Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3)), "--release-grads"):
            if when == "meanwhile" and not seen:
                patch()
            seen.clear()
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
            assert seen == ["library"]
    seen.clear()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    assert seen == ["library"]
    monkeypatch.undo()
    if when == "before":
        assert Optimizer.add_param_group is torchs


def _end_watches() -> None:
    for mode in _get_current_function_mode_stack():
        mode.end()


def test_nothing_watches_a_loop_without_an_optimizer() -> None:
    model = mlp()
    with fit(Workload(model), "--release-grads"):
        model(torch.ones(2, next(model.parameters()).shape[1])).sum().backward()
        assert _get_current_function_mode_stack() == []


# -- refusals --------------------------------------------------------------------------------------


def clipped(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clipped_by_value(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def looked_at(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)


def _grad_norm(model: nn.Module) -> float:
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


def sharpened(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    _grad_norm(model)


def clip_gradients(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(1 + parameter.grad.norm())


def written_to(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    next(model.parameters()).grad = None


def skipped(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    optimizer.zero_grad()


def rescheduled(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3 / (step + 2)


def accumulated(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    loss_of(model, step).backward()


def evaluated(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    with torch.no_grad():
        loss_of(model.eval(), step)
    model.train()


def differentiated(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    torch.autograd.grad(loss_of(model, step), next(model.parameters()))


def differentiated_at_an_edge(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    edge = torch.autograd.graph.get_gradient_edge(loss_of(model, step))
    torch.autograd.grad(edge, next(model.parameters()))


CLIPS = (
    "gradients: the loop takes the norm of all gradients (to clip them, or to show it), which is not known before the backward pass is "
    "over{}; leave that out, or leave --release-grads out"
)
USES = (
    "gradients: the loop uses gradients between backward() and optimizer.step(){where}, when they are gone{{}}; "
    "leave --release-grads out"
)
DIFFERENTIATES = (
    "gradients: the loop calls autograd.grad() between backward() and optimizer.step(){}; leave --release-grads out"
)
REFUSED: dict[Any, str] = {
    clipped: CLIPS,
    clipped_by_value: USES.format(where=" (in clipped_by_value of tests)"),
    sharpened: USES.format(where=" (in _grad_norm of tests)"),
    clip_gradients: USES.format(where=" (in clip_gradients of tests)"),
    looked_at: USES.format(where=" (in looked_at of tests)"),
    written_to: USES.format(where=" (in written_to of tests)"),
    skipped: "gradients: the loop drops gradients after backward() without a step{}; leave --release-grads out",
    evaluated: "gradients: the loop calls the model between backward() and step(), when weights are others{}; leave --release-grads out",
    differentiated: DIFFERENTIATES,
    differentiated_at_an_edge: DIFFERENTIATES,
    rescheduled: (
        "gradients: the loop changes the optimizer's settings (its learning rate?) between backward() and step(){}; "
        "change them before backward() or after step()"
    ),
    accumulated: (
        "gradients: the loop calls backward() a second time before optimizer.step() (or one was broken off), and "
        "gradients add up over both{}; hand over the whole batch and use --accumulate N, or leave --release-grads out"
    ),
}


@pytest.mark.parametrize("between", REFUSED, ids=lambda between: between.__name__)
def test_a_loop_that_needs_its_gradients_is_refused_before_anything_changed(between: Any) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    with fit(Workload(model, optimizer), "--release-grads") as session:
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        with pytest.raises(RefusalError) as refusal:
            between(model, optimizer, 0)
            optimizer.step()
        assert str(refusal.value) == REFUSED[between].format("")
        assert all(map(torch.equal, before, model.parameters()))
        session.switch("", now=True)
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))


def test_of_two_optimizers_one_may_step_more_often() -> None:
    """The plan is withdrawn before one of them has gone ahead of the other."""

    def trained(plan: str) -> list[torch.Tensor]:
        model = mlp()
        often, seldom = (torch.optim.AdamW(layer.parameters()) for layer in (model[-1], model[0]))
        with fit(Workload(model, [often, seldom]), plan):
            for step in range(6):
                loss_of(model, step).backward()
                for optimizer in (often, seldom)[: 1 + step % 2]:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    with pytest.warns(RuntimeWarning, match=r"the loop calls backward\(\) a second time before optimizer.step\(\)"):
        found = trained("--release-grads")
    assert all(map(torch.equal, found, trained("")))


@pytest.mark.parametrize("had_gradients", [False, True])
def test_gradients_of_a_refused_first_step_are_not_left_for_the_next_loop(had_gradients: bool) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if had_gradients:
        loss_of(model, 0).backward()
    with pytest.raises(RefusalError), fit(Workload(model, optimizer), "--release-grads"):
        loss_of(model, 0).backward()
        clipped(model, optimizer, 0)
    assert {p.grad is not None for p in model.parameters()} == {had_gradients}


@pytest.mark.parametrize("between", REFUSED, ids=lambda between: between.__name__)
def test_a_loop_that_begins_to_need_them_is_told_that_it_is_too_late(between: Any) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(3):
            step_of(model, optimizer, step)
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        with pytest.raises(RefusalError) as refusal:
            between(model, optimizer, 3)
            optimizer.step()
    assert str(refusal.value) == REFUSED[between].format("; parameters have been updated with the gradients so far")


def test_a_second_model_is_watched_beside_a_first() -> None:
    first = mlp()
    updates_first = torch.optim.AdamW(first.parameters())
    with fit(Workload(first, updates_first), "--release-grads"):
        step_of(first, updates_first, 0)
        second = mlp()
        updates = torch.optim.AdamW(second.parameters())
        with fit(Workload(second, updates), "--release-grads"):
            for step in range(3):
                loss = loss_of(second, step)
                updates.zero_grad()  # seen as well, or the second step would be refused
                loss.backward()
                updates.step()
            loss_of(second, 3)
            with pytest.raises(RefusalError) as refusal:
                norms = [p.grad.norm() for p in second.parameters() if p.grad is not None]
                assert not norms
        updates_first.zero_grad()
    assert str(refusal.value).startswith("gradients: the loop uses gradients after optimizer.step()")


def test_what_a_thread_of_the_loop_was_refused_the_loop_hears() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, ended = [p.detach().clone() for p in model.parameters()], []

    def work(step: int) -> None:
        try:
            loss_of(model, step).backward()
        except RefusalError as error:
            ended.append(str(error))

    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(2):
            worker = threading.Thread(target=work, args=(step,))
            worker.start()
            worker.join()
        with pytest.raises(RefusalError) as refusal:
            optimizer.step()
    assert ended == [str(refusal.value)] == [REFUSED[accumulated].format("")]
    assert all(map(torch.equal, before, model.parameters()))


def _replaced(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        weight.data = weight.data * 0.99


def _decayed(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        weight *= 0.99


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(
    "write",
    [
        lambda weights: [weight.mul_(0.99) for weight in weights],
        lambda weights: torch._foreach_mul_(weights, 0.99),
        lambda weights: [weight.data.copy_(weight.data.sign()) for weight in weights],
        lambda weights: [torch.mul(weight, 0.99, out=weight.detach()) for weight in weights],
        lambda weights: [weight[0].zero_() for weight in weights],
        lambda weights: [nn.init.zeros_(weight) for weight in weights],
        _replaced,
        _decayed,
    ],
    ids=["in place", "foreach", "data", "out", "rows", "init", "replaced", "operator"],
)
def test_weights_that_are_written_before_the_step(write: Callable[[list[torch.Tensor]], object], late: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(late + 1):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step < late:
                optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RefusalError, match="the loop writes to weights between backward"), torch.no_grad():
            write(list(model.parameters()))
        assert all(map(torch.equal, before, model.parameters()))
        if late:
            return
    # what is written after the step, or before the forward pass, is the loop's own
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(2):
            with torch.no_grad():
                write(list(model.parameters()))
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            with torch.no_grad():
                write(list(model.parameters()))


def _halved(optimizer: Optimizer, _saved: Any) -> None:
    for state in [*optimizer.state.values()]:
        state["exp_avg"].mul_(0.5)


def _assigned(optimizer: Optimizer, _saved: Any) -> None:
    for parameter, state in [*optimizer.state.items()]:
        optimizer.state[parameter] = {**state, "exp_avg": state["exp_avg"] * 0.5}


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("flags", ["", " --adam8bit", " --offload optimizer"])
@pytest.mark.parametrize(
    "change",
    [lambda optimizer, saved: optimizer.load_state_dict(saved), lambda optimizer, _: optimizer.state.clear(), _halved, _assigned],
    ids=["loaded", "cleared", "in place", "assigned"],
)  # fmt: skip
def test_moments_that_are_changed_before_the_step(change: Any, flags: str, late: bool) -> None:
    """The backward pass has updated them: what the loop does then would be lost, or come after the update."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_of(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    with fit(Workload(model, optimizer), f"--release-grads{flags}"):
        for step in range(3 * late):
            step_of(model, optimizer, step)
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.state_dict()  # may be looked at
        with pytest.raises(RefusalError) as refusal:
            change(optimizer, saved)
            optimizer.step()
    assert str(refusal.value) == (
        "gradients: the loop changes or loads the optimizer's state between backward() and step(), when it would be updated"
        f"{'; parameters have been updated with the gradients so far' * late}; do that before the forward pass or after step(), "
        "or leave --release-grads out"
    )
    with fit(Workload(model, optimizer), f"--release-grads{flags}"):
        for step in range(3):
            step_of(model, optimizer, step)
            change(optimizer, saved)


def test_other_tensors_may_be_written_before_the_step() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            torch.vmap(lambda row: row.clone().add_(1))(torch.ones(3, 2))
            torch.func.grad(lambda row: row.clone().mul_(2).sum())(torch.ones(2))
            torch.eye(2).to_sparse().mul_(2)
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).mul_(2)
            torch.zeros(2, device="meta").add_(1)
            [average.lerp_(p, 0.5) for p in model.parameters() for average in [p.detach().clone()]]
            optimizer.step()


@pytest.mark.parametrize("drops_last", [True, False])
def test_a_loop_that_goes_on_in_another_thread(drops_last: bool) -> None:
    said: list[str] = []

    def train(model: nn.Module) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

        def work() -> None:
            try:
                for step in range(3):
                    if not drops_last:
                        optimizer.zero_grad()
                    loss = loss_of(model, step)
                    loss.backward()
                    optimizer.step()
                    losses.append(float(loss))
                    if drops_last:
                        optimizer.zero_grad()
            except RefusalError as refusal:
                said.append(refusal.reason)

        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return losses

    torch.manual_seed(0)
    expected = train(mlp())
    torch.manual_seed(0)
    model = mlp()
    with fit(Workload(model, None), "--release-grads"):
        found = train(model)
    assert found == (expected if drops_last else expected[:3])
    assert [reason.partition(",")[0] for reason in said] == ["the loop goes on in another thread"] * (not drops_last)


# -- gradients after the step ----------------------------------------------------------------------


def zeroed_by_hand(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.detach_().zero_()


def filled(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.fill_(0)


def zeroed_at_once(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    torch._foreach_zero_([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def zeroed_as_tensors(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    model.zero_grad(set_to_none=False)


def zeroed_after_a_move(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    model.double().float()
    for parameter in model.parameters():
        del parameter.grad


def zeroed_in_turns(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step % 2:
        optimizer.zero_grad()


def zeroed_partly(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    next(model.parameters()).grad = None


def zeroed_at_first(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step < 3:
        optimizer.zero_grad()


def stepped_again(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    optimizer.step()
    optimizer.zero_grad()


def norm_logged(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    optimizer.zero_grad()


def array_logged(model: nn.Module, optimizer: Optimizer, _step: int) -> None:
    print(next(model.parameters()).grad.numpy())
    optimizer.zero_grad()


ADDED = "the loop does not drop the gradients of the step before, so that they add up"
READ = "the loop uses gradients after optimizer.step() (in {} of tests), when they are gone"
AFTER_STEP: dict[Any, str] = {
    zeroed_by_hand: "",
    filled: "",
    zeroed_at_once: "",
    zeroed_as_tensors: "",
    zeroed_after_a_move: "",
    zeroed_in_turns: ADDED,
    zeroed_partly: ADDED,
    zeroed_at_first: ADDED,
    stepped_again: "the loop steps once more with the gradients of the step before",
    norm_logged: READ.format("norm_logged"),
    array_logged: READ.format("array_logged"),
}


@pytest.mark.parametrize("after", AFTER_STEP, ids=lambda after: after.__name__)
def test_what_a_loop_does_after_its_step_is_as_ever_or_refused(after: Any) -> None:
    """Each step's loss is that of the untouched loop, up to the end or up to the refusal."""

    def losses() -> Iterator[float]:
        for step in range(6):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            yield loss.item()
            after(model, optimizer, step)

    runs: list[list[float]] = []
    refused = ""
    for flags in ("", "--release-grads"):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        runs.append([])
        with fit(Workload(model, optimizer), flags):
            try:
                runs[-1].extend(losses())
            except RefusalError as refusal:
                refused = str(refusal)
    assert refused == (f"gradients: {AFTER_STEP[after]}; leave --release-grads out" if AFTER_STEP[after] else "")
    assert runs[1] == (runs[0][: len(runs[1])] if refused else runs[0])
    assert len(runs[1]) > 0


class Alternating(nn.Module):
    """Calls one layer in even steps and the other in odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        return self.layers[step % 2](rows)  # type: ignore[no-any-return]


def test_what_a_step_leaves_out_decays_on_zeroed_gradients() -> None:
    """Gradients that are zeroed and not dropped take part in every later step, also of layers that were not called."""
    trained = []
    for flags in ("", "--release-grads"):
        torch.manual_seed(0)
        model, rows = Alternating(), torch.randn(4, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with fit(Workload(model, optimizer), flags):
            for step in range(6):
                model(rows, step).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        trained.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)


def test_steps_of_memlab_s_own_may_come_before_the_loop_has_dropped_its_gradients() -> None:
    model, rows = Alternating(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load = Workload(model, optimizer, batch=((rows, 1), rows), loss_fn=nn.functional.mse_loss)
    with fit(load, "--release-grads") as session:
        for round_ in range(2):
            for step in range(3):
                optimizer.zero_grad()
                model(rows, step + round_).square().mean().backward()
                optimizer.step()
            with closing(steps_of(load, session, keep=True)) as steps:  # a panel's
                assert next(steps) > 0


@pytest.mark.parametrize("order", ["before the forward", "after the forward", "after the step", "by hand"])
def test_gradients_may_be_zeroed_wherever_loops_do_it(order: str) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--release-grads", [seen := Seen(model)]):
        for step in range(4):
            if order == "before the forward":
                model.zero_grad()
            loss = loss_of(model, step)
            if order == "after the forward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if order == "after the step":
                optimizer.zero_grad(set_to_none=False)
            if order == "by hand":
                for parameter in model.parameters():
                    parameter.grad = None
    assert seen.completed > 0


def test_a_loop_that_calls_parts_of_the_model_keeps_its_gradients() -> None:
    """Nothing of such a loop is watched, and it may clip."""
    model = mlp()
    expected = copy.deepcopy(model)

    def train(parts: nn.Module) -> None:
        optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3)
        with fit(Workload(parts, optimizer), "--release-grads" if parts is model else "") as session:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(nn.Sequential(*parts.children()), step).backward()
                clipped(parts, optimizer, step)
                optimizer.step()
            assert "--release-grads had no effect" in str(session.usage.passed_by) or parts is not model

    train(model)
    train(expected)
    assert all(map(torch.equal, expected.parameters(), model.parameters()))


def test_a_closure_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with (
        fit(Workload(model, optimizer), "--release-grads"),
        pytest.raises(RefusalError, match=r"hands optimizer.step\(\) a closure, which may run several times"),
    ):
        optimizer.step(closure)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused(fused: bool) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    with fit(Workload(model, optimizer), "--release-grads"):
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(RefusalError, match="uses a GradScaler, which must see all gradients before"):
            scaler.step(optimizer)


def test_fp16_is_refused_by_the_plan() -> None:
    with pytest.raises(PlanError, match="--release-grads and --fp16 exclude each other"):
        Plan.parse("--fp16 --release-grads")


@pytest.mark.parametrize("kind", ["LBFGS", "Own"])
def test_an_optimizer_that_looks_at_all_parameters_is_refused(kind: str) -> None:
    class Own(torch.optim.SGD):
        pass

    model = mlp()
    optimizer = {"LBFGS": torch.optim.LBFGS, "Own": Own}[kind](model.parameters(), lr=1e-2)  # type: ignore[operator]
    text = f"gradients: {kind} is not known to update each parameter independently of all others; use an optimizer of"
    with pytest.raises(RefusalError, match=text):
        fit(Workload(model, optimizer), "--release-grads")


def test_a_step_hook_of_the_users_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RefusalError, match="SGD has a step pre-hook, which comes when gradients are gone"):
        fit(Workload(model, optimizer), "--release-grads")
    handle.remove()
    fit(Workload(model, optimizer), "--release-grads").undo()


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RefusalError, match="several processes train together"):
        GradientRelease(Plan.parse("--release-grads")).check(Workload(mlp()))


def test_gradients_that_are_written_once_they_are_complete_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        inner = mlp()
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.AdamW(inner.parameters())
        before = Snapshot(Workload(inner, optimizer))
        with fit(Workload(inner, optimizer), "--release-grads"):
            loss_of(model, 0).backward()
            with pytest.raises(RefusalError) as caught:
                optimizer.step()
        optimizer.zero_grad()
        assert changed_between(Snapshot(Workload(inner, optimizer)), before) == []
    finally:
        torch.distributed.destroy_process_group()
    assert str(caught.value) == (
        "gradients: something writes to gradients once they are complete, as DistributedDataParallel does, when they would be "
        "gone; leave --release-grads out"
    )


def test_a_weight_shared_by_reentrant_checkpoints_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.first(hidden)
            for _ in range(2):
                hidden = checkpoint(self.shared, hidden, use_reentrant=True)
            return hidden

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with fit(Workload(model, optimizer), "--release-grads"), pytest.raises(RefusalError, match="a second time"):
        model(torch.randn(4, 16)).square().mean().backward()


def test_memlab_s_own_loops_do_not_count_as_the_loop() -> None:
    load = _small_batch_load()
    with fit(load, "--release-grads"):
        before = Snapshot(load)
        measure(load, "--release-grads", steps=1)
        assert changed_between(before, Snapshot(load)) == []
        load.model(**load.batch).loss.backward()
        with pytest.raises(RefusalError, match="takes the norm of all gradients"):
            torch.nn.utils.clip_grad_norm_(load.model.parameters(), 1.0)


def test_a_compiled_loss_is_the_loops() -> None:
    model, rows = nn.Linear(8, 8), torch.randn(4, 8)
    loss = torch.compile(lambda out: out.square().mean() + out.std() * out.max(), backend="eager")
    expected = loss(model(rows)).item()
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.0)), "--release-grads"):
        found = loss(model(rows))
        found.backward()
    assert found.item() == expected


# -- what breaks off -------------------------------------------------------------------------------


def test_an_update_that_broke_off_is_not_repeated() -> None:
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--release-grads"):
        for step in range(3):
            step_of(model, optimizer, step)
        optimizer.zero_grad()
        loss = loss_of(model, 3)
        with pytest.raises(torch.OutOfMemoryError), _FailingInUpdates():
            loss.backward()
        with pytest.raises(SessionError, match="an update inside the backward pass broke off before"):
            loss_of(model, 3).backward()


def test_a_loop_that_skips_a_batch_whose_backward_pass_failed_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("not a number")

    with fit(Workload(model, optimizer), "--release-grads"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        handle = model[1].register_full_backward_hook(lambda *_: fail(torch.ones(())))
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="not a number"):
            model(torch.randn(4, 8)).square().mean().backward()
        handle.remove()
        with pytest.raises(RefusalError) as caught:
            optimizer.zero_grad()
    assert str(caught.value) == (
        "gradients: the loop goes on after an error has ended a backward pass; parameters have been updated with the gradients "
        "so far; leave --release-grads out"
    )


class _FailingInUpdates(FailingAt):
    """Raises at the first operator that only an update calls."""

    def __init__(self) -> None:
        super().__init__(10**9)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "addcdiv" in str(func):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return func(*args, **kwargs or {})


def test_a_rescue_repeats_the_forward_and_passes_an_error_of_the_backward_on() -> None:
    model = gpt2()
    load = workload(model)
    optimizer = load.optimizers[0]
    with fit(load, "--release-grads", rescue=Rescuer()) as session:
        assert session.rescuer is not None

        def step(forward: int = 10**9, backward: int = 10**9) -> None:
            batch = ragged_batch()
            with FailingAt(forward):
                loss = model(**batch).loss
            with FailingAt(backward):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        assert not session.rescuer.rescues
        step(forward=20)
        assert [rescue.place for rescue in session.rescuer.rescues] == ["the forward pass"]
        assert "--release-grads" in session.plan.label
        assert any("in a backward pass is not rescued" in entry.text for entry in session.log)
        with pytest.raises(torch.OutOfMemoryError):
            step(backward=20)


def test_the_watched_step_is_rescued_wholly() -> None:
    runs = []
    for fails in (False, True):
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rescuer = Rescuer()
        with fit(Workload(model, optimizer), "--release-grads", rescue=rescuer):
            loss = loss_of(model, 0)
            with FailingAt(20 if fails else 10**9):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(rescuer.rescues) == int(fails)
        runs.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_state_is_in_the_order_of_the_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    with fit(Workload(model, optimizer), "--release-grads"):
        for _ in range(4):
            optimizer.state.clear()  # it is made in the backward pass, from the last layer to the first
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert list(map(id, optimizer.state)) == list(map(id, model.parameters()))
