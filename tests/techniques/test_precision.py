"""Number formats: true gradients, skipped steps, exact masters."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization.observer import PerChannelMinMaxObserver
from transformers import GPT2Config, GPT2LMHeadModel

from memlab import RefusalError, Workload, fit
from memlab.measuring.runs import training_step
from memlab.plan import Plan
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.state_entries import kept_of
from memlab.session import Session, check
from memlab.session.snapshot import Snapshot
from memlab.techniques.offload.optimizer_state import OffloadOptimizer
from memlab.techniques.precision import cast_outputs
from memlab.techniques.precision.loss_scale import FIRST_SCALE
from memlab.techniques.precision.precision import PrecisionChoice
from tests.helpers.snapshots import changed_between
from tests.techniques.models import Regressor, distance, gpt2, gradients, ragged_batch, regression_batch, workload


def scale_of(session: Session) -> float:
    return next(t for t in session.techniques if isinstance(t, PrecisionChoice))._scaler.scale


@pytest.mark.parametrize(("flags", "tolerance"), [("--fp16", 5e-3), ("--bf16", 3e-2), ("--precision fp32", 1e-7)])
@pytest.mark.parametrize("accumulate", ["", "--accumulate 4"])
def test_gradients_are_close_to_fp32(flags: str, tolerance: float, accumulate: str) -> None:
    model, batch = gpt2(), ragged_batch()
    model(**batch).loss.backward()
    expected = gradients(model)
    with fit(workload(model), f"{flags} {accumulate}"):
        output = model(**batch)
        output.loss.backward()
    assert output.logits.dtype is torch.float32
    assert distance(gradients(model), expected) < max(tolerance, 1e-6)


def test_half_precision_is_really_used() -> None:
    model, batch = gpt2(), ragged_batch()
    seen: set[torch.dtype] = set()
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda _m, _a, out: seen.add(out.dtype))
    for flags, dtype in (
        ("--fp16", torch.float16),
        ("--bf16", torch.bfloat16),
        ("--precision pure-bf16", torch.bfloat16),
    ):
        with fit(workload(model), flags):
            model(**batch)
        assert seen == {dtype}, flags
        seen.clear()


def test_gradients_too_small_for_fp16_survive_and_clipping_sees_true_ones() -> None:
    model, (inputs, targets) = Regressor().layers, regression_batch(8)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(inputs), targets) * 1e-5

    loss().backward()
    expected = gradients(model)
    with fit(workload(model), "--fp16"):
        loss().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert float(norm) == pytest.approx(float(torch.stack([g.norm() for g in expected]).norm()), rel=5e-3)
    assert distance(gradients(model), expected) < 5e-3


def test_hooks_of_the_loop_see_true_gradients_or_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    seen: list[float] = []
    model[0].weight.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))  # type: ignore[no-untyped-call]
    model.register_full_backward_hook(lambda _m, _i, outputs: seen.append(float(outputs[0].abs().max())))
    model(torch.ones(2, 4)).mean().mul(0.01).backward()
    with fit(workload(model), "--fp16"):
        model(torch.ones(2, 4)).mean().mul(0.01).backward()
    assert seen[2:] == pytest.approx(seen[:2], rel=1e-2)
    model[1].register_full_backward_pre_hook(lambda _m, _outputs: None)
    with pytest.raises(
        RefusalError, match=r"Sequential has a backward hook \(1\), which would be given gradients multiplied"
    ):
        fit(workload(model), "--fp16")


def test_backward_hooks_that_come_after_the_plan_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with fit(workload(model), "--fp16"):
        model[1].register_full_backward_hook(lambda _m, _i, _o: None)
        with pytest.raises(RefusalError) as caught:
            model(torch.ones(2, 4))
    assert str(caught.value) == (
        "precision: Sequential has a backward hook (1), which would be given gradients multiplied by the loss scale; use --bf16"
    )


@pytest.mark.parametrize("when", ["before the plan", "under it"])
def test_a_hook_that_waits_for_several_gradients_is_refused_under_pure_bf16(when: str) -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), []
    weights = list(model.parameters())

    def watch() -> Any:
        return torch.autograd.graph.register_multi_grad_hook(weights, seen.append, mode="all")

    first = torch.autograd.graph.register_multi_grad_hook(weights, seen.append, mode="any")
    waiting = watch() if when == "before the plan" else None
    with pytest.raises(RefusalError) as caught, fit(workload(model), "--precision pure-bf16"):
        waiting = watch()
        model(torch.ones(2, 4))
    assert str(caught.value) == (
        "precision: a hook waits for the gradients of several weights (register_multi_grad_hook), which torch would not call "
        "any more once they are in bf16; use --bf16, or a hook for each (register_hook)"
    )
    assert waiting is not None
    waiting.remove()
    with fit(workload(model), "--precision pure-bf16"):
        model(torch.ones(2, 4)).mean().backward()
    assert len(seen) == 1
    first.remove()


def test_a_step_with_infinite_gradients_is_skipped_and_the_scale_halved() -> None:
    model, batch = Regressor(), regression_batch()
    load = workload(model)
    with fit(load, "--fp16") as session:
        before = [p.detach().clone() for p in model.parameters()]
        (model(*batch) * 1e38).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)  # hides the infinity from a look at the gradients
        load.optimizers[0].step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert scale_of(session) == FIRST_SCALE / 2
        assert session.log[-1].text == "gradients were not finite: update skipped, loss scale halved"
        model.zero_grad()
        model(*batch).backward()
        load.optimizers[0].step()
        assert not torch.equal(next(model.parameters()), before[0])


def test_two_optimizers_of_one_model_skip_together() -> None:
    model, batch = Regressor(), regression_batch()
    first = torch.optim.AdamW(model.layers[0].parameters())
    second = torch.optim.AdamW(model.layers[2].parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with fit(Workload(model, [first, second]), "--fp16") as session:
        (model(*batch) * 1e38).backward()
        first.step()
        second.step()
        assert scale_of(session) == FIRST_SCALE / 2
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("flags", ["--fp16", "--fp16 --accumulate 2"])
def test_gradients_that_the_loop_takes_itself_are_not_scaled(flags: str) -> None:
    """The first scale, 2 ** 16, would make the gradients of a sum infinite, and a loop that goes on from them has nothing to skip."""

    def gradients(plan: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with fit(Workload(model, optimizer), plan):
            chain, found = torch.randn(64, 8), []
            for _ in range(3):
                for _ in range(2):
                    sample = chain.detach().requires_grad_()
                    found += torch.autograd.grad(100 * model(sample).sum(), [sample, *model.parameters()])
                    chain = sample - 1e-3 * found[-5]
                optimizer.zero_grad()
                model(chain.detach()).mean().backward()
                optimizer.step()
        return [*found, chain.detach()]

    for one, other in zip(gradients(flags), gradients(""), strict=True):
        assert float((one - other).norm() / other.norm()) < 0.1


def test_the_scale_doubles_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlab.techniques.precision.loss_scale._GROWTH_STEPS", 3)
    model, batch = Regressor(), regression_batch()
    load = workload(model)
    with fit(load, "--fp16") as session:
        for _ in range(3):
            model(*batch).backward()
            load.optimizers[0].step()
        assert scale_of(session) == FIRST_SCALE * 2


def test_an_lbfgs_like_closure_is_looked_at_after_its_backward() -> None:
    model, batch = Regressor(), regression_batch()
    load = workload(model)
    with fit(load, "--fp16"):

        def closure() -> torch.Tensor:
            model.zero_grad()
            loss = model(*batch) * 1e38
            loss.backward()
            return loss

        before = [p.detach().clone() for p in model.parameters()]
        load.optimizers[0].step(closure)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_loop_with_its_own_autocast_keeps_it_and_the_notes_say_so() -> None:
    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--bf16") as session:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch)
        assert session.notes == ("the loop already runs under autocast (bf16); its own precision is kept",)


class TestPureBf16:
    """bf16 parameters with exact fp32 masters."""

    def test_undo_gives_back_the_masters_bit_for_bit(self) -> None:
        model, batch = gpt2(), ragged_batch()
        load = workload(model, **batch)
        training_step(load)
        model(**batch).loss.backward()
        before = Snapshot(load)
        session = fit(load, "--precision pure-bf16")
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
        session.undo()
        # moments and pending gradients were rounded to bf16, and the notes of the plan say so
        changed = changed_between(before, Snapshot(load))
        assert all(name.startswith(("gradient of", "optimizer 0 state")) for name in changed)

    def test_updates_smaller_than_a_bf16_step_are_not_lost(self) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        start = model.weight.detach().clone()
        with fit(Workload(model, optimizer), "--precision pure-bf16"):
            for _ in range(50):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        moved = start - model.weight.detach()
        assert torch.allclose(moved, torch.full_like(moved, 50 * 4 * 1e-5), rtol=1e-2)

    @pytest.mark.full
    def test_it_follows_fp32_over_100_steps(self) -> None:
        losses = []
        for flags in ("", "--precision pure-bf16"):
            load = workload(gpt2(vocabulary=128), lr=3e-4, **ragged_batch(vocabulary=128))
            with fit(load, flags):
                losses.append([training_step(load) for _ in range(100)])
        drift = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
        assert drift < 0.01

    def test_evaluation_takes_fp32_inputs(self) -> None:
        model = Regressor()
        with fit(workload(model), "--precision pure-bf16"), torch.no_grad():
            assert model.eval()(*regression_batch()).dtype is torch.float32

    def test_random_numbers_of_the_user_are_untouched(self) -> None:
        load = workload(gpt2(vocabulary=128), **ragged_batch(vocabulary=128))
        torch.manual_seed(0)
        expected = torch.rand(3)
        with fit(load, "--precision pure-bf16"):
            torch.manual_seed(0)
            training_step(load)
            assert torch.equal(torch.rand(3), expected)

    def test_checkpoints_hold_fp32_moments(self) -> None:
        load = workload(gpt2(vocabulary=128), **ragged_batch(vocabulary=128))
        with fit(load, "--precision pure-bf16"):
            training_step(load)
            saved = load.optimizers[0].state_dict()["state"][0]
            assert saved["exp_avg"].dtype is torch.float32
            kept = kept_of(load.optimizers[0].state[next(load.model.parameters())])
            assert kept["exp_avg"].dtype is torch.bfloat16

    def test_what_the_loop_puts_in_place_of_weights_stays(self) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with fit(Workload(model, optimizer), "--precision pure-bf16"):
            model.weight.data[0] = 0.0  # as with a mask of pruned weights; what is left of their bits made them NaN
            model.bias.data = torch.full((8,), 0.1)
            kept = model.state_dict()["weight"]
            optimizer.step()
        assert kept.isfinite().all()
        assert float(model.weight.detach()[0].abs().max()) < 1e-40
        assert torch.equal(model.bias.detach(), torch.full((8,), 0.1))

    def test_batch_norm_and_buffers_that_parts_share(self) -> None:
        shared, parts = torch.linspace(0, 1, 3), [nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)]
        for part in parts:
            part.register_buffer("shared", shared)
        model = nn.Sequential(*parts)
        with fit(workload(model), "--precision pure-bf16"):
            assert [part.weight.dtype for part in parts] == [torch.bfloat16, torch.float32]
            model(torch.randn(2, 3, 8, 8)).sum().backward()
        assert torch.equal(shared, torch.linspace(0, 1, 3))

    def test_an_optimizer_that_differentiates_gradients_is_refused(self) -> None:
        class Curved(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                parameters = self.param_groups[0]["params"]
                torch.autograd.grad(parameters[0].grad.sum(), parameters)

        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        optimizer = Curved(model.parameters(), lr=0.1)
        with fit(Workload(model, optimizer), "--precision pure-bf16"):
            model(torch.ones(2, 4)).square().sum().backward(create_graph=True)
            with pytest.raises(RefusalError, match="Curved may differentiate gradients"):
                optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "--fp16",
            "precision: --fp16 needs float32 parameters, Regressor has float16 ones; "
            "call model.float() and make the optimizer anew, or leave the precision as it is",
        ),
        (
            "--precision tf32",
            "precision: tf32 needs a CUDA GPU of the Ampere generation or newer; use --bf16 here",
        ),
    ],
)
def test_refusals(flags: str, text: str) -> None:
    model = Regressor().half()
    with pytest.raises(RefusalError) as caught:
        fit(workload(model), flags)
    assert str(caught.value) == text


@pytest.mark.parametrize("flags", ["--fp16", "--bf16", "--precision pure-bf16"])
def test_complex_parameters_are_refused_without_an_advice_that_leaves_them_as_they_are(flags: str) -> None:
    with pytest.raises(RefusalError) as caught:
        fit(workload(nn.Linear(4, 4, dtype=torch.complex64)), flags)
    assert str(caught.value) == (
        f"precision: {flags} needs float32 parameters, Linear has complex64 ones; leave the precision as it is"
    )


def test_recurrent_layers_in_fp16_on_the_cpu_are_refused() -> None:
    model = nn.LSTM(4, 4)
    with pytest.raises(RefusalError) as caught:
        fit(workload(model), "--fp16")
    assert str(caught.value) == "precision: the CPU has no fp16 kernels for recurrent layers; use --bf16 here"


class _Summing(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 4).index_add(0, torch.zeros(len(rows), dtype=torch.long), super().forward(rows))


class _Warming(nn.Linear):
    """Does in later calls what does not run in 16 bits, or fails."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls, self.fails = 0, False
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = super().forward(rows)
        self.calls += 1
        if self.fails:
            raise ValueError("of the model's own")
        if self.calls > 2:
            self.mean.lerp_(output.detach().mean(0), 0.1)
        return output


