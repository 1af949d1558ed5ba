"""Engines in this process, put on a live run and taken off again: bit for bit as if they had not been there."""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from memlab import Workload, fit, measure
from memlab.errors import RefusalError, ScaleError
from memlab.plan import Plan
from memlab.scaleout.engines import fsdp2
from memlab.session import Session
from memlab.session.snapshot import Snapshot
from tests.helpers.needs import needs
from tests.helpers.snapshots import changed_between
from tests.scaleout import handing
from tests.scaleout.handing import assert_alike, case
from tests.scaleout.live_runs import Tower, bert, go, loss_of, tower
from tests.scaleout.runs import gpt2

ENGINES = (
    "--scale fsdp2",
    "--scale fsdp2 --offload optimizer --checkpoint",
    "--scale zero1",
    "--scale zero2",
    "--scale zero2 --offload optimizer",
    "--scale zero3 --checkpoint",
    "--scale zero3 --offload optimizer,params",
)
ONE_OF_EACH = ("--scale fsdp2", "--scale zero1", "--scale zero2", "--scale zero3")


def engines(*flags: str) -> Any:
    return pytest.mark.parametrize("flags", handing.engines(*flags))


@pytest.fixture(autouse=True, scope="module")
def what_is_there_already() -> None:
    """Transformers adds to torch when it makes a model; and a collection, which ends an engine, looks at new objects only."""
    with fit(gpt2(), "--scale zero1" if importlib.util.find_spec("deepspeed") else "--scale fsdp2"):
        pass
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process group, environment variable, hook of the interpreter or patch of torch outlives an engine."""
    before = _surroundings()
    yield
    after = _surroundings()
    for what, value in before.items():
        assert after[what] == value, what
    assert not dist.is_initialized()


def _surroundings() -> dict[str, Any]:
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "hooks": (sys.excepthook, threading.excepthook),
        "filters": [*map(str, warnings.filters)],
        "functional": {k: v for k, v in vars(nn.functional).items() if callable(v)},
        "module": {k: v for k, v in vars(nn.Module).items() if callable(v)},
        "tensor": {k: v for k, v in vars(torch.Tensor).items() if callable(v)},
        "storage": torch.UntypedStorage.resize_,
        "dtype": torch.get_default_dtype(),
    }


def structure_of(workload: Workload) -> dict[str, Any]:
    """What must be the very same objects, and what hangs on them."""
    model, (optimizer,) = workload.model, workload.optimizers
    return {
        "parameters": [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(b)) for name, b in model.named_buffers()],
        "modules": [(name, id(m), type(m)) for name, m in model.named_modules()],
        "attributes": [(name, sorted(vars(m))) for name, m in model.named_modules()],
        "hooks": [
            (name, key, len(value))
            for name, m in model.named_modules()
            for key, value in vars(m).items()
            if "_hooks" in key
        ],
        "of parameters": [(p.stride(), p.device, sorted(vars(p)), bool(p._backward_hooks)) for p in model.parameters()],
        "groups": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "optimizer": (id(optimizer), sorted(vars(optimizer)), sorted(map(id, optimizer.state))),
    }


def same(one: Workload, other: Workload) -> list[str]:
    return changed_between(Snapshot(one), Snapshot(other))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("flags", "make"),
    [
        case(flags, make)
        for make, flagged in ((tower, ENGINES), (gpt2, ONE_OF_EACH), (bert, ONE_OF_EACH[:3]))
        for flags in flagged
    ],
)
def test_there_and_back_makes_no_difference_at_all(flags: str, make: Callable[[], Workload]) -> None:
    reference = make()
    expected = [each for first in (0, 3, 6) for each in go(reference, first, first + 3)]
    workload = make()
    losses = go(workload, 0, 3)
    before = structure_of(workload)
    with fit(workload, flags) as session:
        losses += go(workload, 3, 6)
        assert session.plan.label.endswith(flags.split()[1])
        assert structure_of(workload)["parameters"] == before["parameters"]
    assert structure_of(workload) == before
    losses += go(workload, 6, 9)
    assert losses == expected
    assert same(reference, workload) == []


@engines("--scale fsdp2", "--scale zero2")
def test_an_evaluation_in_inference_mode_may_come_first(flags: str) -> None:
    def evaluated(run: Workload) -> float:
        run.model.eval()
        with torch.inference_mode():
            found = float(run.model(torch.ones(2, 37)).sum())
        run.model.train()
        return found

    reference, workload = tower(), tower()
    with fit(workload, flags):
        for run in (reference, workload):
            run.losses = [evaluated(run), *go(run, 0, 2), evaluated(run), *go(run, 2, 3)]  # type: ignore[attr-defined]
    assert workload.losses == reference.losses  # type: ignore[attr-defined]


@engines("--scale zero2", "--scale zero3")
def test_state_with_several_single_numbers_comes_back(flags: str) -> None:
    reference, workload = tower(), tower()
    for run in (reference, workload):
        run.optimizers[0] = torch.optim.NAdam(run.model.parameters(), lr=1e-3)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizers[0], 2)
        go(run, 0, 2)
    with fit(workload, flags):
        assert go(workload, 2, 4) == go(reference, 2, 4)
    assert go(workload, 4, 5) == go(reference, 4, 5)
    assert same(reference, workload) == []


@needs(extra="deepspeed")
def test_zero3_adds_up_three_gradients_in_another_order() -> None:
    """Query, key and value of BERT and what goes past them: each has hooks of DeepSpeed's in front of it."""
    reference, workload = bert(), bert()
    for run in (reference, workload):
        go(run, 0, 3)
    with fit(workload, "--scale zero3"):
        for run in (reference, workload):
            go(run, 3, 6)
    assert_alike(reference.model, workload.model, rtol=1e-5, atol=1e-7)


