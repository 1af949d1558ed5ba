"""Frozen models and parts off the device between their uses."""

from __future__ import annotations

import copy
import gc
import io
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit, measure, predict
from memlab.measuring.ledger import Ledger
from memlab.runtime.interrupts import deferred_interrupts
from memlab.session.snapshot import Snapshot
from memlab.techniques.offload.activations import OffloadActivations
from memlab.techniques.offload.spill import is_spilled
from tests.helpers.interruptions import interrupt
from tests.helpers.snapshots import changed_between
from tests.rescue.faults import Faults

_WIDTH = 64
_AWAY = "off the device between uses: "
_NOTHING = (
    "offload: frozen: beside {} there is no frozen model on cpu with a weight of 1024 elements or more, and no such part within it; "
    "freeze one first (requires_grad_(False)), or use --offload optimizer,activations"
)


def net(seed: int, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    made = [nn.Sequential(nn.Linear(_WIDTH, 96), nn.Tanh(), nn.Linear(96, _WIDTH)) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *made, nn.Linear(_WIDTH, _WIDTH))


def frozen(seed: int = 2) -> nn.Sequential:
    return net(seed).requires_grad_(False)


class Vae(nn.Module):
    """A model of which the loop calls a method; a parameter of its own is read by that."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = net(3)
        self.quantise = nn.Linear(_WIDTH, _WIDTH)
        self.bank = nn.Parameter(torch.randn(_WIDTH, _WIDTH))

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.quantise(self.encoder(inputs)) @ self.bank


class Captioner(nn.Module):
    """A trained model with a frozen tower, before or behind a layer that trains."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Identity() if is_first else nn.Linear(_WIDTH, _WIDTH)
        self.tower = nn.Sequential(*net(4)[1:-1]).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(_WIDTH, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 8))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.head(self.tower(self.before(inputs))), targets)}


def at_rest(model: nn.Module) -> int:
    return sum(is_spilled(p.untyped_storage()) for p in model.parameters())


