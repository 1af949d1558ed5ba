"""`measure` and `compare`: real steps, everything put back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memlab
from memlab import Plan, Workload, compare, fit, measure
from memlab.errors import TraceError, WorkloadError
from memlab.measuring.device import device_for
from memlab.measuring.runs import training_step
from memlab.records import Category
from memlab.report import tables, text
from memlab.session.snapshot import Snapshot
from tests.helpers.chatty import changed, chatty
from tests.helpers.snapshots import changed_between
from tests.techniques.models import Regressor, gpt2, ragged_batch, regression_batch, workload

PLANS = ["--accumulate 4", "--checkpoint", "--adam8bit", "--precision pure-bf16", "--offload optimizer,activations"]


@pytest.fixture
def load() -> Workload:
    load = workload(gpt2(vocabulary=256), **ragged_batch(vocabulary=256))
    load.scheduler = torch.optim.lr_scheduler.LambdaLR(load.optimizers[0], lambda step: 0.9**step)
    return load


@pytest.mark.parametrize("steps_before", [0, 2])
def test_comparing_leaves_no_difference(load: Workload, steps_before: int) -> None:
    for _ in range(steps_before):
        training_step(load)
    load.model(**load.batch).loss.backward()
    load.model.eval()
    before = Snapshot(load)
    compare(load, PLANS, steps=1)
    assert changed_between(before, Snapshot(load)) == []


def test_an_optimizer_that_evaluates_the_loss_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    load = Workload(model, optimizer, (torch.randn(8, 4), torch.randn(8, 1)), loss_fn=nn.functional.mse_loss)
    before = Snapshot(load)
    plain, split = compare(load, [Plan(), "--accumulate 2"], 3).measurements
    assert not changed_between(before, Snapshot(load))
    assert split.losses == pytest.approx(plain.losses, rel=1e-5)
    assert plain.losses[-1] < plain.losses[0]
    said = (
        "LBFGS evaluates the loss in its step as often as the values ask for, which a prediction does not know; measure it instead: "
        "measure(workload, plan)"
    )
    with pytest.raises(TraceError) as caught:
        memlab.predict(load, "")
    assert str(caught.value) == said


def test_keep_keeps_the_training(load: Workload) -> None:
    before = Snapshot(load)
    measure(load, steps=1, keep=True)
    assert changed_between(before, Snapshot(load)) != []


def test_plans_start_from_the_same_point(load: Workload) -> None:
    comparison = compare(load, ["--accumulate 4"], steps=2)
    as_written, split = comparison.measurements
    assert (as_written.plan, split.plan) == ("as written", "--accumulate 4")
    assert len(split.losses) == 4
    assert comparison.rows[1].loss_drift < 1e-5


def test_a_session_in_force_stays_in_force(load: Workload) -> None:
    with fit(load, "--checkpoint") as session:
        measure(load, "--accumulate 2", steps=1)
        assert str(session.plan) == "--checkpoint"
        assert session.observers.all == ()


def test_steps_that_are_put_back_are_not_counted_or_logged(load: Workload) -> None:
    with fit(load, "--accumulate 2") as session:
        training_step(load)
        log = list(session.log)
        compare(load, ["--checkpoint"], steps=1)
        assert (session.steps, list(session.log)) == (1, log)
        measure(load, session.plan, steps=1, keep=True)
        assert session.steps > 1


def test_a_plan_that_does_not_fit_gets_a_row_that_says_so(load: Workload) -> None:
    whole = measure(load, steps=1).peak_allocated_bytes
    small = device_for(torch.device("cpu"), int(0.8 * whole))
    comparison = compare(load, ["--accumulate 4 --checkpoint"], steps=1, device=small)
    too_large, fits = comparison.measurements
    assert (too_large.fits, fits.fits) == (False, True)
    assert too_large.notes[0].startswith("out of memory: Tried to allocate ")
    assert math.isnan(too_large.samples_per_second)
    assert "> " in text.table(tables.comparison(comparison))


def test_arithmetic_of_the_breakdown(load: Workload) -> None:
    for _ in range(2):
        training_step(load)
    parameters = 4 * sum(p.numel() for p in load.model.parameters())
    breakdown = measure(load, steps=1).breakdown
    assert breakdown[Category.PARAMETERS] == pytest.approx(parameters, rel=0.01)
    assert breakdown[Category.OPTIMIZER_STATE] == pytest.approx(2 * parameters, rel=0.01)


def test_a_loss_function_of_the_user() -> None:
    model = Regressor().layers
    load = Workload(
        model, torch.optim.SGD(model.parameters(), 0.1), batch=regression_batch(8), loss_fn=torch.nn.CrossEntropyLoss()
    )
    assert measure(load, "--accumulate 4", steps=1).samples_per_step == 8


class _Returns(torch.nn.Linear):
    """Returns its loss in one of the forms that people choose."""

    def __init__(self, form: str) -> None:
        super().__init__(4, 3)
        self.form = form

    def forward(self, rows: torch.Tensor) -> Any:
        logits = super().forward(rows)
        loss = logits.square().mean()
        forms = {
            "second": (logits, loss), "first": (loss, logits, loss * 2), "list": [logits, loss], "named": {"loss": loss},
            "one element": {"loss": loss[None]}, "one element first": (loss[None], logits), "alone": loss[None],
        }  # fmt: skip
        return forms[self.form]


@pytest.mark.parametrize("form", ["second", "first", "list", "named", "one element", "one element first", "alone"])
def test_the_loss_is_found_in_every_form(form: str) -> None:
    model = _Returns(form)
    load = Workload(model, torch.optim.SGD(model.parameters(), 0.1), batch=(torch.randn(8, 4),))
    assert measure(load, steps=1).samples_per_step == 8


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": None}, "measuring needs a batch to train on: Workload(model, optimizer, batch={…})"),
        ({"optimizers": []}, "measuring needs the optimizer: Workload(model, optimizer, batch={…})"),
        (
            {"batch": {"input_ids": torch.zeros(2, 4, dtype=torch.long)}},
            "GPT2LMHeadModel returned no loss: pass loss_fn=…, run a %%memfit cell of two steps or more, of which one is recorded, or put the labels into the batch",
        ),
    ],
)
def test_what_is_missing_is_said(load: Workload, change: dict, text: str) -> None:
    vars(load).update(change)
    with pytest.raises(WorkloadError) as caught:
        measure(load)
    assert str(caught.value) == text


def test_no_steps_is_an_error(load: Workload) -> None:
    with pytest.raises(WorkloadError) as caught:
        measure(load, steps=0)
    assert str(caught.value) == "steps=0: at least one step must be timed"


@pytest.mark.parametrize("run", [memlab.predict, memlab.measure])
def test_what_a_forward_keeps_elsewhere_is_as_before(run: Callable[..., Any]) -> None:
    model, seen = chatty(2)
    before = changed(model, seen)
    optimizer = torch.optim.SGD(model.parameters())
    run(Workload(model, optimizer, (torch.ones(2, 16), torch.zeros(2, 16)), nn.functional.mse_loss), "")
    assert changed(model, seen) == before