@pytest.mark.filterwarnings("ignore:memlab. refused")
@pytest.mark.parametrize("flags", ["--bf16", "--fp16"])
def test_what_does_not_run_in_half_precision_in_a_later_step_ends_no_loop(flags: str) -> None:
    model = _Warming()
    load = workload(model)
    with fit(load, flags) as session:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            load.optimizers[0].step()
        assert session.plan == Plan()
        assert session.log[-1].text == (
            f"refused {flags}: precision: _Warming does not run in {flags.removeprefix('--')}: RuntimeError: expected dtype "
            f"float for `end` but got dtype {'c10::Half' if 'fp' in flags else 'c10::BFloat16'}; leave its precision as it is; "
            "as written is back"
        )
    assert model.calls == 4


def test_an_error_of_the_models_own_in_a_later_step_is_raised() -> None:
    model = _Warming()
    load = workload(model)
    with fit(load, "--bf16") as session:
        model(torch.ones(2, 4)).sum().backward()
        load.optimizers[0].step()
        model.fails = True
        with pytest.raises(ValueError, match="of the model's own"):
            model(torch.ones(2, 4))
        assert session.plan == Plan.parse("--bf16")


class _Leaving(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = super().forward(rows)
        self.penalty = output.square().mean()
        return output


class _Timed(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.time = nn.Linear(1, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + self.time(torch.zeros(1))


@pytest.mark.parametrize(
    ("kind", "flags", "text"),
    [
        (_Timed, "--precision pure-bf16", "precision: _Timed does not run in pure-bf16: RuntimeError: "),
        (_Summing, "--bf16", "precision: _Summing does not run in bf16: RuntimeError: index_add_(): self (Float) and source"),
        (_Summing, "--accumulate 2 --fp16", "precision: _Summing does not run in fp16: RuntimeError: index_add_()"),
        (
            _Leaving, "--fp16",
            "precision: _Leaving does not run in fp16: its gradients are scaled at the output, and penalty is past it",
        ),
    ],
)  # fmt: skip
def test_models_that_half_precision_is_not_for_are_refused(kind: type[nn.Linear], flags: str, text: str) -> None:
    model = kind(4, 4)
    with fit(workload(model), flags), pytest.raises(RefusalError) as caught:
        model(torch.ones(8, 4))
    assert str(caught.value).startswith(text)
    assert not hasattr(model, "penalty")


def test_a_refused_model_whose_buffers_grow_in_the_first_call_is_as_it_was() -> None:
    class Observed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.observer = PerChannelMinMaxObserver()  # its buffers are empty at first

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.observer(self.weight)
            return torch.linalg.qr(super().forward(rows))[1]

    model = Observed()
    before = copy.deepcopy(model.state_dict())
    with fit(workload(model), "--precision pure-bf16"), pytest.raises(RefusalError, match="does not run in pure-bf16"):
        model(torch.ones(8, 4))
    after = model.state_dict()
    assert [(name, value.tolist()) for name, value in after.items()] == [(n, v.tolist()) for n, v in before.items()]


class _Counted(_Timed):
    """One whose evaluation, or training, does not run in 16 bits, and that counts its calls."""

    def __init__(self, *, trained: bool, evaluated: bool) -> None:
        super().__init__(4, 4)
        self.fails = {True: trained, False: evaluated}
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(rows) if self.fails[torch.is_grad_enabled()] else nn.Linear.forward(self, rows)

    def generate(self) -> torch.Tensor:
        with torch.no_grad():
            return self(torch.ones(8, 4))


_EVALUATIONS: dict[str, Callable[[_Counted], torch.Tensor]] = {
    "generate": lambda model: model.generate(),
    "no_grad": lambda model: torch.no_grad()(model)(torch.ones(8, 4)),
    "inference_mode": lambda model: torch.inference_mode()(model)(torch.ones(8, 4)),
    "no_grad in eval mode": lambda model: torch.no_grad()(model.eval())(torch.ones(8, 4)),
}


@pytest.mark.parametrize("way", _EVALUATIONS)
@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--precision pure-bf16"])
def test_a_model_that_half_precision_is_not_for_is_refused_when_it_is_evaluated_first(way: str, flags: str) -> None:
    model = _Counted(trained=True, evaluated=True)
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with fit(workload(model), flags):
        if flags != "--precision pure-bf16":  # evaluations are as they are written
            assert _EVALUATIONS[way](model).dtype is torch.float32
            return
        for _ in range(2):  # the second call is a first one still
            with pytest.raises(RefusalError, match="precision: _Counted does not run in pure-bf16: RuntimeError: "):
                _EVALUATIONS[way](model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


@pytest.mark.parametrize("first", ["trained", "evaluated"])
def test_calls_with_and_without_gradients_are_looked_at_each(first: str) -> None:
    model = _Counted(trained=first == "evaluated", evaluated=first == "trained")
    with fit(workload(model), "--precision pure-bf16"):
        if first == "evaluated":
            model.generate()
        else:
            model(torch.ones(8, 4))
        with pytest.raises(RefusalError, match="precision: _Counted does not run in pure-bf16: RuntimeError: "):
            model(torch.ones(8, 4)) if first == "evaluated" else model.generate()


@pytest.mark.filterwarnings("ignore:memlab. refused")
def test_an_evaluation_that_does_not_run_in_pure_bf16_ends_no_loop() -> None:
    model = _Counted(trained=False, evaluated=True)
    load = workload(model)
    with fit(load, "") as session:
        for step in range(3):
            expected = F.linear(torch.ones(8, 4), model.weight, model.bias) + model.time.bias
            torch.testing.assert_close(model.generate(), expected)
            model(torch.ones(8, 4)).sum().backward()
            load.optimizers[0].step()
            if step == 0:
                session.switch("--precision pure-bf16", on_trial=True)
        assert session.plan == Plan()
        assert session.log[-1].text.endswith("leave its precision as it is; as written is back")
    assert model.calls == 6


class _Remembering(nn.Linear):
    """One that computes before its call what the call uses, and keeps it."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.kept = [self.table()]
        return super().__call__(rows)

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table = _Table(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype is torch.bfloat16:
            raise RuntimeError("no table for these weights")
        return F.linear(rows, self.weight) + rows @ self.kept[0]()


class _Table(nn.Linear):
    """A part that gives a function, within which nothing is cast."""

    def forward(self) -> Callable[[], torch.Tensor]:
        table = self.weight.exp()
        return lambda: table


def test_an_error_that_names_half_precision_in_full_precision_is_not_the_models_own() -> None:
    model = nn.ModuleList([_Remembering()])
    with fit(workload(model), "--precision pure-bf16"), pytest.raises(RefusalError) as caught:
        model[0](torch.ones(8, 4))
    assert str(caught.value) == (
        "precision: _Remembering does not run in pure-bf16: RuntimeError: no table for these weights; "
        "leave its precision as it is"
    )


def test_a_part_that_the_loop_calls_and_that_half_precision_is_not_for_is_refused() -> None:
    model = nn.ModuleList([_Timed(4, 4), nn.Linear(4, 4)])
    with fit(workload(model), "--precision pure-bf16"):
        assert model[1](torch.ones(8, 4)).dtype is torch.float32
        for _ in range(2):  # the second call is a first one still
            with pytest.raises(RefusalError, match="precision: _Timed does not run in pure-bf16: RuntimeError: "):
                model[0](torch.ones(8, 4))


def test_outputs_of_any_kind_are_scaled_and_in_fp32() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor

    class Classifier(nn.Linear):
        def forward(self, rows: torch.Tensor) -> Any:
            return Output(super().forward(rows))

    model, rows = Classifier(4, 2), torch.randn(8, 4)
    model(rows).logits.square().mean().backward()
    expected = gradients(model)
    with fit(workload(model), "--fp16"):
        output = model(rows)
        output.logits.square().mean().backward()
    assert output.logits.dtype is torch.float32
    assert distance(gradients(model), expected) < 5e-3


class _Leaving(nn.Module):
    """Leaves its features in an argument, on an argument or on its output."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.body, self.head = way, nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor, out: Any) -> torch.Tensor:
        if self.way == "in place":
            rows.add_(1)
        features = self.body(rows)
        logits: torch.Tensor = self.head(features)
        match self.way:
            case "list":
                out["kept"].append(features)
            case "dict":
                out["features"], out["kept"] = features, out.pop("kept")
            case "argument":
                rows.features = features
            case "output":
                logits.features = features
        return logits


def _left_by(model: nn.Module, way: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows: Any = torch.randn(8, 4, generator=generator)
    out: dict[str, Any] = {"scale": torch.ones(1), "kept": []}
    kept = out["kept"]
    logits = model(rows, out)
    assert out["kept"] is kept
    left = {
        "list": lambda: kept[0],
        "dict": lambda: out["features"],
        "argument": lambda: rows.features,
        "output": lambda: logits.features,
        "in place": lambda: rows * model.body.weight.float().sum(),
    }
    features: torch.Tensor = left[way]()
    assert features.dtype is torch.float32
    return F.cross_entropy(logits, torch.arange(8) % 2) + features.square().mean()


@pytest.mark.parametrize("flags", ["--fp16", "--bf16", "--precision pure-bf16"])
@pytest.mark.parametrize("way", ["list", "dict", "argument", "output", "in place"])
def test_what_a_call_leaves_with_its_arguments_or_on_its_output_is_found(way: str, flags: str) -> None:
    model = _Leaving(way)
    _left_by(model, way).backward()
    expected = gradients(model)
    model.zero_grad()
    with fit(workload(model), flags):
        _left_by(model, way).backward()
    assert distance(gradients(model), expected) < 4e-2


class _Cache:
    """What calls hand on from one to the next, as when a text is generated."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(seen=torch.zeros(0, 4), mean=torch.zeros(4))]


class _Attending(nn.Module):
    """Attends to the rows of all calls before, which a cache holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor, cache: _Cache) -> tuple[torch.Tensor, _Cache]:
        layer = cache.layers[0]
        layer.seen = torch.cat([layer.seen, self.body(rows)])
        layer.mean.copy_(layer.seen.detach().mean(0))
        kept = layer.seen[None]
        return self.head(F.scaled_dot_product_attention(self.body(rows)[None], kept, kept)[0] + layer.mean), cache


@pytest.mark.parametrize("flags", ["--fp16", "--bf16", "--precision pure-bf16"])
def test_a_cache_goes_from_call_to_call(flags: str) -> None:
    def generated(model: nn.Module) -> tuple[_Cache, torch.Tensor]:
        cache = given = _Cache()
        model.eval()
        with torch.no_grad():
            for seed in range(3):
                rows, cache = model(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)), cache)
                assert cache is given
        return cache, rows

    model = _Attending()
    expected, rows = generated(model)
    with fit(workload(model), flags):
        found, output = generated(model)
        assert distance([output], [rows]) < 2e-2
    for name in ("seen", "mean"):
        tensor = getattr(found.layers[0], name)
        assert tensor.dtype is torch.float32
        assert distance([tensor], [getattr(expected.layers[0], name)]) < 2e-2


@pytest.mark.parametrize("flags", ["--fp16", "--bf16", "--precision pure-bf16"])
def test_what_a_call_does_not_change_in_an_object_stays(flags: str) -> None:
    class Given(nn.Linear):
        def forward(self, given: Any) -> torch.Tensor:  # type: ignore[override]
            return super().forward(given.rows * given.scale) * given.own[0]

    model = Given(4, 2)
    given: Any = SimpleNamespace(rows=torch.randn(2, 4), scale=torch.ones(4).requires_grad_())
    given.own = [torch.ones(2, dtype=torch.bfloat16), (torch.zeros(1),)]
    before = [given.rows, given.scale, given.own, *given.own]
    with fit(workload(model), flags), torch.no_grad():
        model(given)
    assert [*map(id, [given.rows, given.scale, given.own, *given.own])] == [*map(id, before)]


def test_a_call_that_fails_leaves_an_object_it_was_given_as_it_was() -> None:
    class Failing(nn.Linear):
        def forward(self, given: Any) -> torch.Tensor:  # type: ignore[override]
            if given.fails:
                raise ValueError("no")
            return super().forward(given.rows)

    model = Failing(4, 2)
    given: Any = SimpleNamespace(rows=torch.randn(2, 4), fails=False)
    rows = given.rows
    with fit(workload(model), "--precision pure-bf16"), torch.no_grad():
        model(given)
        assert given.rows is rows
        given.fails = True
        with pytest.raises(ValueError, match="no"):
            model(given)
    assert given.rows is rows


# what a loop does with the logits of a call that has returned a loss as well
USES: dict[str, Callable[[Any], torch.Tensor]] = {
    "none": lambda out: out.loss,
    "own loss": lambda out: F.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), out.logits[:, 1:, :].argmax(-1).flatten()
    ),
    "both": lambda out: out.loss + out[1].pow(2).mean(),
    "metric": lambda out: out.loss * float(out.logits.detach().numpy().std()),
    "written to": lambda out: out.loss + out.logits.mul_(2).mean(),
    "past Python": lambda out: out.loss + torch.vmap(lambda row: row.mean())(out.logits).sum(),
    "recomputed": lambda out: out.loss + torch.utils.checkpoint.checkpoint(torch.std, out.logits, use_reentrant=False),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("flags", ["--bf16", "--bf16 --accumulate 2", "--bf16 --offload activations"])
def test_logits_beside_a_loss_are_cast_when_the_loop_looks_at_them(
    flags: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(guard: Rescuer | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=5000, n_positions=32)
        model = GPT2LMHeadModel(config).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.randint(0, 5000, (8, 32))  # [b, s]
        with fit(Workload(model, optimizer), flags, rescue=guard):
            for _ in range(2):
                out = model(input_ids=ids, labels=ids)
                assert out.logits.dtype is torch.float32
                if guard is None and "accumulate" not in flags:
                    assert isinstance(out.logits, LazyTensor) is (cast_outputs.LAZY_FROM_BYTES < 2**40)
                USES[use](out).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    found, guarded = trained(), trained(Rescuer())
    monkeypatch.setattr(cast_outputs, "LAZY_FROM_BYTES", 2**60)
    at_once = trained()
    assert all(map(torch.equal, found, at_once))
    assert all(map(torch.equal, guarded, at_once))


def test_a_gradient_of_logits_that_wait_to_be_cast_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=5000, n_positions=32)).train()
    ids = torch.randint(0, 5000, (8, 32))  # [b, s]
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--bf16"):
        out = model(input_ids=ids, labels=ids)
        assert isinstance(out.logits, LazyTensor)
        with pytest.raises(RefusalError, match=r"asks for the gradient of an output .* \(autograd.grad\)"):
            torch.autograd.grad(out.loss, out.logits)