@pytest.mark.few
@engines(*ONE_OF_EACH)
@pytest.mark.parametrize("loop", [{"every": 2}, {"to_none": False}, {"clips": False}], ids=str)
def test_loops_that_accumulate_or_clear_in_another_way(flags: str, loop: dict[str, Any]) -> None:
    reference, workload = tower(), tower()
    go(reference, 0, 8, **loop)
    with fit(workload, flags):
        go(workload, 0, 8, **loop)
    assert same(reference, workload) == []


@needs(extra="deepspeed")
def test_from_engine_to_engine_between_two_steps() -> None:
    reference, workload = tower(), tower()
    for first in range(0, 10, 2):
        go(reference, first, first + 2)
    session = fit(workload)
    plans = ("--scale zero3", "--scale zero1", "", "--scale fsdp2 --offload optimizer", "--checkpoint")
    for first, plan in zip(range(0, 10, 2), plans, strict=True):
        session.switch(plan)
        go(workload, first, first + 2)
    session.undo()
    assert same(reference, workload) == []


@pytest.mark.full
@needs(extra="deepspeed", file_operators=True)
@pytest.mark.timeout(1200)
def test_state_in_files() -> None:
    # DeepSpeed leaves less than a MiB in memory
    reference, workload = tower(601), tower(601)
    for first, last in ((0, 3), (3, 5), (5, 6)):
        go(reference, first, last)
    go(workload, 0, 3)
    with fit(workload, "--scale zero3 --offload optimizer:disk,params"):
        assert list(Path(tempfile.gettempdir()).glob("memlab-*/**/exp_avg-*.swp"))
        go(workload, 3, 5)
        kept = {name: value.clone() for name, value in workload.model.state_dict().items()}
        with torch.no_grad():
            workload.model.head.weight.zero_()
            workload.model.blocks[1][0].weight.zero_()
        workload.model.load_state_dict(kept)
        with pytest.raises(ScaleError, match=r"^state_dict while ZeRO has the optimizer's state in files"):
            workload.optimizers[0].state_dict()
        go(workload, 5, 6)
    assert same(reference, workload) == []


