"""`find_plan` and `choose_plan` on a real model and the CPU device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from memlab.errors import BudgetError, PlanError, TraceError, WorkloadError
from memlab.hardware.gpus import Gpu, gpu
from memlab.plan import Plan, Precision
from memlab.predicting import predict_all
from memlab.records import Prediction
from memlab.runtime.workload import Workload
from memlab.search import choose_plan, find_plan, finding
from memlab.session import fit
from memlab.session.snapshot import Snapshot
from memlab.units import MIB
from tests.helpers.snapshots import changed_between
from tests.techniques.models import gpt2, ragged_batch, workload

FEW = [Plan.parse(flags) for flags in ("", "--chunk-loss", "--checkpoint", "--accumulate 2", "--accumulate 4 --checkpoint",
                                       "--accumulate 4 --checkpoint --adam8bit --chunk-loss")]  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Workload:
    monkeypatch.setattr(finding, "plan_space", lambda *args, **more: tuple(FEW))
    load = workload(gpt2(), **ragged_batch())
    load.scheduler = torch.optim.lr_scheduler.LambdaLR(load.optimizers[0], lambda step: 0.9**step)
    return load


def test_a_plan_is_found_and_nothing_is_changed(load: Workload) -> None:
    load.model(**load.batch).loss.backward()
    load.model.eval()
    whole = predict_all(load, plans=[""])[0].peak_allocated_bytes
    before = Snapshot(load)
    lines: list[str] = []
    with fit(load, "--checkpoint") as session:
        inside = Snapshot(load)
        found = find_plan(load, f"{whole * 0.8 / MIB:.2f}MiB", steps=1, progress=lines.append)
        assert changed_between(inside, Snapshot(load)) == []
        assert (str(session.plan), session.observers.all) == ("--checkpoint", ())
    assert changed_between(before, Snapshot(load)) == []
    assert found.plan in FEW[1:]
    assert found.measurement.peak_allocated_bytes <= found.budget_bytes < whole
    assert "capacity" in found.measurement.device
    assert {prediction.plan for prediction in found.predictions} == {plan.label for plan in FEW}
    assert lines[: len(FEW)] == [f"predicting, {n} of {len(FEW)}: {plan.label}" for n, plan in enumerate(FEW, 1)]
    assert lines[len(FEW)].startswith("trial 1: ")


@pytest.mark.full
def test_what_does_not_fit_really_runs_out_of_memory(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = predict_all(load, plans=FEW)
    whole = honest[0].peak_allocated_bytes

    def hopeful(*args: object, **more: object) -> list[Prediction]:
        shrunk = (replace(p, peak_allocated_bytes=p.peak_allocated_bytes // 2, step_seconds=1.0) for p in honest[:1])
        return [replace(p, interval_bytes=(1, p.peak_allocated_bytes)) for p in shrunk] + honest[1:]

    monkeypatch.setattr(finding, "predict_all", hopeful)
    monkeypatch.setattr(finding, "plan_space", lambda *args, **more: (FEW[0], FEW[-1]))
    honest[1:] = [replace(honest[-1], step_seconds=2.0)]
    before = Snapshot(load)
    found = find_plan(load, f"{int(whole * 0.8)}B", steps=1, progress=lambda line: None)
    assert changed_between(before, Snapshot(load)) == []
    assert [trial.fits for trial in found.trials] == [False, True]
    assert found.trials[0].notes[0].startswith("out of memory: Tried to allocate ")
    assert found.plan == FEW[-1]


def test_choosing_runs_nothing(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "measure", None)
    predictions = predict_all(load, plans=FEW)
    whole, smallest = (choose([p.interval_bytes[1] for p in predictions]) for choose in (max, min))
    assert choose_plan(load, whole)[0] == Plan()
    assert [p.plan for p in choose_plan(load, whole)[1]] == ["as written"]
    for budget_bytes in sorted(p.interval_bytes[1] for p in predictions)[1:5:3]:
        chosen, predicted = choose_plan(load, budget_bytes)
        fitting = [p for p in predictions if p.interval_bytes[1] <= budget_bytes]
        assert chosen.label == min(fitting, key=lambda p: p.step_seconds).plan
        assert predicted[0] == predictions[0]
        assert {p.plan for p in predicted} <= {plan.label for plan in FEW}
    assert choose_plan(load, smallest)[0].label == min(predictions, key=lambda p: p.interval_bytes[1]).plan
    with pytest.raises(BudgetError, match=r"^nothing fits into 1.0 KiB for GPT2LMHeadModel "):
        choose_plan(load, 1024)


@pytest.mark.parametrize(
    ("seconds", "split"),
    [
        ({"--checkpoint": 1.5}, ()),
        ({"--checkpoint": 1.5, "as written": 0.5, "--accumulate 2": 0.7}, ("--accumulate 2",)),
    ],
)
def test_micro_batches_are_predicted_only_where_they_could_be_the_fastest(
    load: Workload, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], split: tuple[str, ...]
) -> None:
    """Of what does not fit whole, where that is faster than what fits; never of a plan that fits."""
    mebibytes = {"as written": 100, "--chunk-loss": 90, "--checkpoint": 40}
    asked: list[str] = []

    def predict(plans: list[Plan]) -> list[Prediction]:
        asked.extend(plan.label for plan in plans)
        return [
            Prediction(
                plan.label, "cpu", peak, None, 0, {}, (), seconds.get(plan.label, 2.0), 4, 0, (peak, peak), (1.0, 2.0)
            )
            for plan in plans
            for peak in (mebibytes.get(plan.label, 30) * MIB,)
        ]

    monkeypatch.setattr(finding, "predicting", lambda *args, **more: predict)
    plan, _ = choose_plan(load, 50 * MIB)
    whole = ["as written", "--chunk-loss", "--checkpoint", "--accumulate 4 --checkpoint --adam8bit --chunk-loss"]
    assert asked == [*whole, *split]
    assert plan.label == (split or ("--checkpoint",))[0]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"budget": "8GX"}, PlanError, "size '8GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ({"budget": 8}, PlanError, "budget: expected a size as text, as in '8GiB', got int 8"),
        ({"trials": 0}, WorkloadError,
         "trials=0: at least one plan must be run; choose from predict_all to run none"),
        ({"steps": 0}, WorkloadError, "steps=0: at least one step must be timed"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(load: Workload, options: dict, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        find_plan(load, **options)
    assert str(caught.value) == text


@pytest.mark.parametrize("loss_fn", [None, torch.nn.functional.mse_loss])
def test_without_a_batch_the_error_says_so(load: Workload, loss_fn: Callable[..., torch.Tensor] | None) -> None:
    load.batch, load.loss_fn = None, loss_fn
    for ask in (find_plan, lambda workload: choose_plan(workload, 2**30)):
        with pytest.raises(WorkloadError, match="needs a batch"):
            ask(load)


def test_choosing_says_what_goes_on(load: Workload) -> None:
    lines: list[str] = []
    with pytest.raises(BudgetError):
        choose_plan(load, 1024, progress=lines.append)
    assert lines[0] == "predicting, 1 of 1: as written"
    assert lines[1:4] == [f"predicting, {n} of 4: {FEW[i].label}" for n, i in ((2, 1), (3, 2), (4, 5))]
    assert {line.partition(": ")[2] for line in lines} == {plan.label for plan in FEW}


@pytest.mark.parametrize(("device", "half"), [(None, "bf16"), ("cpu", "bf16"), ("t4", "fp16"), ("L4", "bf16"),
                                              (gpu("V100 16GB"), "fp16")])  # fmt: skip
def test_a_gpu_is_offered_the_16_bits_it_has(
    load: Workload, monkeypatch: pytest.MonkeyPatch, device: str | Gpu | None, half: str
) -> None:
    asked: list[Precision] = []
    monkeypatch.setattr(finding, "plan_space", lambda *args, half, **more: asked.append(half) or FEW[:1])
    choose_plan(load, 2**40, device=device)
    assert asked == [half]


def test_a_step_that_depends_on_values_is_said(load: Workload) -> None:
    class Picky(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (inputs[inputs > 0].sum() * self.weight).sum()

    model = Picky()
    picky = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.full((4, 3), 0.5),))
    for ask in (find_plan, lambda workload: choose_plan(workload, 2**30)):
        with pytest.raises(TraceError) as caught:
            ask(picky)
        assert "index" in caught.value.operator or "nonzero" in caught.value.operator