def test_lbfgs_under_fp16_is_refused() -> None:
    model = Regressor()
    with pytest.raises(RefusalError) as caught:
        fit(Workload(model, torch.optim.LBFGS(model.parameters())), "--fp16")
    assert str(caught.value) == (
        "precision: fp16 cannot serve LBFGS, which evaluates the model inside its step; use --bf16"
    )


def test_matmul_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with fit(workload(Regressor()), "--precision fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("other", ["--bf16", "--fp16", "--precision fp32"])
def test_pure_bf16_gives_way_to_another_precision(other: str) -> None:
    """What is refused is the dtype the model was written in, not the one the plan in force gives it."""
    model = Regressor()
    with fit(workload(model), "--precision pure-bf16") as session:
        session.switch(other)
        assert session.plan.label == other
        session.switch("--precision pure-bf16")
        check(session.workload, session.plan.parse(other))
        session.switch(f"{other} --accumulate 2")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# -- files and copies ------------------------------------------------------------------------------


@pytest.fixture(params=["--precision pure-bf16", "--precision pure-bf16 --offload params,optimizer --adam8bit"])
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Session, dict[str, torch.Tensor]]]:
    """A model under pure bf16 that has trained, and its weights as they will be when that is undone."""
    model = gpt2()
    load = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=ragged_batch())
    with fit(load, request.param) as session:
        for _ in range(2):
            training_step(load)
        masters = fit_and_undone(session)
        yield model, session, masters
    assert all(torch.equal(value, masters[name]) for name, value in model.state_dict().items())
    assert not any(vars(tensor) for tensor in (*model.parameters(), *model.buffers()))