@engines("--scale fsdp2", "--scale zero2", "--scale zero3")
def test_what_the_loop_sees_and_writes_is_what_trains(flags: str) -> None:
    reference, workload = tower(), tower()
    for run in (reference, workload):
        go(run, 0, 2)
    with fit(workload, flags):
        for run in (reference, workload):
            (optimizer,) = run.optimizers
            torch.manual_seed(0)
            loss_of(run, 3).backward()
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.detach_()  # torch refuses it for views
                            parameter.grad = parameter.grad * 0.5
                run.model.head.bias.add_(1)
            optimizer.param_groups[0]["lr"] = 0.02
            optimizer.step()
            optimizer.zero_grad()
        states = [run.optimizers[0].state_dict()["state"] for run in (reference, workload)]
        for number, state in states[0].items():
            assert all(torch.equal(value, states[1][number][entry]) for entry, value in state.items())
        for name, value in reference.model.state_dict().items():
            assert torch.equal(value, workload.model.state_dict()[name]), name
        torch.manual_seed(0)
        expected = loss_of(reference, 4)
        torch.manual_seed(0)
        assert torch.equal(expected, loss_of(workload, 4))


class Remembering(nn.Module):
    """A small model that keeps what it computed in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.hidden = torch.zeros(())
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            rows = block(rows)
        self.hidden = rows.detach() if rows.shape[0] == 4 else rows
        return self.head(rows)


def asked_for(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return loss


def named(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    loss.backward(inputs=list(model.parameters()))
    return loss


def some_first(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    loss.backward(inputs=list(model.head.parameters()), retain_graph=True)
    loss.backward()
    return loss


def penalized(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone().requires_grad_()
    loss = model(rows).square().mean()
    (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
    (loss + slope.square().sum()).backward()
    return loss


def attacked(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).square().mean(), rows)
    loss = model((rows + slope.sign()).detach()).square().mean()
    loss.backward()
    return loss


def functional(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    halves = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
    loss = torch.func.functional_call(model, halves, (rows,)).square().mean()
    (loss + model(rows).square().mean()).backward()
    return loss


def transformed(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = torch.func.grad(lambda them: torch.func.functional_call(model, them, (rows,)).square().mean())(weights)
    loss = model(rows).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        parameter.grad += gradients[name]
    return loss


def twice(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def remembered(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows[:3]).square().mean() + model.hidden.square().mean() + model.calls
    loss.backward()
    return loss


def two_calls(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As the judge of real and made ones is trained."""
    loss: torch.Tensor = model(x).square().mean() + model(-x).square().mean()
    loss.backward()
    return loss


def latest_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first, second = (model(each).square().mean() for each in (x, -x))
    second.backward()
    first.backward()
    return first + second


