"""Gradients under --fp16 that reach parameters past the model's call are the true ones, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memlab import RefusalError, Workload, fit
from tests.techniques.models import distance, gradients


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))

    def score(self, rows: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(rows)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.score(rows)


Loop = Callable[[_Tower, torch.Tensor], None]


def penalty(model: _Tower, rows: torch.Tensor) -> None:
    (model(rows).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()


def method(model: _Tower, rows: torch.Tensor) -> None:
    model.score(rows).square().mean().backward()


def part(model: _Tower, rows: torch.Tensor) -> None:
    (model(rows).square().mean() + model.inner(rows).square().mean()).backward()


def part_before(model: _Tower, rows: torch.Tensor) -> None:
    model(model.inner(rows)[:, :8]).square().mean().backward()


def in_eval_mode(model: _Tower, rows: torch.Tensor) -> None:
    model.eval()
    model(rows).square().mean().backward()


def recomputed(model: _Tower, rows: torch.Tensor) -> None:
    scores = checkpoint(model.score, rows.clone().requires_grad_(), use_reentrant=True)
    (model(rows).square().mean() + scores.square().mean()).backward()


def under_autocast(model: _Tower, rows: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        scores = model(rows)
    scores.float().square().mean().backward()


def by_grad(model: _Tower, rows: torch.Tensor) -> None:
    parameters = list(model.parameters())
    loss = model(rows).square().mean() + model.inner.weight.square().sum()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def through_one_call(model: _Tower, rows: torch.Tensor) -> None:
    rows = rows.clone().requires_grad_()
    scores = model(rows)
    (gradient,) = torch.autograd.grad(scores.mean(), rows, create_graph=True)
    (scores.square().mean() + gradient.square().sum()).backward()


@pytest.mark.parametrize("flags", ["--fp16", "--fp16 --accumulate 2"])
@pytest.mark.parametrize(
    "loop", [penalty, method, part, part_before, in_eval_mode, recomputed, under_autocast, by_grad]
)
def test_gradients_past_the_call_are_true(loop: Loop, flags: str) -> None:
    found = []
    torch.ones(1, requires_grad=True).sum().backward()  # which ends what earlier tests have left
    backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined] # what is exchanged meanwhile
    for plan in ("", flags):
        torch.manual_seed(0)
        model, rows = _Tower(), torch.randn(16, 8)
        with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), plan):
            loop(model, rows)
            found.append(gradients(model))
    assert distance(found[1], found[0]) < 1e-2
    _Tower()(rows).sum().backward()
    assert torch.autograd._engine_run_backward is backward  # type: ignore[attr-defined]


def test_what_is_scaled_and_is_not_is_refused() -> None:
    model, rows = _Tower(), torch.randn(16, 8)
    with (
        fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--fp16"),
        pytest.raises(RefusalError) as caught,
    ):
        through_one_call(model, rows)
    assert str(caught.value) == (
        "precision: the loss goes through a call of _Tower by its output and past it as well (by a gradient of a gradient, or by "
        "a tensor that the call leaves elsewhere): --fp16 scales the one and not the other; use --bf16"
    )
    assert all(p.grad is None for p in model.parameters())


def test_calls_under_autocast_and_without_are_refused() -> None:
    model, rows = _Tower(), torch.randn(16, 8)
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), "--fp16"):
        model(rows)
        with (
            torch.autocast("cpu", dtype=torch.float16),
            pytest.raises(RefusalError, match="the loop calls _Tower both under autocast of its own and without"),
        ):
            model(rows)


@pytest.mark.parametrize("loop", [method, part, part_before, recomputed])
def test_parts_that_the_loop_calls_in_pure_bf16(loop: Loop) -> None:
    found = []
    for plan in ("", "--precision pure-bf16", "--precision pure-bf16 --checkpoint"):
        torch.manual_seed(0)
        model, rows = _Tower(), torch.randn(16, 8)
        with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), plan):
            loop(model, rows)
            assert model.inner(rows).dtype is torch.float32
            found.append(gradients(model))
    assert max(distance(found[1], found[0]), distance(found[2], found[0])) < 5e-2


def test_an_update_by_hand_has_no_gradients_that_are_not_finite() -> None:
    torch.manual_seed(0)
    model, rows = _Tower(), torch.randn(16, 8) * 300
    with fit(Workload(model), "--fp16") as session:
        model(rows).sum().backward()
        assert not any(gradient.any() for gradient in gradients(model))
        assert session.notes == (
            "gradients were not finite: they were set to zero, as no optimizer's step could be skipped",
        )
        model.zero_grad()
        taken = torch.autograd.grad(model(rows).sum(), list(model.parameters()))
        assert all(gradient.isfinite().all() and gradient.any() for gradient in taken)
        with pytest.raises(RefusalError) as caught:
            torch.autograd.grad(1e6 * model(rows).sum(), list(model.parameters()))
        assert str(caught.value) == (
            "precision: gradients of _Tower are not finite under --fp16, and no optimizer updates it whose step could be "
            "skipped; use --bf16, or train it with one of torch.optim"
        )


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_output_that_computes_when_the_loop_calls_it(precision: str) -> None:
    class Later(_Tower):
        def forward(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            hidden = self.inner(rows)
            return lambda: self.outer(hidden)

    model, rows = Later(), torch.randn(16, 8)
    with fit(Workload(model), f"--{precision}"), pytest.raises(RefusalError) as caught:
        model(rows)
    assert str(caught.value) == (
        f"precision: Later does not run in {precision}: its output is a function, which computes when "
        f"the loop uses it, past {precision}; leave its precision as it is"
    )


def test_a_part_that_is_unfrozen_under_the_plan() -> None:
    found = []
    for plan in ("", "--fp16"):
        torch.manual_seed(0)
        model, rows = _Tower(), torch.randn(16, 8)
        model.inner.requires_grad_(False)
        with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), plan):
            model.inner.requires_grad_(True)
            model(rows).square().mean().backward()
            found.append(gradients(model))
    assert distance(found[1], found[0]) < 1e-2


@pytest.mark.parametrize("flags", ["--fp16", "--fp16 --accumulate 2"])
def test_two_models_each_with_a_plan(flags: str) -> None:
    """What one scales is not divided by the other."""
    torch.manual_seed(0)
    models, rows = [_Tower(), _Tower()], torch.randn(16, 8)
    with ExitStack() as plans:
        found = []
        for plan in ("", flags):
            for model in models:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                plans.enter_context(fit(Workload(model, optimizer), plan))
            for model in models:
                model(rows).square().mean().backward()
                found.append(gradients(model))
            models[0](models[1](rows).repeat(1, 4)).square().mean().backward()
            found += map(gradients, models)
            plans.close()
    half = len(found) // 2
    assert all(distance(one, other) < 1e-2 for one, other in zip(found[half:], found[:half], strict=True))


def test_a_loss_of_an_earlier_plan() -> None:
    torch.manual_seed(0)
    model, rows = _Tower(), torch.randn(16, 8)
    workload = Workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(rows).square().mean().backward()
    expected = gradients(model)
    with fit(workload, "--fp16"):
        loss = model(rows).square().mean()
    with fit(workload, "--fp16"):
        loss.backward()
    assert distance(gradients(model), expected) < 1e-2