def fit_and_undone(session: Session) -> dict[str, torch.Tensor]:
    """Weights without the plan, which is in force again afterwards."""
    plan = session.plan
    session.switch("", now=True)
    weights = {name: value.clone() for name, value in session.workload.model.state_dict().items()}
    session.switch(plan, now=True)
    return weights


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


class Bf16Momentum(torch.optim.Optimizer):
    """Keeps its momentum in bf16, whatever its parameters are in, and finds it so again; and a count among its state."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
            momentum.lerp_(parameter.grad.bfloat16(), 0.1)
            parameter.sub_(momentum.float(), alpha=0.1)


@pytest.mark.parametrize("first", [0, 2])
def test_moments_that_an_optimizer_keeps_in_bf16_itself_stay_so(first: int) -> None:
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = Bf16Momentum(model.parameters())
    plain = copy.deepcopy(model)
    steps_of(plain, Bf16Momentum(plain.parameters()), batch, 5)
    steps_of(model, optimizer, batch, first)
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        steps_of(model, optimizer, batch, 3)
        saved = optimizer.state_dict()["state"]
        assert {entry["momentum"].dtype for key, entry in saved.items() if key != "calls"} == {torch.bfloat16}
    steps_of(model, optimizer, batch, 2 - first)
    assert optimizer.state["calls"] == 5
    assert {optimizer.state[each]["momentum"].dtype for each in model.parameters()} == {torch.bfloat16}
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, atol=2e-3)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, steps: int) -> None:
    inputs, targets = batch
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def test_state_dicts_have_full_precision(trained: Any) -> None:
    model, _, masters = trained
    assert_same(model.state_dict(), masters)
    assert_same(
        model.transformer.state_dict(prefix="transformer."), {k: v for k, v in masters.items() if "lm_" not in k}
    )
    state = model.state_dict()
    assert state["lm_head.weight"] is not None
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    kept = model.state_dict(keep_vars=True)
    assert kept["transformer.wte.weight"] is model.transformer.wte.weight


def test_what_is_saved_loads_without_memlab(trained: Any, tmp_path: Path) -> None:
    model, _, masters = trained
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt", weights_only=True), masters)
    torch.save([model.transformer.wte.weight, *model.parameters()], tmp_path / "parameters.pt")
    tied, *parameters = torch.load(tmp_path / "parameters.pt", weights_only=True)
    assert tied is parameters[0]
    assert_same(
        {name: p for (name, _), p in zip(model.named_parameters(), parameters, strict=True)}, without_head(masters)
    )
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in parameters)
    assert b"memlab" not in (tmp_path / "parameters.pt").read_bytes()


def without_head(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if name != "lm_head.weight"}


def test_copies_are_plain_models(trained: Any) -> None:
    model, _, masters = trained
    copied = copy.deepcopy(model)
    assert_same(copied.state_dict(), masters)
    assert copied.lm_head.weight is copied.transformer.wte.weight
    assert not any(vars(parameter) for parameter in copied.parameters())


def test_save_pretrained_writes_full_precision(trained: Any, tmp_path: Path) -> None:
    model, session, masters = trained
    model.save_pretrained(tmp_path)
    restored = type(model).from_pretrained(tmp_path)
    assert restored.dtype is torch.float32
    assert_same(restored.state_dict(), masters)
    assert model.dtype is torch.bfloat16
    assert_same(fit_and_undone(session), masters)


def test_loaded_weights_are_the_masters(trained: Any) -> None:
    model, session, masters = trained
    training_step(session.workload)
    model.load_state_dict(masters)
    assert model.dtype is torch.bfloat16
    assert_same(fit_and_undone(session), masters)


def test_a_cast_or_move_sees_the_masters_and_one_to_another_dtype_is_refused(trained: Any) -> None:
    """`model.float()` changes nothing in a plain run, and nothing here."""
    model, session, masters = trained
    training_step(session.workload)
    expected = fit_and_undone(session)
    assert model.float() is model.to("cpu") is model
    with pytest.raises(RefusalError) as refusal:
        model.half()
    assert str(refusal.value) == (
        "precision: the loop converts GPT2LMHeadModel to float16, and --precision pure-bf16 keeps its weights; leave the "
        "precision as it is, or undo it before (%memfit undo)"
    )
    assert model.dtype is torch.bfloat16
    assert_same(fit_and_undone(session), expected)
    model.load_state_dict(masters)


def test_a_cast_that_is_refused_leaves_every_part_as_it_was() -> None:
    """Batch norm keeps its weights whole, and a cast comes to it before it comes to what is split."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    with fit(workload(model), "--precision pure-bf16"):
        with pytest.raises(RefusalError, match="the loop converts Sequential to float64"):
            model.double()
        assert model[0].weight.dtype is torch.float32
        assert model[1].weight.dtype is torch.bfloat16