def _steps(loop: Callable[..., torch.Tensor], flags: str, *, asked: bool = False) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = Remembering()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows, losses = torch.randn(5, 4, 8), []
    with fit(Workload(model, optimizer), "" if asked else flags) as session:
        for step in range(5):
            if asked and step == 2:
                session.switching.ask(Plan.parse(flags))
            losses.append(loop(model, rows[step]).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


@engines("--scale fsdp2", "--scale zero1", "--scale zero2", "--scale zero3")
def test_a_backward_pass_that_an_engine_cannot_run_gives_the_gradients_of_the_loop(flags: str) -> None:
    loops = [some_first, penalized, attacked, functional, transformed, twice, remembered, two_calls, latest_first]
    loops += [asked_for, named] if "fsdp2" in flags else []
    for loop in loops:
        losses, model = _steps(loop, flags)
        expected, reference = _steps(loop, "")
        assert losses == pytest.approx(expected, rel=1e-6), loop.__name__
        assert_alike(reference, model, rtol=1e-5, atol=1e-6)


@engines(*ONE_OF_EACH)
@pytest.mark.parametrize("then", ["", "--checkpoint"])
def test_an_engine_that_ends_between_a_call_and_its_backward_pass(flags: str, then: str) -> None:
    """The call's own graph is of the engine, which does not run it any more."""
    torch.manual_seed(0)
    model = Remembering()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = torch.randn(4, 4, 8)
    reference, expected = copy.deepcopy(model), []
    its_optimizer = torch.optim.Adam(reference.parameters(), lr=1e-2)
    for x in rows:
        loss = two_calls(reference, x)
        its_optimizer.step()
        its_optimizer.zero_grad()
        expected.append(loss.item())
    with fit(Workload(model, optimizer), flags) as session:
        for step, x in enumerate(rows):
            loss = model(x).square().mean() + model(-x).square().mean()
            if step == 2:
                session.switch(Plan.parse(then), now=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == pytest.approx(expected[step], rel=1e-6)
    assert_alike(reference, model, rtol=1e-5, atol=1e-6)


@engines("--scale zero2", "--scale zero3")
def test_two_calls_with_hooks_within_before_one_backward_pass_are_refused(flags: str) -> None:
    def hooked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        handle = next(part for part in model.modules() if isinstance(part, nn.Linear)).register_forward_hook(print)
        try:
            return two_calls(model, x)
        finally:
            handle.remove()

    said = "the loop calls Remembering again before the backward pass of a call, and parts of it have hooks: "
    with pytest.raises(RefusalError, match=said):
        _steps(hooked, flags)


@engines("--scale zero2")
def test_gradients_that_come_past_zero_are_refused_and_a_plan_on_trial_is_taken_back(flags: str) -> None:
    said = r"^scale: the gradient of blocks.0.0.weight comes from no backward pass that adds .*; use --scale fsdp2$"
    for loop in (asked_for, named):
        with pytest.raises(RefusalError, match=said):
            _steps(loop, flags)
        with pytest.warns(RuntimeWarning, match=rf"{said.strip('^$')}; as written is back$"):
            losses, *_ = _steps(loop, flags, asked=True)
        assert losses == _steps(loop, "")[0]


@pytest.mark.few(3)
@engines(*ONE_OF_EACH, "--scale zero2 --offload optimizer")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_leaves_weights_and_moments_and_the_loop_goes_on(
    flags: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, workload = tower(), tower()
    go(reference, 0, 2)
    go(workload, 0, 2)
    with fit(workload, flags):
        go(reference, 2, 4)
        go(workload, 2, 4)
        before = Snapshot(workload)
        with monkeypatch.context() as patched:
            original = Tower.forward
            patched.setattr(Tower, "forward", lambda model, rows: _Failing.apply(original(model, rows), where))  # type: ignore[no-untyped-call]
            with pytest.raises(KeyboardInterrupt if where == "forward" else torch.OutOfMemoryError):
                loss_of(workload, 4).backward()
        workload.optimizers[0].zero_grad()
        changed = changed_between(before, Snapshot(workload))
        assert {name.partition(".")[0] for name in changed} <= {"norm", "random state"}
        before.restore()
        go(reference, 4, 6)
        go(workload, 4, 6)
    assert same(reference, workload) == []


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor, where: str) -> torch.Tensor:
        if where == "forward":
            raise KeyboardInterrupt
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("in the backward pass")


@needs(extra="deepspeed")
def test_a_change_that_fails_goes_back_to_an_engine_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, workload = tower(), tower()
    go(reference, 0, 3)
    go(reference, 3, 5)
    session = fit(workload, "--scale zero3")
    go(workload, 0, 3)

    def no_room(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError, match="no room"):
        patched.setattr(fsdp2, "shard", no_room)
        session.switch("--scale fsdp2", now=True)
    assert session.plan.label == "--scale zero3"
    go(workload, 3, 5)
    session.undo()
    assert same(reference, workload) == []


@pytest.mark.few(1)
@engines("--scale fsdp2 --offload optimizer", "--scale zero1", "--scale zero3")
def test_ten_times_on_and_off_leave_nothing_behind(flags: str) -> None:
    workload = tower()

    def times(number: int) -> tuple[int, ...]:
        for _ in range(number):
            with fit(workload, flags):
                go(workload, 0, 1)
        gc.collect()
        alive = [type(each) for each in gc.get_objects()]
        process = psutil.Process()
        return (
            sum(issubclass(each, torch.Tensor) for each in alive),
            sum(issubclass(each, nn.Module) for each in alive),
            process.num_threads(),
            process.num_fds(),
            len(process.children(recursive=True)),
            sum(issubclass(each, Session) for each in alive),
        )

    times(1)
    assert times(1) == times(9)


@engines("--scale fsdp2", "--scale zero3")
def test_memory_is_measured_under_an_engine(flags: str) -> None:
    workload = Workload(Tower(), None)
    workload = Workload(workload.model, torch.optim.AdamW(workload.model.parameters()), batch=torch.randn(4, 37))
    workload.loss_fn, workload.batch = nn.functional.cross_entropy, (torch.randn(4, 37), torch.randint(0, 3, (4,)))
    weights = sum(p.nbytes for p in workload.model.parameters())
    before = Snapshot(workload)
    plain, measured = (measure(workload, plan, steps=1) for plan in ("", flags))
    assert measured.losses == plain.losses
    assert measured.peak_allocated_bytes > plain.peak_allocated_bytes  # gathered, or a second copy
    assert measured.breakdown["optimizer state"] >= 2 * weights
    assert changed_between(before, Snapshot(workload)) == []


def test_a_group_of_ones_own_is_used_and_stays() -> None:
    workload = tower()
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined] # not listed
    try:
        with fit(workload, "--scale fsdp2"):
            go(workload, 0, 1)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.mark.parametrize("before", ["--release-grads", "--precision pure-bf16"])
def test_what_the_plan_before_has_put_on_weights_is_none_of_the_users(before: str) -> None:
    workload = tower()
    with fit(workload, before) as session:
        go(workload, 0, 1, clips=False)
        session.switch("--scale fsdp2", now=True)
        go(workload, 1, 2, clips=False)
        assert str(session.plan) == "--scale fsdp2"


def _half_stepped() -> Workload:
    workload = tower()
    model, (optimizer,) = workload.model, workload.optimizers
    model.head(torch.randn(2, 37)).sum().backward()
    model.blocks[1][0](torch.randn(2, 37)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return workload


def _with(**changes: Any) -> Workload:
    workload = tower()
    for name, change in changes.items():
        change(workload) if callable(change) else setattr(workload, name, change)
    return workload


def _exchange_forward(workload: Workload) -> None:
    original = workload.model.forward
    workload.model.forward = lambda *args: original(*args)


@pytest.mark.parametrize(
    ("flags", "make", "said"),
    [
        (
            "--scale fsdp2",
            lambda: _with(hook=lambda run: run.model.head.weight.register_hook(lambda gradient: gradient)),
            r"^scale: head.weight has gradient hooks, which an engine would not run; remove them first$",
        ),
        (
            "--scale fsdp2",
            lambda: _with(forward=_exchange_forward),
            r"^scale: the forward of Tower was replaced by another function .*; train without --scale$",
        ),
        (
            "--scale zero2",
            lambda: _with(optimizers=[]),
            r"^scale: ZeRO serves one optimizer, Tower has 0; use --scale fsdp2$",
        ),
        (
            "--scale zero2",
            lambda: _with(
                optimizer=lambda run: run.optimizers.__setitem__(0, torch.optim.Adafactor(run.model.parameters()))
            ),
            r"^scale: ZeRO updates many parameters as one, which Adafactor is not known to allow; use --scale fsdp2",
        ),
        (
            "--scale zero2",
            lambda: _with(part=lambda run: run.optimizers.__setitem__(0, torch.optim.SGD(run.model.head.parameters()))),
            r"^scale: SGD steps 2 of the 12 trained parameters of Tower, or others",
        ),
        ("--scale zero1", lambda: _with(half=lambda run: run.model.bfloat16()), r"^scale: blocks.1.0.weight is not in fp32"),
        (
            "--scale zero1",
            _half_stepped,
            r"^scale: ZeRO keeps one count of steps per group, and blocks.1.3.weight was stepped 0 times, blocks.1.0.weight 1 ",
        ),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_serve_is_refused_and_nothing_has_changed(
    flags: str, make: Callable[[], Workload], said: str
) -> None:
    if "zero" in flags:
        pytest.importorskip("deepspeed")
    workload = make()
    before = Snapshot(workload)
    with pytest.raises(RefusalError, match=said):
        fit(workload, flags)
    assert changed_between(before, Snapshot(workload)) == []


@pytest.mark.few
@engines(*ONE_OF_EACH)
@pytest.mark.parametrize("is_first", [True, False], ids=["penalty first", "penalty last"])
def test_gradients_that_are_there_already_are_added_to(flags: str, is_first: bool) -> None:
    """A penalty on parameters, which uses them outside of the model's call; gradients are dropped after every other step."""
    reference, workload = tower(), tower()
    for run in (reference, workload):
        (optimizer,) = run.optimizers
        for group in optimizer.param_groups:
            group["eps"] = 1e-3  # sums are rounded in another order
        with fit(run, flags) if run is workload else nullcontext():
            torch.manual_seed(1)
            for step in range(4):
                terms = (_penalty, partial(loss_of, step=step)) if is_first else (partial(loss_of, step=step), _penalty)
                torch.stack([term(run) for term in terms]).sum().backward()
                optimizer.step()
                if step % 2:
                    optimizer.zero_grad()
    assert_alike(reference.model, workload.model, rtol=1e-5, atol=1e-6)


@needs(extra="deepspeed")
@pytest.mark.parametrize("flags", ["--scale zero1", "--scale zero2", "--scale zero3"])
def test_gradients_that_the_loop_replaces_between_two_backward_passes(flags: str) -> None:
    reference, workload = tower(), tower()
    for run in (reference, workload):
        (optimizer,) = run.optimizers
        for group in optimizer.param_groups:
            group["eps"] = 1e-3
        with fit(run, flags) if run is workload else nullcontext():
            torch.manual_seed(1)
            for step in range(3):
                loss_of(run, step).backward()
                for parameter in run.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad / 2
                loss_of(run, step + 1).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_alike(reference.model, workload.model, rtol=1e-5, atol=1e-6)


@needs(extra="deepspeed")
def test_a_gradient_from_outside_of_the_model_alone_is_said() -> None:
    workload = tower()
    (optimizer,) = workload.optimizers
    with fit(workload, "--scale zero2"):
        _penalty(workload).backward()
        with pytest.raises(RefusalError, match=r"^scale: the gradient of .* comes from no backward pass that adds"):
            optimizer.step()


@needs(extra="deepspeed")
@pytest.mark.parametrize("flags", ["--scale zero3 --checkpoint", "--scale zero3"])
def test_attention_reads_the_weights_of_another_module(flags: str) -> None:
    losses: list[list[float]] = []
    for is_served in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        with fit(Workload(model, optimizer), flags) if is_served else nullcontext():
            for _ in range(3):
                loss = model(torch.randn(4, 5, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@engines("--scale fsdp2", "--scale zero3")
def test_hooks_that_the_loop_puts_on_parts_run(flags: str) -> None:
    seen: list[list[float]] = []
    for is_served in (False, True):
        workload = tower()
        part = workload.model.blocks[2][0]
        seen.append([])
        with fit(workload, flags) if is_served else nullcontext():
            for step in range(3):
                heard: list[torch.Tensor] = []
                hook = part.register_forward_hook(lambda _m, _i, output, to=heard: to.append(output))
                loss = loss_of(workload, step)
                hook.remove()
                (loss + heard[0].square().mean()).backward()
                workload.optimizers[0].step()
                workload.optimizers[0].zero_grad()
                seen[-1] += [loss.item(), heard[0].sum().item()]
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


@engines("--scale fsdp2", "--scale zero3")
def test_hooks_run_in_the_order_of_the_loop(flags: str) -> None:
    workload = tower()
    part, heard = workload.model.blocks[2][0], []
    with fit(workload, flags):
        for step, prepended in enumerate((False, True)):
            part.register_forward_hook(lambda *_, to=heard, name=step: to.append(name), prepend=prepended)
            loss_of(workload, step).backward()
        assert heard == [0, 1, 0]
        part._forward_hooks = OrderedDict()
        loss_of(workload, 2).backward()
        assert heard == [0, 1, 0]


@engines("--scale zero1", "--scale zero3", "--scale fsdp2")
def test_a_state_dict_that_the_loop_loads_is_trained_on_with(flags: str) -> None:
    losses, states = [], []
    for is_served in (False, True):
        workload = tower()
        (optimizer,) = workload.optimizers
        losses.append(go(workload, 0, 2))
        saved = copy.deepcopy(optimizer.state_dict())
        with fit(workload, flags) if is_served else nullcontext():
            losses[-1] += go(workload, 2, 4)
            optimizer.load_state_dict(copy.deepcopy(saved))
            losses[-1] += go(workload, 4, 6)
            optimizer.load_state_dict(copy.deepcopy(saved))
        states.append([optimizer.state[p]["exp_avg"] for p in workload.model.head.parameters()])
        losses[-1] += go(workload, 6, 8)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


@needs(extra="deepspeed")
def test_a_state_dict_that_comes_before_the_step_is_refused() -> None:
    workload = tower()
    (optimizer,) = workload.optimizers
    with fit(workload, "--scale zero2"):
        loss_of(workload, 1).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        said = r"scale: load_state_dict\(\) between backward\(\) and optimizer.step\(\); load before the call"
        with pytest.raises(RefusalError, match=f"^{said}$"):
            optimizer.step()
    with fit(workload, "--scale zero2"):
        go(workload, 0, 1)
        loss_of(workload, 1).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.warns(RuntimeWarning, match=f"{said}; as written is back"):
            optimizer.step()


@engines("--scale fsdp2", "--scale zero2")
def test_a_click_on_an_engine_that_cannot_follow_the_loop_is_taken_back(flags: str) -> None:
    workload = tower()
    session = fit(workload)
    go(workload, 0, 1)
    session.switching.ask(Plan.parse(flags))
    go(workload, 1, 2)
    workload.model.head.bias.requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="was frozen or exchanged, .*; as written is back"):
        go(workload, 2, 3)
    assert session.plan == Plan()
    session.undo()


def _penalty(workload: Workload) -> torch.Tensor:
    return torch.stack([1e-3 * parameter.square().sum() for parameter in workload.model.parameters()]).sum()


@needs(extra="deepspeed")
def test_what_zero_would_do_otherwise_than_the_loop_is_an_error() -> None:
    workload = tower()
    (optimizer,) = workload.optimizers
    with fit(workload, "--scale zero2"):
        loss_of(workload, 1).backward()
        workload.model.head.bias.grad = None
        with pytest.raises(
            RefusalError, match=r"^scale: head.bias has no gradient \(1 of 12 have none\), and ZeRO would step it"
        ):
            optimizer.step()
        optimizer.zero_grad()
        workload.model.head.bias.requires_grad_(False)
        with pytest.raises(RefusalError, match=r"^scale: head.bias of Tower was frozen or exchanged, which an engine"):
            loss_of(workload, 1)
        workload.model.head.bias.requires_grad_(True)


@needs(extra="deepspeed")
def test_a_step_that_overflows_is_said_to_be_skipped() -> None:
    workload = tower()
    with fit(workload, "--scale zero1") as session:
        go(workload, 0, 1)
        before = Snapshot(workload)
        (loss_of(workload, 1) * float("inf")).backward()
        workload.optimizers[0].step()
        workload.optimizers[0].zero_grad()
        assert session.log[-1].text == "gradients were not finite: update skipped, by the engine"
        changed = changed_between(before, Snapshot(workload))
        assert {name.partition(".")[0] for name in changed} <= {"norm", "random state"}
