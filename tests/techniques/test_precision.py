"""Number formats: true gradients, skipped steps, exact masters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import RefusalError, Workload, fit
from memlab.measuring.runs import training_step
from memlab.session import Session, check
from memlab.session.snapshot import Snapshot
from memlab.techniques.precision.loss_scale import FIRST_SCALE
from memlab.techniques.precision.precision import PrecisionChoice
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
        changed = before.differences(Snapshot(load))
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
            assert load.optimizers[0].state[next(load.model.parameters())]["exp_avg"].dtype is torch.bfloat16

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


def test_recurrent_layers_in_fp16_on_the_cpu_are_refused() -> None:
    model = nn.LSTM(4, 4)
    with pytest.raises(RefusalError) as caught:
        fit(workload(model), "--fp16")
    assert str(caught.value) == "precision: the CPU has no fp16 kernels for recurrent layers; use --bf16 here"


class _Summing(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 4).index_add(0, torch.zeros(len(rows), dtype=torch.long), super().forward(rows))


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