class Lookahead(torch.optim.Optimizer):
    """Slow weights around another optimizer, written in its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.steps % 2 == 0:
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


AVERAGES = {
    "lerp": lambda mean, new: [a.lerp_(b, 0.25) for a, b in zip(mean, new, strict=True)],
    "foreach": lambda mean, new: torch._foreach_lerp_(list(mean), list(new), 0.25),
    "mul, add": lambda mean, new: [a.mul_(0.75).add_(b, alpha=0.25) for a, b in zip(mean, new, strict=True)],
    "data": lambda mean, new: [
        setattr(a, "data", a.data * 0.75 + b.data * 0.25) for a, b in zip(mean, new, strict=True)
    ],
}


@pytest.mark.few(4)
@pytest.mark.parametrize("flags", ["", "--accumulate 2 --adam8bit", "--offload params"])
@pytest.mark.parametrize("way", AVERAGES)
def test_an_average_that_the_loop_keeps_is_one_of_the_masters(way: str, flags: str) -> None:
    model, batch = gpt2(), ragged_batch()
    load = Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch=batch)
    with fit(load, f"--precision pure-bf16 {flags}"):
        mean = [value.clone() for value in copy.deepcopy(model).parameters()]
        expected = [value.clone() for value in mean]
        for _ in range(3):
            training_step(load)
            masters = list(copy.deepcopy(model).parameters())  # a copy is no touch
            assert {type(p) for p in masters} == {nn.Parameter}
            with torch.no_grad():
                AVERAGES[way](mean, model.parameters())
                AVERAGES[way](expected, masters)
            assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(one, other) for one, other in zip(mean, expected, strict=True))


_COMPUTED = {
    "clone": lambda model, _: (sum(p.clone().detach().sum() for p in model.parameters()), 0.0),
    "norm": lambda model, _: (sum(p.norm() for p in model.parameters()), 0.0),
    "foreach": lambda model, _: (0.0, 0.01 * sum(torch._foreach_norm(list(model.parameters())))),
    "penalty": lambda model, _: (0.0, 0.01 * sum(p.square().sum() for p in model.parameters())),
    "a part": lambda model, x: (0.0, 0.1 * model[0](x).square().mean()),
    "a part that is run again": lambda model, x: (
        0.0,
        0.1 * torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=False).square().mean(),
    ),
    "with its own transpose": lambda model, _: (0.0, 0.01 * (model[0].weight @ model[0].weight.t()).norm()),
    "with its own T": lambda model, _: (0.0, 0.01 * (model[0].weight.T @ model[0].weight).norm()),
    "into a sum": lambda model, _: (torch.zeros_like(model[0].bias).add_(model[0].bias).sum(), 0.0),
    "differentiated": lambda model, _: (
        torch.autograd.grad(model[0].weight.square().sum(), [model[0].weight])[0].norm(),
        0.0,
    ),
    "another module": lambda model, x: (0.0, 0.1 * nn.functional.linear(x, model[0].weight).square().mean()),
}


@pytest.mark.parametrize("way", _COMPUTED)
def test_what_a_loop_computes_of_weights_between_steps_is_in_fp32(way: str) -> None:
    """With gradients enabled: the graph leads to the weights as they are kept."""

    def run(flags: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        model, (inputs, targets) = Regressor().layers, regression_batch(8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        read = []
        with ExitStack() as undo:
            if flags is not None:
                undo.enter_context(fit(Workload(model, optimizer), flags))
            for _ in range(4):
                value, term = _COMPUTED[way](model, inputs)
                read.append(float(value) + float(term))
                (nn.functional.cross_entropy(model(inputs), targets) + term).backward()
                optimizer.step()
                optimizer.zero_grad()
            values = torch.cat([p.detach().flatten() for p in model.parameters()])
        return torch.tensor(read), values

    (expected, weights), (found, ours) = run(None), run("--precision pure-bf16")
    assert ours.dtype is torch.float32
    # before any step: no value was rounded but by parts of the model, which are to run in bf16, and of gradients
    is_rounded = "part" in way or way == "differentiated"
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-2 if is_rounded else 1e-6)
    assert (found - expected).norm() < 1e-2 * expected.norm()
    assert (ours - weights).norm() < 1e-2 * weights.norm()


WINDOWS = ("before the call", "after the call", "in the backward pass", "after the backward pass", "after the step")


def train(
    load: Workload,
    do: Callable[[], object],
    window: str,
    *,
    steps: int = 3,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Train, and do something in one window of each step.

    Args:
        load: what to train.
        do: done in the window.
        window: which.
        steps: how many.
        between: done after each step.
    """
    model, optimizer, (inputs, targets) = load.model, load.optimizers[0], regression_batch(8)

    def in_backward(_: torch.Tensor) -> None:
        if window == "in the backward pass":
            do()

    hook = next(model.parameters()).register_post_accumulate_grad_hook(in_backward)
    for _ in range(steps):
        optimizer.zero_grad()
        for moment in WINDOWS:
            match moment:
                case "after the call":
                    loss = F.cross_entropy(model(inputs), targets)
                case "after the backward pass":
                    loss.backward()
                case "after the step":
                    optimizer.step()
                    between()
            if moment == window != "in the backward pass":
                do()
    hook.remove()


def small(*, lr: float = 0.5) -> Workload:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(6, 32), nn.Sequential(*blocks), nn.Linear(32, 3))
    return Workload(model, torch.optim.SGD(model.parameters(), lr=lr))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("way", AVERAGES)
def test_an_average_is_one_of_the_masters_wherever_the_loop_takes_it(way: str, window: str) -> None:
    load = small()
    model = load.model
    with fit(load, "--precision pure-bf16"):
        mean = [value.clone() for value in copy.deepcopy(model).parameters()]
        expected = [value.clone() for value in mean]

        @torch.no_grad()
        def take() -> None:
            AVERAGES[way](mean, model.parameters())
            AVERAGES[way](expected, list(copy.deepcopy(model).parameters()))

        train(load, take, window)
    assert all(torch.equal(one, other) for one, other in zip(mean, expected, strict=True))
    assert not torch.equal(mean[0], mean[0].bfloat16().float())


WRITES = {
    "decay": lambda model: [p.mul_(1 - 2**-12) for p in model.parameters()],
    "decay of data": lambda model: [p.data.mul_(1 - 2**-12) for p in model.parameters()],
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 1 - 2**-12),
    "other data": lambda model: [setattr(p, "data", p.data * (1 - 2**-12)) for p in model.parameters()],
    "of a state dict": lambda model: [value.mul_(1 - 2**-12) for value in model.state_dict().values()],
    "copied": lambda model: [p.copy_(p * (1 - 2**-12)) for p in model.parameters()],
    "by index": lambda model: [p.__setitem__(slice(None), p * (1 - 2**-12)) for p in model.parameters()],
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("way", WRITES)
def test_what_the_loop_writes_is_written_to_the_masters_wherever_it_does(way: str, window: str) -> None:
    """A change that is smaller than a step of bf16, with a learning rate of zero."""
    load = small(lr=0.0)
    expected = [p.detach().clone() for p in load.model.parameters()]
    with fit(load, "--precision pure-bf16"):
        train(load, torch.no_grad()(lambda: WRITES[way](load.model)), window)
    for _ in range(3):
        expected = [value * (1 - 2**-12) for value in expected]
    assert all(map(torch.equal, load.model.parameters(), expected))


HELD = {
    "data": lambda model: [p.data for p in model.parameters()],
    "detached": lambda model: [p.detach() for p in model.parameters()],
    "views": lambda model: [p.detach().view(-1)[:2] for p in model.parameters()],
    "views with a graph": lambda model: [p.view(-1) for p in model.parameters()],
    "arrays": lambda model: [p.detach().numpy() for p in model.parameters()],
    "state dict": lambda model: list(model.state_dict().values()),
}


@pytest.mark.few(16)
@pytest.mark.parametrize("flags", ["", "--offload params"])
@pytest.mark.parametrize("window", [window for window in WINDOWS if window != "in the backward pass"])
@pytest.mark.parametrize("way", HELD)
def test_what_the_loop_holds_of_weights_follows_them(way: str, window: str, flags: str) -> None:
    load = small()
    model = load.model

    def values() -> list[list[float]]:
        return [torch.as_tensor(each).flatten().tolist() for each in held]

    with fit(load, f"--precision pure-bf16 {flags}") as session:
        held: list[Any] = []
        followed = []

        def note() -> None:
            if held:
                masters = [p.flatten() for p in copy.deepcopy(model).parameters()]
                followed.append([m[: len(v)].tolist() for m, v in zip(masters, values(), strict=True)] == values())

        train(load, lambda: held or held.extend(HELD[way](model)), window, steps=4, between=note)
        assert followed[-1]
        assert len(followed) >= 3
        assert all(followed)
        beside = sum(tensor.nbytes for tensor in session.in_force.held_tensors)
        assert beside == 4 * sum(p.numel() for p in model.parameters())
        held.clear()
        train(load, lambda: None, window, steps=1)
        assert sum(tensor.nbytes for tensor in session.in_force.held_tensors) == beside / 2