class Loop:
    """A loop of a student and what is beside it.

    Args:
        made: what is beside it, by name.
        loss: of the student, what is beside it and inputs.
        after: what the loop does at the end of a step of a number.
    """

    def __init__(
        self,
        made: Callable[[], dict[str, Any]],
        loss: Callable[..., torch.Tensor],
        after: Callable[..., None] = lambda _student, _beside, _step: None,
    ) -> None:
        self._made, self._loss, self._after = made, loss, after

    def run(
        self, flags: str, steps: int = 9, *, rescue: bool = False
    ) -> tuple[list[Any], tuple[str, ...], dict[str, int]]:
        """Return losses and all weights at the end, what was said, and how many parameters were at rest; the undo is checked."""
        beside, student = self._made(), net(1)
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
        session = fit(Workload(student, optimizer), flags, rescue=rescue)
        found: list[Any] = []
        torch.manual_seed(5)
        for step in range(steps):
            loss = self._loss(student, beside, torch.randn(8, _WIDTH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            self._after(student, beside, step)
        modules = {name: value for name, value in beside.items() if isinstance(value, nn.Module)}
        resting, notes = {name: at_rest(module) for name, module in modules.items()}, session.notes
        identities = [id(p) for module in modules.values() for p in module.parameters()]
        session.undo()
        assert identities == [id(p) for module in modules.values() for p in module.parameters()]
        for module in modules.values():
            assert at_rest(module) == 0
            assert all(vars(part).keys() == vars(copy.deepcopy(part)).keys() for part in module.modules())
            assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
            found += [p.detach().clone() for p in module.parameters()]
        return found, notes, resting


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def distance_to_teacher(student: nn.Module, beside: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    return (student(inputs) - beside["teacher"](inputs)).square().mean()


def perceptual(student: nn.Module, beside: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    return (beside["teacher"](student(inputs)) - inputs).square().mean()


def under(context: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    def loss(student: nn.Module, beside: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
        with context():
            wanted = beside["teacher"](inputs)
        return (student(inputs) - wanted.clone()).square().mean()

    return loss


def teacher() -> dict[str, Any]:
    return {"teacher": frozen()}


# -- exactness -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rescue", [False, True])
@pytest.mark.parametrize(
    "flags", ["", "--accumulate 2", "--bf16", "--adam8bit", "--offload activations", "--checkpoint"]
)
@pytest.mark.parametrize(
    "loss",
    [distance_to_teacher, perceptual, under(torch.no_grad), under(torch.inference_mode)],
    ids=["with a graph", "gradients through it", "no_grad", "inference_mode"],
)
@pytest.mark.few(6, full=24)
def test_losses_and_weights_are_those_without_it(
    loss: Callable[..., torch.Tensor], flags: str, *, rescue: bool
) -> None:
    loop = Loop(teacher, loss)
    together = f"{flags},frozen" if "--offload" in flags else f"{flags} --offload frozen".strip()
    found, notes, resting = loop.run(together, rescue=rescue)
    assert same(found, loop.run(flags, rescue=rescue)[0])
    assert resting == {"teacher": 8}
    assert f"{_AWAY}Sequential (176.0 KiB)" in notes


def test_autocast_of_the_loops_own() -> None:
    loop = Loop(teacher, under(lambda: torch.autocast("cpu", torch.bfloat16)))
    assert same(loop.run("--offload frozen")[0], loop.run("")[0])


def test_a_method_that_calls_parts_is_served() -> None:
    def loss(student: nn.Module, beside: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
        return (student(inputs) - beside["vae"].encode(inputs)).square().mean()

    loop = Loop(lambda: {"vae": Vae().requires_grad_(False)}, loss)
    found, _, resting = loop.run("--offload frozen")
    assert same(found, loop.run("")[0])
    assert resting == {"vae": 10}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "flags", ["", "--accumulate 2", "--checkpoint", "--bf16", "--fp16", "--release-grads", "--adam8bit"]
)
@pytest.mark.few(5, full=14)
def test_a_frozen_part_of_the_trained_model(flags: str, *, is_first: bool) -> None:
    def losses(plan: str) -> list[float]:
        model = Captioner(is_first=is_first)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        load = Workload(model, optimizer)
        torch.manual_seed(2)
        with fit(load, plan):
            for _ in range(5):
                loss = model(torch.randn(8, _WIDTH), torch.randn(8, 8))["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            # by the first parameter of a model loops find out its device
            assert at_rest(model.tower) == (6 - is_first if "frozen" in plan else 0)
            before = Snapshot(load)
        if "8bit" not in plan:  # whose own way back is close, not to the bit
            assert changed_between(before, Snapshot(load)) == []
        return found

    assert losses(f"{flags} --offload frozen".strip()) == losses(flags)


def _random_loop(seed: int) -> Loop:
    """A loop that uses several frozen models in some order, in ways that are drawn."""
    draw = random.Random(seed)
    kinds = [draw.choice(["no_grad", "graph", "through", "method", "twice"]) for _ in range(draw.randint(1, 3))]
    writes = draw.choice(["", "in place", "data", "load", "cast", "once"])

    def made() -> dict[str, Any]:
        return {
            str(number): Vae().requires_grad_(False) if kind == "method" else frozen(number)
            for number, kind in enumerate(kinds)
        }

    def loss(student: nn.Module, beside: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
        outputs = student(inputs)
        total = outputs.square().mean()
        for number, kind in enumerate(kinds):
            model = beside[str(number)]
            with torch.no_grad() if kind == "no_grad" else nullcontext():
                given = outputs if kind == "through" else inputs
                found = model.encode(given) if kind == "method" else model(given)
            if kind == "twice":
                found = found + model(outputs)
            total = total + (outputs - found).square().mean()
        return total

    def after(student: nn.Module, beside: dict[str, Any], step: int) -> None:
        model = beside["0"]
        if writes == "load" and step == 2:
            model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
        elif writes == "cast" and step == 2:
            model.double().float()
        elif writes in ("in place", "data") or (writes == "once" and step == 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    if writes == "data":
                        parameter.data = parameter.data * 0.99
                    else:
                        parameter.mul_(0.99)

    return Loop(made, loss, after)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.few(8, full=40)
def test_generated_loops(seed: int) -> None:
    loop = _random_loop(seed)
    assert same(loop.run("--offload frozen", steps=6)[0], loop.run("", steps=6)[0])


# -- what the loop does to them --------------------------------------------------------------------------


def _averaged() -> dict[str, Any]:
    return {"teacher": torch.optim.swa_utils.AveragedModel(net(1)).requires_grad_(False)}


def _in_place(student: nn.Module, beside: dict[str, Any], _step: int) -> None:
    with torch.no_grad():
        for average, weight in zip(beside["teacher"].parameters(), student.parameters(), strict=True):
            average.mul_(0.9).add_(weight, alpha=0.1)


def _replaced(student: nn.Module, beside: dict[str, Any], _step: int) -> None:
    for average, weight in zip(beside["teacher"].parameters(), student.parameters(), strict=True):
        average.data = average.data * 0.9 + weight.data * 0.1


@pytest.mark.parametrize(
    ("made", "after"),
    [
        (teacher, _in_place),
        (teacher, _replaced),
        (_averaged, lambda student, beside, _: beside["teacher"].update_parameters(student)),
    ],
    ids=["in place", "replaced", "AveragedModel"],
)
def test_averages_that_the_loop_writes_stay(made: Callable[[], dict[str, Any]], after: Callable[..., None]) -> None:
    loop = Loop(made, distance_to_teacher, after)
    found, notes, resting = loop.run("--offload frozen")
    assert same(found, loop.run("")[0])
    assert resting == {"teacher": 0}
    name = type(made()["teacher"]).__name__
    assert notes == (f"{name} stays on the device: the loop writes to its weights step after step",)


def test_what_is_written_now_and_then_holds() -> None:
    def after(_student: nn.Module, beside: dict[str, Any], step: int) -> None:
        if step == 3:
            beside["teacher"].load_state_dict(net(7).state_dict())
        if step == 5:
            for parameter in beside["teacher"].parameters():
                parameter.data.mul_(0.5)

    loop = Loop(teacher, distance_to_teacher, after)
    found, _, resting = loop.run("--offload frozen")
    assert same(found, loop.run("")[0])
    assert resting == {"teacher": 8}


def test_a_forward_that_writes_to_its_own_weights() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.codes = nn.Parameter(torch.randn(_WIDTH, _WIDTH), requires_grad=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found = inputs @ self.codes
            self.codes.data.mul_(0.99)  # past its version
            return found

    loop = Loop(lambda: {"teacher": Codebook()}, under(torch.no_grad))
    assert same(loop.run("--offload frozen")[0], loop.run("")[0])


def test_what_is_unfrozen_trains() -> None:
    def after(_student: nn.Module, beside: dict[str, Any], step: int) -> None:
        if step == 3:
            beside["teacher"].requires_grad_(True)
            beside["optimizer"] = torch.optim.SGD(beside["teacher"].parameters(), lr=0.1)
        if "optimizer" in beside:
            beside["optimizer"].step()
            beside["optimizer"].zero_grad()

    loop = Loop(teacher, distance_to_teacher, after)
    found, notes, resting = loop.run("--offload frozen")
    assert same(found, loop.run("")[0])
    assert resting == {"teacher": 0}
    assert notes == ("Sequential stays on the device: it is trained by now",)


def test_what_comes_later_is_found() -> None:
    def after(_student: nn.Module, beside: dict[str, Any], step: int) -> None:
        if step == 1:
            beside["teacher"] = frozen(9)
            gc.collect()

    _, notes, resting = Loop(teacher, distance_to_teacher, after).run("--offload frozen")
    assert resting == {"teacher": 8}
    assert notes == (f"{_AWAY}Sequential (176.0 KiB)",)


def test_a_judge_that_is_frozen_for_a_part_of_each_step_stays() -> None:
    generator, judge = net(1), net(2)
    optimizer, of_judge = torch.optim.AdamW(generator.parameters()), torch.optim.AdamW(judge.parameters())
    judge.requires_grad_(False)
    with pytest.raises(RefusalError):
        fit(Workload(generator, optimizer), "--offload frozen")
    assert of_judge.param_groups


def test_copies_files_and_state_dicts() -> None:
    student, model = net(1), frozen()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen"):
        assert at_rest(model) == 8
        copied, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for each in (model, copied, torch.load(file, weights_only=False)):
            assert all(torch.equal(value, expected[name]) for name, value in each.state_dict().items())
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in copied.modules())
        assert at_rest(copied) == 0
        held = model.state_dict()
    with torch.no_grad():
        model[0].weight.zero_()
    assert not held["0.weight"].any()  # it follows, as without a plan


def test_what_the_loop_holds_and_what_models_share_stays() -> None:
    student, model, other = net(1), frozen(), frozen(3)
    view = model[0].weight.data
    other[0].weight = model[4].weight
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen") as session:
        assert (at_rest(model), at_rest(other)) == (6, 7)
        assert session.notes == (
            f"{_AWAY}2 × Sequential (304.0 KiB); 48.0 KiB stay: in several models, held by the loop, compiled or of a class of their own",
        )
        with torch.no_grad():
            model[0].weight.mul_(2)
        assert torch.equal(view, model[0].weight)


def test_layers_shared_with_the_trained_model_stay() -> None:
    """As of a reference model whose first layers are the policy's own."""
    student = net(1)
    student[:3].requires_grad_(False)
    reference = copy.deepcopy(student).requires_grad_(False)
    for place in range(3):
        reference[place] = student[place]
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen"):
        assert (at_rest(student), at_rest(reference)) == (
            0,
            3,
        )  # of two blocks whose weights are its own, and the last layer
        inputs = torch.randn(4, _WIDTH)
        student(inputs).sum().backward()
        assert torch.equal(reference(inputs), student(inputs))


def test_a_model_that_is_deleted_is_freed() -> None:
    student, model = net(1), frozen()
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen"):
        there = weakref.ref(model), weakref.ref(model[0].weight)
        del model
        gc.collect()
        assert [each() for each in there] == [None, None]


def test_a_call_that_is_interrupted_leaves_nothing_on_the_device() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.is_slow = net(3), True

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.is_slow:
                interrupt()
            return self.inner(inputs)

    student, model = net(1), Slow().requires_grad_(False)
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen") as session:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, _WIDTH))
        session.loop_was_left()
        assert at_rest(model) == 8
        model.is_slow = False
        assert model(torch.randn(2, _WIDTH)).shape == (2, _WIDTH)
    assert at_rest(model) == 0


# -- plans ---------------------------------------------------------------------------------------------


def test_a_change_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    student, model = net(1), frozen()
    inputs = torch.randn(4, _WIDTH)
    expected = model(inputs)
    session = fit(Workload(student, torch.optim.AdamW(student.parameters())))
    with monkeypatch.context() as patch:
        patch.setattr(OffloadActivations, "attach_model", fails)
        with pytest.raises(RuntimeError):
            session.switch("--offload frozen,activations", now=True)
        assert at_rest(model) == 0
        assert not any(part._forward_hooks for part in model.modules())
        session.switch("--offload frozen", now=True)
        with pytest.raises(RuntimeError):
            session.switch("--offload activations", now=True)
    assert session.plan.label == "--offload frozen"
    assert at_rest(model) == 8
    assert torch.equal(model(inputs), expected)
    assert at_rest(model) == 8
    session.undo()
    assert at_rest(model) == 0
    assert not any(part._forward_hooks for part in model.modules())
    assert torch.equal(model(inputs), expected)


def test_plans_that_follow_one_another() -> None:
    student, model = net(1), frozen()
    inputs = torch.randn(4, _WIDTH)
    expected = model(inputs)
    session = fit(Workload(student, torch.optim.AdamW(student.parameters())))
    for flags in (
        "--offload frozen",
        "--offload frozen,optimizer --bf16",
        "--bf16",
        "--precision pure-bf16 --offload frozen",
        "",
    ):
        session.switch(flags, now=True)
        assert at_rest(model) == (8 if "frozen" in flags else 0)
        assert torch.equal(model(inputs), expected)
    session.undo()


def test_one_of_several_models_that_train_takes_them() -> None:
    one, other, model = net(1), net(2), frozen()
    sessions = [fit(Workload(each, torch.optim.AdamW(each.parameters())), "--offload frozen") for each in (one, other)]
    assert at_rest(model) == 8
    for session in reversed(sessions):
        session.undo()
    assert at_rest(model) == 0


def test_frozen_layers_under_adapters_are_not_meant() -> None:
    pytest.importorskip("peft", reason="needs peft")
    student, model = net(1), frozen()
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--lora r=2 --offload frozen"):
        assert (at_rest(student), at_rest(model)) == (0, 8)
    assert (at_rest(student), at_rest(model)) == (0, 0)


@pytest.mark.parametrize("kind", ["none", "small", "elsewhere"])
def test_nothing_frozen_is_refused(kind: str) -> None:
    student = net(1)
    _other = {"none": nn.Identity(), "small": nn.Linear(8, 8), "elsewhere": nn.Linear(99, 99, device="meta")}[
        kind
    ].requires_grad_(False)
    gc.collect()
    with pytest.raises(RefusalError) as refusal:
        fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen")
    assert str(refusal.value) == _NOTHING.format("Sequential")


def test_compiled_models_stay() -> None:
    student = net(1)
    _compiled = torch.compile(frozen())
    with pytest.raises(RefusalError):
        fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen")


# -- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "flags",
    ["", "--accumulate 2", "--checkpoint", "--bf16", "--release-grads", "--adam8bit", "--offload params", "--offload optimizer,activations"],
)  # fmt: skip
@pytest.mark.few(6, full=16)
def test_predicted_peaks_are_the_measured_ones(flags: str, *, is_first: bool) -> None:
    model = Captioner(is_first=is_first)
    batch = torch.randn(16, _WIDTH), torch.randn(16, 8)
    load = Workload(model, torch.optim.AdamW(model.parameters()), batch=batch)
    together = f"{flags},frozen" if "--offload" in flags else f"{flags} --offload frozen".strip()
    measured = measure(load, together, 2)
    assert predict(load, together).peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)
    if "params" not in flags:
        assert measured.peak_allocated_bytes < measure(load, flags, 2).peak_allocated_bytes - 100_000


def test_one_block_at_a_time_is_on_the_device() -> None:
    model = Captioner(is_first=False)
    weights = [p for p in model.tower.parameters() if p.dim() == 2]
    on_device = []
    for block in model.tower:
        block[1].register_forward_hook(lambda *_: on_device.append([id(p) for p in weights if is_home(p)]))
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--offload frozen"):
        resting = {id(p): p.data_ptr() for p in weights}
        is_home = lambda p: p.data_ptr() != resting[id(p)]  # noqa: E731
        model(torch.randn(2, _WIDTH), torch.randn(2, 8))
        assert at_rest(model.tower) == 6
    assert on_device == [[id(p) for p in weights[at : at + 2]] for at in (0, 2, 4)]


def test_weights_beside_the_model_are_in_no_peak_of_a_cpu() -> None:
    student, model = net(1), frozen()
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen"):
        ledger = Ledger()
        ledger.begin([])
        with ledger, torch.no_grad():
            model(torch.randn(1, _WIDTH))
        assert ledger.peak_bytes < 4 * 1024
        ledger.close()


def test_memory_that_runs_out_anywhere_is_rescued_or_raised_with_nothing_lost() -> None:
    def run(at: int) -> tuple[list[float], int, bool]:
        model = Captioner(is_first=False).double()
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        torch.manual_seed(2)
        batches = [(torch.randn(8, _WIDTH).double(), torch.randn(8, 8).double()) for _ in range(3)]
        model.head[2].p = 0.0
        faults = Faults([at])
        with fit(Workload(model, optimizer), "--offload frozen", rescue=True):
            for step, batch in enumerate(batches):
                try:
                    with faults if step == 1 else nullcontext():
                        loss = model(*batch)["loss"]
                        loss.backward()
                        optimizer.step()
                except torch.OutOfMemoryError:
                    return found, faults.count, False
                optimizer.zero_grad()
                found.append(loss.item())
            assert at_rest(model.tower) == 6
        assert at_rest(model.tower) == 0
        return found, faults.count, True

    expected, count, _ = run(0)
    assert count > 20
    for at in range(1, count + 1, 3):
        found, _, is_rescued = run(at)
        assert is_rescued
        assert found == pytest.approx(expected, rel=1e-9)


def test_interrupts_are_held_back_while_weights_come_and_go() -> None:
    student, model = net(1), frozen()
    with fit(Workload(student, torch.optim.AdamW(student.parameters())), "--offload frozen"):
        with pytest.raises(KeyboardInterrupt), deferred_interrupts():
            interrupt()
            model(torch.randn(1, _WIDTH))
        assert at_rest(model) == 8