def test_what_the_loop_holds_and_writes_to_over_steps_are_the_weights() -> None:
    """As with a flat buffer, whose parts are the weights."""
    load = small(lr=0.0)
    model = load.model
    with fit(load, "--precision pure-bf16"):
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        start = 0
        for p in model.parameters():
            p.data = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        for step in range(3):
            flat.add_(2**-12)
            expected = flat.clone()
            train(load, lambda: None, "after the step", steps=1)
            assert torch.equal(flat, expected), step
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), expected)


def test_a_gradient_made_like_what_is_read_of_a_weight_is_taken() -> None:
    load = small()
    with fit(load, "--precision pure-bf16"):
        before = list(copy.deepcopy(load.model).parameters())

        def give() -> None:
            for p in load.model.parameters():
                p.grad = torch.ones_like(p)

        train(load, give, "after the backward pass", steps=1)
    assert all(torch.equal(p, b - 0.5) for p, b in zip(load.model.parameters(), before, strict=True))


def test_an_average_is_one_of_the_masters_while_the_graph_of_an_evaluation_is_there() -> None:
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        mean = [value.clone() for value in copy.deepcopy(model).parameters()]
        expected = [value.clone() for value in mean]
        for _ in range(3):
            steps_of(model, optimizer, batch, 1)
            output = model.eval()(batch[0])
            model.train()
            masters = list(copy.deepcopy(model).parameters())
            with torch.no_grad():
                for ours, theirs, new, master in zip(mean, expected, model.parameters(), masters, strict=True):
                    ours.lerp_(new, 0.25)
                    theirs.lerp_(master, 0.25)
            output.sum().backward()  # the graph has weights as it needs them
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(mean, expected, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("also", ["--accumulate 2", "--checkpoint", "--offload optimizer"])
def test_a_plan_that_comes_with_a_call_leaves_weights_as_its_graph_needs_them(also: str) -> None:
    model, batch = gpt2(), ragged_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fit(Workload(model, optimizer), "--precision pure-bf16") as session:
        for step in range(3):
            if step == 1:
                session.switching.ask(Plan.parse(f"--precision pure-bf16 {also}"))
            logits = model(batch["input_ids"]).logits
            with torch.no_grad():
                norms = [parameter.norm() for parameter in model.parameters()]
            assert {norm.dtype for norm in norms} == {torch.float32}  # while the graph needs weights in bf16
            logits.float().logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.plan == Plan.parse(f"--precision pure-bf16 {also}")


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_change_that_fails_leaves_the_loop_the_weights_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with fit(Workload(model, optimizer), "--precision pure-bf16") as session:
        steps_of(model, optimizer, batch, 1)
        monkeypatch.setattr(OffloadOptimizer, "attach_optimizer", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.switch("--precision pure-bf16 --offload optimizer", now=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1 / 3)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(bool((p == torch.tensor(1 / 3)).all()) for p in model.parameters())


def test_weights_that_the_loop_writes_between_steps_are_the_next_ones() -> None:
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        steps_of(model, optimizer, batch, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1 / 3)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        model(batch[0])
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert all(bool((value == torch.tensor(1 / 3)).all()) for value in model.state_dict().values())
    assert all(bool((p == torch.tensor(1 / 3)).all()) for p in model.parameters())


def test_weights_that_the_loop_swaps_around_an_evaluation_come_back() -> None:
    """As ASGD's averages are: other data for the time of an evaluation, which makes a graph."""
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        steps_of(model, optimizer, batch, 1)
        kept = {p: p.data.clone() for p in model.parameters()}
        for p in model.parameters():
            p.data = torch.zeros_like(p.data).bfloat16()
        assert not model.eval()(batch[0]).any()
        for p in model.parameters():
            p.data = kept[p].clone()
        assert model.train()(batch[0]).any()
    assert all(torch.equal(p, kept[p]) for p in model.parameters())


def test_weights_that_optimizers_keep_and_write_are_in_fp32() -> None:
    model, batch = Regressor().layers, regression_batch(8)
    plain = copy.deepcopy(model)
    steps_of(plain, Lookahead(torch.optim.SGD(plain.parameters(), lr=0.1)), batch, 4)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        steps_of(model, optimizer, batch, 4)
        assert {entry["slow"].dtype for entry in optimizer.state.values()} == {torch.float32}
    assert distance(list(model.parameters()), list(plain.parameters())) < 1e-2


class Dropping(torch.optim.Adam):
    """Drops gradients in its step, or changes them, or raises before it has, once."""

    calls = 0
    how = "dropped"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            if self.how == "written to":
                p.grad.data.mul_(0.5)
            elif self.how == "replaced":
                p.grad = p.grad * 0.5
        if self.how == "kept by an error" and self.calls == 2:
            raise ArithmeticError
        super().step(closure)
        if self.how in ("dropped", "zeroed"):
            self.zero_grad(set_to_none=self.how == "dropped")


@pytest.mark.parametrize("how", ["dropped", "zeroed", "written to", "replaced", "kept by an error"])
def test_gradients_are_after_a_step_what_it_has_made_of_them(how: str) -> None:
    expected: list[float] = []
    found: list[float] = []
    for plan, seen in (("", expected), ("--precision pure-bf16", found)):
        torch.manual_seed(0)
        model, batch = Regressor().layers, regression_batch(8)
        optimizer = Dropping(model.parameters(), lr=0.01)
        optimizer.how = how
        with fit(Workload(model, optimizer), plan):
            for step in range(4):
                model(batch[0]).square().mean().backward()
                with pytest.raises(ArithmeticError) if "error" in how and step == 1 else nullcontext():
                    optimizer.step()
                if "error" in how:
                    optimizer.zero_grad()
                seen += [0.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]
        seen += [float(p.detach().norm()) for p in model.parameters()]
    assert found == pytest.approx(expected, rel=0.05, abs=1e-3)


class WithAverage(torch.optim.Optimizer):
    """Keeps an average of the weights among its state, and swaps it in between steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1)
            self.state[p].setdefault("mean", p.clone()).lerp_(p, 0.5)

    @torch.no_grad()
    def swap(self) -> None:
        for p in self.param_groups[0]["params"]:
            mean = self.state[p]["mean"]
            p.add_(mean), mean.sub_(p).neg_(), p.sub_(mean)


def test_what_an_optimizer_of_the_loops_keeps_is_left_as_it_is() -> None:
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = WithAverage(model.parameters(), {})
    with fit(Workload(model, optimizer), "--precision pure-bf16") as session:
        for _ in range(2):
            steps_of(model, optimizer, batch, 2)
            optimizer.swap()
        assert {entry["mean"].dtype for entry in optimizer.state.values()} == {torch.float32}
        assert session.notes == (
            "WithAverage is not of torch: what it keeps is left as it is, since it may not be moments",
        )


def test_a_layer_that_is_new_in_the_middle_of_training_trains_in_fp32() -> None:
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        steps_of(model, optimizer, batch, 1)
        width = model[-1].in_features
        model[-1] = nn.Linear(width, model[-1].out_features)
        optimizer.add_param_group({"params": list(model[-1].parameters())})
        before = model[-1].weight.detach().clone()
        steps_of(model, optimizer, batch, 1)
        assert type(model[-1].weight) is nn.Parameter
        assert model[-1].weight.dtype is model[-1].weight.grad.dtype is torch.float32
        assert not torch.equal(model[-1].weight, before)


def test_a_plan_on_trial_that_goes_leaves_no_method_behind() -> None:
    """What is put back of modules and weights for the call to be done again is not what stood in for their methods."""
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "") as session:
        steps_of(model, optimizer, batch, 1)
        session.switch("--precision pure-bf16", on_trial=True)
        steps_of(model, optimizer, batch, 1)
        nn.utils.parametrizations.orthogonal(model[0])
        with pytest.warns(RuntimeWarning) as warned:
            model(batch[0])
        assert str(warned[0].message) == (
            "memlab: refused --precision pure-bf16: precision: Sequential does not run in pure-bf16: NotImplementedError: "
            "\"orgqr_cpu\" not implemented for 'BFloat16'; leave its precision as it is; as written is back"
        )
        assert session.plan.label == "as written"
    assert not any("_apply" in vars(part) or "_save_to_state_dict" in vars(part) for part in model.modules())
    assert [vars(weight) for weight in model.parameters()] == [{}] * len(list(model.parameters()))


@pytest.mark.parametrize("trace", [torch.export.export, torch.jit.trace])
def test_tracing_is_refused(trace: Any) -> None:
    model, (inputs, _) = Regressor().layers, regression_batch(8)
    with fit(workload(model), "--precision pure-bf16"):
        with pytest.raises(RefusalError) as error:
            trace(model, (inputs,))
        assert str(error.value) == (
            "precision: the loop traces Sequential (torch.export, torch.jit.trace), and --precision pure-bf16 keeps its weights "
            "in two parts; trace copy.deepcopy(model), or undo it before (%memfit undo)"
        )
        trace(copy.deepcopy(model), (inputs,))
    trace(model, (inputs,))
    # torch 2.11 leaves a hook of its own where an export is broken off
    nn.modules.module._global_buffer_registration_hooks.clear()


def test_weights_in_shared_memory_are_refused() -> None:
    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.AdamW(model.parameters())
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        with pytest.raises(
            RefusalError, match=r"^precision: the loop converts Sequential to shared memory, and --precision pure"
        ):
            model.share_memory()
        steps_of(model, optimizer, batch, 1)
    model.share_memory()
    with pytest.raises(RefusalError) as error:
        fit(Workload(model, optimizer), "--precision pure-bf16")
    assert str(error.value) == (
        "precision: Sequential shares its weights with other processes (share_memory), which would not see those in bf16; use --bf16"
    )


def test_functional_calls_with_weights_of_the_loop_run_in_bf16() -> None:
    model, (inputs, _) = Regressor().layers, regression_batch(8)
    expected = model(inputs)
    with fit(workload(model), "--precision pure-bf16"):
        given = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
        output = torch.func.functional_call(model, given, (inputs,))
        output.sum().backward()
    assert distance([output], [expected]) < 2e-2
    assert all(value.grad is not None and value.grad.dtype is torch.float32 for value in given.values())


class Averaging(nn.Module):
    """Keeps an average of the weights it trains, or of what it sees, in its forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.slow = copy.deepcopy(self.layer).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(inputs)
        with torch.no_grad():
            if self.kind == "weight":
                self.slow.weight.data = self.slow.weight.data * 0.999 + self.layer.weight.data * 0.001
            elif self.kind == "mean":
                self.mean.mul_(0.999).add_(hidden.mean(0).float(), alpha=0.001)
                hidden = hidden - self.mean
            else:
                self.count = self.count + 2**-12 if self.kind == "another count" else self.count.add_(2**-12)
                self.state = hidden
        return self.head(hidden)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "weight",
            "precision: the forward pass of Averaging changes the weight slow.weight, and bf16 would lose small changes; use --bf16",
        ),
        (
            "mean",
            "precision: Averaging does not run in pure-bf16: with mean, which its forward pass changes, in fp32: RuntimeError: "
            "mat1 and mat2 must have the same dtype, but got Float and BFloat16; leave its precision as it is",
        ),
    ],
)
def test_what_a_forward_pass_changes_little_by_little_is_not_rounded(kind: str, text: str) -> None:
    model = Averaging(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with fit(workload(model), "--precision pure-bf16"), pytest.raises(RefusalError) as error:
        model(torch.ones(2, 8))
    assert str(error.value) == text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["count", "another count"])
def test_a_buffer_that_a_forward_pass_changes_stays_in_fp32(kind: str) -> None:
    model = Averaging(kind)
    with fit(workload(model), "--precision pure-bf16"):
        for _ in range(3):
            model(torch.ones(2, 8))
        assert model.layer.weight.dtype is torch.bfloat16
        assert model.count.dtype is torch.float32
    assert model.count.item() == 1 + 3 * 2**-12


@pytest.mark.parametrize("flags", ["--bf16", "--precision pure-bf16"])
def test_what_a_model_keeps_of_its_calls_is_in_fp32_once_the_plan_is_out(flags: str) -> None:
    model = Averaging("count")
    model.table = torch.ones(2, dtype=torch.bfloat16)
    with fit(workload(model), flags):
        model(torch.ones(2, 8))
    assert isinstance(model.state, torch.Tensor)
    assert model.state.dtype is torch.float32
    assert model.table.dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_weight_that_each_call_makes_anew_is_served_in_fp16_unless_the_loop_uses_it() -> None:
    model, inputs = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 8)), nn.Linear(8, 4)), torch.randn(8, 16)
    model(inputs).square().mean().backward()
    expected = gradients(model)
    with fit(workload(model), "--fp16"):
        model(inputs).square().mean().backward()
        assert distance(gradients(model), expected) < 5e-3
        with pytest.raises(RefusalError) as error:
            (model(inputs).square().mean() + model[0].weight.square().mean()).backward()
    assert str(error.value) == (
        "precision: the loss goes through a call of Sequential by its output and past it as well (by a gradient of a gradient, or "
        "by a tensor that the call leaves elsewhere): --fp16 scales the one and not the other; use --bf16"
    )


class _Reaching(nn.Module):
    """Reads tensors that are none of its own: of a list, and what the loop has computed."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        super().__init__()
        self.others = others
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        lifted = self.inner(inputs)
        for other in self.others:
            lifted = lifted + other
        return self.head(lifted)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("flags", "rescue"),
    [
        ("--fp16", False),
        ("--fp16", True),
        ("--fp16 --checkpoint", False),
        ("--fp16 --checkpoint", True),
        ("--fp16 --accumulate 2", False),
    ],
)
def test_gradients_that_leave_a_call_past_its_arguments_are_true_in_fp16(flags: str, rescue: bool) -> None:
    def run(flags: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table, encoder = torch.randn(16, requires_grad=True), nn.Linear(8, 16)
        model = _Reaching([table])
        optimizer = torch.optim.SGD([table, *model.parameters(), *encoder.parameters()], lr=10)
        seen: list[torch.Tensor] = []
        splits = "accumulate" in (flags or "")
        if not splits:
            table.register_hook(seen.append)  # type: ignore[no-untyped-call]
        session = None if flags is None else fit(Workload(model, optimizer), flags, rescue=rescue)
        for step in range(4):
            inputs, targets = torch.randn(8, 8), torch.randint(4, (8,))
            if step == 2:  # a layer that has come since
                model.head = nn.Linear(16, 4)
                optimizer.add_param_group({"params": list(model.head.parameters())})
            model.others[1:] = [] if splits else [encoder(inputs).mean(0) * 1e-9]
            penalty = 0.01 * table.square().sum() + model.head.weight.square().mean()
            (F.cross_entropy(model(inputs), targets) + penalty).mul(0.01).backward()
            if splits:
                assert table.grad is not None
                seen.append(table.grad)
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            assert len(session.log) <= 2
            session.undo()
        trained = [table, *model.parameters(), *encoder.parameters()]
        return [torch.stack(seen).sum(0), *(each.detach() for each in trained)]

    assert distance(run(flags), run(None)) < 5e-3


def read(model: nn.Module, mean: list[torch.Tensor], inputs: torch.Tensor, what: str) -> None:
    """Something that a loop does between two steps, which changes no weight."""
    with torch.no_grad():
        match what:
            case "lerp":
                for one, other in zip(mean, model.parameters(), strict=True):
                    one.lerp_(other, 0.5)
            case "norm":
                nn.utils.parameters_to_vector(model.parameters()).norm()
            case "evaluate":
                model.eval()(inputs)
                model.train()
            case "a part":
                next(iter(model.children()))(inputs)
            case "save":
                model.state_dict()
            case "copy":
                copy.deepcopy(model)(inputs)
            case "write what is there":
                for p in model.parameters():
                    p.copy_(p.clone())
            case "load":
                model.load_state_dict(copy.deepcopy(model.state_dict()))
            case "swap":
                for p in model.parameters():
                    p.data = p.data.clone()
    if what == "data":
        sum(float(p.data.abs().sum()) for p in model.parameters())
    elif what == "evaluate with a graph":
        model.eval()(inputs).sum()
        model.train()
    elif what == "functional":
        given = {name: value.detach() for name, value in model.named_parameters()}
        torch.func.functional_call(model, given, (inputs,))


READS = (
    "lerp", "norm", "evaluate", "a part", "save", "copy", "write what is there", "load", "swap", "data", "evaluate with a graph",
    "functional",
)  # fmt: skip


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(40))
def test_generated_loops_that_read_weights_train_as_those_that_do_not(seed: int) -> None:
    drawn = random.Random(seed)
    flags = " ".join(each for each in ("--accumulate 2", "--offload params", "--adam8bit") if drawn.random() < 0.4)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(2)]
    first = nn.Sequential(nn.Linear(16, 32), nn.Sequential(*blocks), nn.Linear(32, 4))
    plan = [drawn.sample(READS, drawn.randrange(3)) for _ in range(4)]
    zeroed_first = drawn.random() < 0.5
    batch = torch.randn(8, 16), torch.randint(0, 4, (8,))
    ends = []
    for reads in (False, True):
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mean = [torch.zeros_like(p) for p in model.parameters()]
        with fit(Workload(model, optimizer), f"--precision pure-bf16 {flags}"):
            for between in plan:
                if zeroed_first:
                    optimizer.zero_grad()
                F.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
                if not zeroed_first:
                    optimizer.zero_grad()
                for what in between if reads else ():
                    read(model, mean, batch[0], what)
        ends.append(model.state_dict())
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])] == [], (flags, plan)


def test_an_average_in_compiled_code_is_one_of_the_masters() -> None:
    @torch.compile(backend="eager")
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def average(mean: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(mean, new, 0.25)

    model, batch = Regressor().layers, regression_batch(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        mean = [p.detach().clone() for p in copy.deepcopy(model).parameters()]
        for _ in range(2):
            steps_of(model, optimizer, batch, 1)
            expected = [a.lerp(p.detach(), 0.25) for a, p in zip(mean, copy.deepcopy(model).parameters(), strict=True)]
            average(mean, list(model.parameters()))
            assert all(map(torch.equal, mean, expected))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def test_a_parametrized_weight_that_the_loop_assigns_is_the_next_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    optimizer = torch.optim.AdamW(model.parameters())
    assigned = torch.randn(8, 8)
    with fit(Workload(model, optimizer), "--precision pure-bf16"):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        model[0].weight = assigned
    torch.testing.assert_close(model[0].weight, assigned, rtol=0, atol=0)


class Later(nn.Module):
    """Computes when the loop uses what it returns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.how, self.calls = how, 0

    def forward(self, rows: torch.Tensor) -> Any:
        self.calls += 1
        if self.how == "generator" or self.calls > 2:
            return (layer(rows) for layer in self.layers)
        if self.how == "closure":
            return lambda: self.layers[0](rows)
        return [layer(rows) for layer in self.layers]


@pytest.mark.parametrize("flags", ["--bf16", "--fp16"])
@pytest.mark.parametrize(("how", "kind"), [("generator", "generator"), ("closure", "function"), ("later", "generator")])
def test_what_computes_when_the_loop_uses_it_is_refused(flags: str, how: str, kind: str) -> None:
    model = Later(how)
    name = flags.removeprefix("--")
    said = f"Later does not run in {name}: its output is a {kind}, which computes when the loop uses it, past {name}; "
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), flags):
        with pytest.raises(RefusalError, match=re.escape(said)):
            for _ in range(3):
                model(torch.randn(4, 8))
    nn.Linear(1, 1)(torch.ones(1)).sum().backward()  # what torch runs backward passes with is put back by the next one


class Graph(nn.Module):
    """Multiplies by a sparse matrix, whose backward pass torch has in fp32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(8).to_sparse().requires_grad_(), self.layer(rows).float())


@pytest.mark.parametrize("rescue", [False, True])
@pytest.mark.parametrize("flags", ["--bf16", "--fp16"])
def test_a_backward_pass_that_does_not_run_in_it_is_refused(flags: str, rescue: bool) -> None:
    model = Graph()
    with fit(Workload(model, torch.optim.AdamW(model.parameters())), flags, rescue=rescue):
        loss = model(torch.randn(8, 8)).square().mean()
        with pytest.raises(
            RefusalError, match=f"Graph does not run in {flags.removeprefix('--')}: in its backward pass, "
        ):
            loss.backward()
    nn.Linear(1, 1)(torch.ones(1)).sum().backward()


def test_an_error_of_the_loops_own_in_a_backward_pass_stays_its_own() -> None:
    model = nn.Linear(8, 8)

    def wrong(_gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of the loop")

    with fit(Workload(model, torch.optim.AdamW(model.parameters())), "--bf16"):
        output = model(torch.randn(8, 8))
        output.register_hook(wrong)
        with pytest.raises(RuntimeError, match=r"^of the loop$"):
            output.sum().backward()
    nn.Linear(1, 1)(torch.ones(1)).sum().backward()


class _Asking(nn.Linear):
    """Has its own code see a gradient within the call."""

    def __init__(self, ask: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(6, 2)
        self.ask = ask

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.ask(self, super().forward(rows)) * 2


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1e-3, 1e-3)


def _with_hook(_model: Any, rows: torch.Tensor) -> torch.Tensor:
    rows.register_hook(_clamp)
    return rows


def _clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def _retained(model: Any, rows: torch.Tensor) -> torch.Tensor:
    rows.retain_grad()
    model.rows = rows
    return rows


@pytest.mark.parametrize(
    ("ask", "who"),
    [
        (lambda _, rows: _Clamped.apply(rows), "_Clamped.backward"),
        (_with_hook, "a hook (_clamp)"),
        (_retained, "rows.grad"),
    ],
)
def test_code_that_would_see_scaled_gradients_is_refused_in_fp16(ask: Any, who: str) -> None:
    model = _Asking(ask)
    with fit(workload(model), "--fp16"), pytest.raises(RefusalError) as caught:
        model(torch.randn(4, 6))
    assert str(caught.value) == (
        f"precision: _Asking does not run in fp16: {who} would be given gradients multiplied by the loss scale; "
        "use --bf16"
    )


@pytest.mark.parametrize("flags", ["--precision pure-bf16", "--precision pure-bf16 --offload optimizer", "--adam8bit"])
def test_what_is_done_in_inference_mode_between_two_steps(flags: str) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 2))
    optimizer, rows = torch.optim.AdamW(model.parameters()), torch.randn(4, 6)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    with fit(Workload(model, optimizer), flags):
        for _ in range(2):
            step()
            read = [each.sum().item() for each in model.parameters()]
            with torch.inference_mode():
                model(rows)
                model.load_state_dict({name: value * 1.0 for name, value in model.state_dict().items()})
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.9)
            assert read == pytest.approx([each.sum().item() for each in model.parameters()])
    step()
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    assert not any(each.is_inference() for each in [*model.parameters(), *tensors])


class _Features(nn.Module):
    """Returns what its second output is computed from."""

    def __init__(self, *, retains: bool) -> None:
        super().__init__()
        self.body, self.head, self.retains = nn.Linear(6, 8), nn.Linear(8, 2), retains

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(rows)
        if self.retains:
            features.retain_grad()
        return self.head(features.tanh()), features


@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--precision pure-bf16"])
@pytest.mark.parametrize("by", ["retain_grad", "register_hook", "autograd.grad", "the model"])
def test_a_gradient_that_would_come_past_the_output_is_refused(by: str, flags: str) -> None:
    model = _Features(retains=by == "the model")
    with fit(workload(model), flags):
        out, features = model(torch.randn(4, 6))
        if by == "retain_grad":
            features.retain_grad()
        if by == "register_hook":
            features.register_hook(lambda gradient: gradient)
        with pytest.raises(RefusalError) as caught:
            if by == "autograd.grad":
                torch.autograd.grad(out.square().mean(), features)
            out.square().mean().backward()
    asked = "retain_grad" if by == "the model" else by
    assert str(caught.value) == (
        f"precision: the loop asks for the gradient of an output from which the model computes another one ({asked}), and each "
        "is cast by itself; leave its precision as it is"
    )


@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--precision pure-bf16"])
def test_an_argument_that_comes_back_is_the_loops(flags: str) -> None:
    class Returning(nn.Linear):
        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(rows), rows

    model, given = Returning(6, 2), torch.randn(4, 6, requires_grad=True)
    with fit(workload(model), flags):
        out, rows = model(given * 2)
        (out.square().mean() + rows.square().mean()).backward()
    assert given.grad is not None


@pytest.mark.parametrize("flags", ["--bf16", "--precision pure-bf16"])
def test_parts_are_told_apart_by_identity_and_not_by_what_they_compare(flags: str) -> None:
    class Compared(nn.Linear):
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("there is no one answer for all values")

        def __hash__(self) -> int:
            return id(self)

    model = nn.Sequential(Compared(6, 6), Compared(6, 2))
    with fit(work := workload(model), flags):
        for _ in range(2):
            model[0](torch.randn(4, 6))
            model(torch.randn(4, 6)).square().mean().backward()
            work.optimizers[0].step()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("flags", ["", " --adam8bit", " --optim muon", " --offload optimizer", " --release-grads"])
def test_moments_that_are_loaded_are_those_of_the_file(flags: str, reads: bool) -> None:
    """Torch casts them to the dtype of the weights: under --adam8bit they were in bf16 after the plan, and the next step failed."""
    model, batch = gpt2(), ragged_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    def first() -> list[torch.Tensor]:
        return [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()]

    step()
    expected, saved = first(), copy.deepcopy(optimizer.state_dict())
    with fit(Workload(model, optimizer), f"--precision pure-bf16{flags}"):
        step()
        for _ in range(2):
            if reads:
                [weight.data for weight in model.parameters()]
            optimizer.load_state_dict(saved)
            assert all(map(torch.equal, first(), expected))
            saved = copy.deepcopy(saved)  # torch goes on with the tensors that it has loaded
            step()
        optimizer.load_state_dict(saved)
    assert all(map(torch.equal, first(), expected))
    step()
