"""`find_plan` on synthetic machines whose true costs are known, and on a real model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab import search
from memlab.errors import BudgetError, MissingExtraError, PlanError, RefusalError, WorkloadError
from memlab.lattice import lattice
from memlab.plan import Loss, Offloaded, OptimizerChoice, Plan, Precision
from memlab.records import FoundPlan, Measurement, Prediction, out_of_memory
from memlab.search import _found, _Search, choose_plan, find_plan
from memlab.session import fit
from memlab.snapshot import Snapshot
from memlab.units import MIB
from tests.techniques.models import gpt2, ragged_batch, workload

PLANS = lattice(rows=16)
SETTINGS = (
    "accumulation",
    "checkpointing",
    "precision",
    "optimizer",
    "optimizer offload",
    "activations offload",
    "loss",
)


def setting(plan: Plan, name: str) -> str:
    if name.endswith(" offload"):
        return "" if plan.tier_of(Offloaded(name.removesuffix(" offload"))) is None else name
    return f"{name} {getattr(plan, name)}" if name in plan.changes() else ""


NAMED = {plan: ["overall", *filter(None, (setting(plan, name) for name in SETTINGS))] for plan in PLANS}
NAMES = sorted({name for named in NAMED.values() for name in named})


@dataclass
class Machine:
    """True costs of plans, in the units of a step as written, and how predictions of them are wrong.

    Costs add up as those of a real step do: arithmetic times precision and recomputation, plus launches of
    micro-batches, plus the update, plus transfers.
    """

    seed: int
    time_error: float = 0.0
    memory_error: float = 0.0
    noise: float = 0.01
    refused: Callable[[Plan], str] = lambda plan: ""
    ran: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.draw = draw
        self.update, self.launch = draw.uniform(0.03, 0.4), draw.uniform(0.005, 0.08)
        self.recompute = draw.uniform(0.15, 0.4)
        self.selective = draw.uniform(0.2, 0.9) * self.recompute
        self.bf16 = draw.choice([draw.uniform(0.35, 0.9), draw.uniform(0.9, 2)])
        self.pure, self.tiles, self.adam8bit = draw.uniform(0.85, 1.1), draw.uniform(-0.05, 0.1), draw.uniform(0.7, 4)
        self.move_state, self.move_activations = draw.uniform(0.05, 0.8), draw.uniform(0.05, 0.8)
        self.parameters, self.activations, self.logits = (
            draw.uniform(0.1, 1),
            draw.uniform(0.3, 4),
            draw.uniform(0.05, 1.5),
        )
        self.kept = draw.uniform(0.3, 0.7)
        self.time_errors = {name: 1 + draw.uniform(-self.time_error, self.time_error) for name in NAMES}
        self.memory_errors = {name: 1 + draw.uniform(-self.memory_error, self.memory_error) for name in NAMES}

    def seconds(self, plan: Plan) -> float:
        extra = {"off": 0, "selective": self.selective, "full": self.recompute}[plan.checkpointing]
        extra += self.tiles if plan.loss is Loss.CHUNKED else 0
        half = {Precision.KEEP: 1, Precision.BF16: self.bf16}.get(plan.precision, self.bf16 * self.pure)
        seconds = half * (1 + extra) + self.launch * (plan.accumulation - 1)
        eight_bit = plan.optimizer is OptimizerChoice.ADAM8BIT
        seconds += self.update * (self.adam8bit if eight_bit else 1)
        if plan.tier_of(Offloaded.OPTIMIZER):
            seconds += self.move_state * (0.25 if eight_bit else 1)
        if plan.tier_of(Offloaded.ACTIVATIONS):
            left = {"off": 1, "selective": 0.5, "full": 0.15}[plan.checkpointing]
            seconds += self.move_activations * left * (1 if plan.precision is Precision.KEEP else 0.5)
        return seconds

    def peak_bytes(self, plan: Plan) -> int:
        half = 1 if plan.precision is Precision.KEEP else 0.5
        activations = self.activations * half * {"off": 1, "selective": self.kept, "full": 0.15}[plan.checkpointing]
        activations *= 0.15 if plan.tier_of(Offloaded.ACTIVATIONS) else 1
        logits = self.logits * half * (0.1 if plan.loss is Loss.CHUNKED else 1)
        state = self.parameters * (0.5 if plan.optimizer is OptimizerChoice.ADAM8BIT else 2)
        if plan.tier_of(Offloaded.OPTIMIZER):
            state = 0.02 * self.parameters
        own = self.parameters * (0.5 if plan.precision is Precision.PURE_BF16 else 1)
        return round((own + state + own / 2 + (activations + logits) / plan.accumulation) * 2**30)

    def predictions(self, plans: Sequence[Plan] = PLANS) -> list[Prediction]:
        return [self.prediction(plan) for plan in plans]

    def prediction(self, plan: Plan) -> Prediction:
        named = NAMED[plan]
        seconds = self.seconds(plan) * math.prod(self.time_errors[name] for name in named)
        peak = self.peak_bytes(plan) * math.prod(self.memory_errors[name] for name in named)
        # what the predictor says of its own errors is true
        doubt = (1 + self.memory_error) ** len(named)
        slow = (1 + self.time_error) ** len(named)
        return Prediction(plan.label, "synthetic", round(peak), None, 0, {}, (), seconds, 8, 0,
                          (math.floor(peak / doubt), math.ceil(peak * doubt)), (seconds / slow, seconds * slow),
                          refused=self.refused(plan))  # fmt: skip

    def run(self, plan: Plan, budget_bytes: int) -> Measurement:
        self.ran.append(plan)
        if self.peak_bytes(plan) > budget_bytes:
            return out_of_memory(plan, "synthetic", budget_bytes, "Tried to allocate 1 GiB")
        seconds = tuple(self.seconds(plan) * (1 + self.draw.uniform(-self.noise, self.noise)) for _ in range(3))
        return Measurement(plan.label, "synthetic", self.peak_bytes(plan), None, 0, {}, (), seconds, 8, 0)

    def find(self, budget_bytes: int, trials: int = 3, plans: Sequence[Plan] = PLANS) -> FoundPlan:
        known = _Search("synthetic", budget_bytes, plans, self.predictions(plans))
        return _found(known, lambda plan: self.run(plan, budget_bytes), trials, lambda line: None)

    def best_seconds(self, budget_bytes: int) -> float:
        return min(self.seconds(plan) for plan in PLANS if self.peak_bytes(plan) <= budget_bytes)

    def budget(self, share: float) -> int:
        """A budget between the smallest plan (0) and the largest (1), on a logarithmic scale."""
        peaks = sorted(self.peak_bytes(plan) for plan in PLANS)
        return math.ceil(peaks[0] * (peaks[-1] / peaks[0]) ** share)


def share_of_best(machine: Machine, budget_bytes: int, trials: int = 3) -> float:
    found = machine.find(budget_bytes, trials)
    return machine.best_seconds(budget_bytes) / machine.seconds(found.plan)


SEEDS = st.integers(0, 10**6)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.floats(0.05, 1.0))
def test_with_true_predictions_the_first_trial_is_the_best_plan(seed: int, share: float) -> None:
    machine = Machine(seed)
    assert share_of_best(machine, machine.budget(share)) >= 0.97
    assert machine.seconds(machine.ran[0]) == machine.best_seconds(machine.budget(share))


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.floats(0.0, 1.0), st.integers(1, 5), st.floats(0, 0.3), st.floats(0, 0.3))
def test_what_is_found_was_run_fits_and_cost_a_bounded_number_of_trials(
    seed: int, share: float, trials: int, time_error: float, memory_error: float
) -> None:
    machine = Machine(seed, time_error, memory_error)
    budget_bytes = machine.budget(share)
    try:
        found = machine.find(budget_bytes, trials)
    except BudgetError:
        # only where predictions of memory are off may what fits be missed
        assert memory_error > 0
        return
    finally:
        assert len(machine.ran) == len(set(machine.ran)) <= 2 * trials + 1
        assert sum(machine.peak_bytes(plan) > budget_bytes for plan in machine.ran) <= trials + 1
    assert machine.peak_bytes(found.plan) <= budget_bytes
    assert found.measurement in found.trials
    assert sum(trial.fits for trial in found.trials) <= trials
    fastest = min(trial.median_step_seconds for trial in found.trials if trial.fits)
    assert found.measurement.median_step_seconds == fastest
    assert [trial.plan for trial in found.trials] == [plan.label for plan in machine.ran]


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.floats(0.1, 1.0))
def test_an_error_that_all_plans_share_does_no_harm(seed: int, share: float) -> None:
    machine = Machine(seed)
    machine.time_errors["overall"], machine.memory_errors["overall"] = 2.5, 0.8
    budget_bytes = machine.budget(share)
    found = machine.find(budget_bytes)
    assert machine.best_seconds(budget_bytes) / machine.seconds(found.plan) >= 0.97 or not found.trials[0].fits


@pytest.mark.parametrize(
    ("error", "trials", "least_median", "least_share"),
    [(0.05, 3, 0.98, 0.85), (0.1, 3, 0.97, 0.7), (0.1, 8, 0.98, 0.85), (0.3, 3, 0.9, 0.2), (0.3, 12, 0.97, 0.6)],
)
def test_how_often_the_best_is_found_when_settings_are_mispredicted(
    error: float, trials: int, least_median: float, least_share: float
) -> None:
    shares = []
    for seed in range(40):
        machine = Machine(seed, time_error=error, memory_error=0.02)
        shares.append(share_of_best(machine, machine.budget(random.Random(seed).uniform(0.05, 1)), trials))
    shares.sort()
    found = sum(share >= 0.97 for share in shares) / len(shares)
    assert shares[len(shares) // 2] >= least_median
    assert found >= least_share


def test_one_trial_is_enough_where_nothing_is_close() -> None:
    machine = Machine(0)
    as_written, half = Plan(), Plan.parse("--bf16")
    machine.bf16, machine.time_errors = 0.5, dict.fromkeys(NAMES, 1.0)
    found = machine.find(machine.budget(1), plans=[as_written, half])
    assert (found.plan, [plan.label for plan in machine.ran]) == (half, ["--bf16"])


def test_a_plan_that_ran_out_of_memory_corrects_the_others() -> None:
    machine = Machine(3)
    machine.memory_errors["overall"] = 0.7  # all peaks are higher than foretold, beyond any interval
    budget_bytes = machine.budget(0.6)
    found = machine.find(budget_bytes)
    assert next(trial.fits for trial in found.trials) is False
    assert machine.peak_bytes(found.plan) <= budget_bytes
    assert len(found.trials) < 6


def test_what_is_uncertain_is_run_only_where_it_would_win() -> None:
    machine = Machine(1, memory_error=0.1)
    budget_bytes = machine.budget(0.5)
    known = _Search("synthetic", budget_bytes, PLANS, machine.predictions())
    first = known.next_plan(3)
    assert first is not None
    assert known.fits_for_certain(first)
    _low, high = machine.prediction(first).interval_bytes
    assert high <= budget_bytes


def test_predictions_come_back_best_first_and_as_they_were() -> None:
    machine = Machine(2, 0.1, 0.02, refused=lambda plan: "accumulation: no" if plan.accumulation > 8 else "")
    found = machine.find(machine.budget(0.5))
    assert sorted(found.predictions, key=str) == sorted(machine.predictions(), key=str)
    refused = [bool(prediction.refused) for prediction in found.predictions]
    assert refused == sorted(refused)
    assert sum(refused) == len(PLANS) // 5
    assert found.predictions[0].plan == found.plan.label
    assert (found.title, found.budget_bytes) == ("synthetic", machine.budget(0.5))


def test_a_setting_refused_in_a_trial_is_left_out_with_its_reason() -> None:
    machine = Machine(5)
    machine.bf16 = 0.4

    def run(plan: Plan) -> Measurement:
        machine.ran.append(plan)
        if plan.precision is not Precision.KEEP:
            raise RefusalError("precision", f"no {plan.precision} here", "use another")
        if plan.optimizer is OptimizerChoice.ADAM8BIT:
            raise MissingExtraError("bitsandbytes is missing")
        return machine.run(plan, machine.budget(0.5))

    known = _Search("synthetic", machine.budget(0.5), PLANS, machine.predictions())
    lines: list[str] = []
    found = _found(known, run, 3, lines.append)
    assert found.plan.precision is Precision.KEEP
    reasons = {p.refused for p in found.predictions if "--bf16" in p.plan}
    assert reasons == {"precision: no bf16 here; use another"}
    assert sum(plan.precision is Precision.BF16 for plan in machine.ran) == 1
    assert sum(plan.optimizer is OptimizerChoice.ADAM8BIT for plan in machine.ran) <= 3
    assert lines[0].startswith("trial 1: ")
    assert lines[0].endswith(" a step")


def test_a_model_that_is_refused_whatever_the_plan_is_an_error() -> None:
    machine = Machine(5)

    def run(plan: Plan) -> Measurement:
        raise RefusalError("session", "the model is compiled")

    with pytest.raises(RefusalError, match="the model is compiled"):
        _found(_Search("x", machine.budget(1), PLANS, machine.predictions()), run, 3, lambda line: None)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_without_any_rate_the_usual_order_of_settings_is_taken(share: float) -> None:
    machine = Machine(7)
    predictions = [
        replace(p, step_seconds=math.nan, interval_seconds=(math.nan, math.nan)) for p in machine.predictions()
    ]
    budget_bytes = machine.budget(share)
    known = _Search("synthetic", budget_bytes, PLANS, predictions)
    found = _found(known, lambda plan: machine.run(plan, budget_bytes), 3, lambda line: None)
    assert machine.peak_bytes(found.plan) <= budget_bytes


def test_text_when_nothing_fits() -> None:
    machine = Machine(0)
    smallest = min(map(machine.peak_bytes, PLANS))
    with pytest.raises(BudgetError) as caught:
        machine.find(smallest // 2)
    plan = min(PLANS, key=machine.peak_bytes)
    assert machine.ran == []
    sizes = f"{smallest / 2**20:.1f} MiB, {(smallest - smallest // 2) / 2**20:.1f} MiB too much"
    assert str(caught.value) == (
        f"nothing fits into {smallest // 2 / 2**20:.1f} MiB for synthetic: the smallest of {len(PLANS)} plans, "
        f"{plan.label}, needs about {sizes}; use a GPU with the memory of a GTX 1080 (8.00 GiB), or make the batch smaller"
    )


def test_text_names_what_was_run_in_vain() -> None:
    machine = Machine(0)
    machine.memory_errors["overall"] = 0.01
    budget_bytes = min(map(machine.peak_bytes, PLANS)) - 1
    with pytest.raises(BudgetError) as caught:
        machine.find(budget_bytes, trials=2)
    labels = ", ".join(plan.label for plan in machine.ran)
    assert f" too much (run and out of memory: {labels}); " in str(caught.value)
    assert 1 <= len(machine.ran) <= 3


def test_text_when_every_plan_is_refused() -> None:
    machine = Machine(0, refused=lambda plan: "accumulation: BatchNorm")
    with pytest.raises(WorkloadError) as caught:
        machine.find(machine.budget(1))
    assert str(caught.value) == "no plan applies to synthetic: accumulation: BatchNorm"


def test_text_when_no_gpu_is_large_enough() -> None:
    assert search._gpu_for(2**40) == "no single GPU of the catalogue holds that: spread the model over several"


# -- a real model on the CPU device ------------------------------------------------------------------

FEW = [Plan.parse(flags) for flags in ("", "--chunk-loss", "--checkpoint", "--accumulate 2", "--accumulate 4 --checkpoint",
                                       "--accumulate 4 --checkpoint --adam8bit --chunk-loss")]  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> search.Workload:
    monkeypatch.setattr(search, "lattice", lambda *args, **more: tuple(FEW))
    load = workload(gpt2(), **ragged_batch())
    load.scheduler = torch.optim.lr_scheduler.LambdaLR(load.optimizers[0], lambda step: 0.9**step)
    return load


def test_a_plan_is_found_and_nothing_is_changed(load: search.Workload) -> None:
    load.model(**load.batch).loss.backward()
    load.model.eval()
    whole = search.predict_all(load, plans=[""])[0].peak_allocated_bytes
    before = Snapshot(load)
    lines: list[str] = []
    with fit(load, "--checkpoint") as session:
        inside = Snapshot(load)
        found = find_plan(load, f"{whole * 0.8 / MIB:.2f}MiB", steps=1, progress=lines.append)
        assert inside.differences(Snapshot(load)) == []
        assert (str(session.plan), session.observers) == ("--checkpoint", [])
    assert before.differences(Snapshot(load)) == []
    assert found.plan in FEW[1:]
    assert found.measurement.peak_allocated_bytes <= found.budget_bytes < whole
    assert "capacity" in found.measurement.device
    assert {prediction.plan for prediction in found.predictions} == {plan.label for plan in FEW}
    assert lines[: len(FEW)] == [f"predicting, {n} of {len(FEW)}: {plan.label}" for n, plan in enumerate(FEW, 1)]
    assert lines[len(FEW)].startswith("trial 1: ")


def test_what_does_not_fit_really_runs_out_of_memory(load: search.Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = search.predict_all(load, plans=FEW)
    whole = honest[0].peak_allocated_bytes

    def hopeful(*args: object, **more: object) -> list[Prediction]:
        shrunk = (replace(p, peak_allocated_bytes=p.peak_allocated_bytes // 2, step_seconds=1.0) for p in honest[:1])
        return [replace(p, interval_bytes=(1, p.peak_allocated_bytes)) for p in shrunk] + honest[1:]

    monkeypatch.setattr(search, "predict_all", hopeful)
    monkeypatch.setattr(search, "lattice", lambda *args, **more: (FEW[0], FEW[-1]))
    honest[1:] = [replace(honest[-1], step_seconds=2.0)]
    before = Snapshot(load)
    found = find_plan(load, f"{int(whole * 0.8)}B", steps=1, progress=lambda line: None)
    assert before.differences(Snapshot(load)) == []
    assert [trial.fits for trial in found.trials] == [False, True]
    assert found.trials[0].notes[0].startswith("out of memory: Tried to allocate ")
    assert found.plan == FEW[-1]


def test_choosing_runs_nothing(load: search.Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "measure", None)
    predictions = search.predict_all(load, plans=FEW)
    whole, smallest = (choose([p.interval_bytes[1] for p in predictions]) for choose in (max, min))
    assert choose_plan(load, whole)[0] == Plan()
    chosen, foretold = choose_plan(load, smallest)
    assert chosen.label == min(predictions, key=lambda p: p.interval_bytes[1]).plan
    assert [p.plan for p in foretold] == [plan.label for plan in FEW]
    with pytest.raises(BudgetError, match=r"^nothing fits into 1.0 KiB for GPT2LMHeadModel "):
        choose_plan(load, 1024)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"budget": "8GB"}, PlanError, "size '8GB': expected a number with B, KiB, MiB, GiB or TiB, as in '8GiB'"),
        ({"budget": 8}, PlanError, "budget: expected a size as text, as in '8GiB', got int 8"),
        ({"trials": 0}, WorkloadError,
         "trials=0: at least one plan must be run; choose from predict_all to run none"),
        ({"steps": 0}, WorkloadError, "steps=0: at least one step must be timed"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(load: search.Workload, options: dict, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        find_plan(load, **options)
    assert str(caught.value) == text


@pytest.mark.parametrize("loss_fn", [None, torch.nn.functional.mse_loss])
def test_without_a_batch_the_error_says_so(load: search.Workload, loss_fn: Callable[..., torch.Tensor] | None) -> None:
    load.batch, load.loss_fn = None, loss_fn
    for ask in (find_plan, lambda workload: choose_plan(workload, 2**30)):
        with pytest.raises(WorkloadError, match="needs a batch"):
            ask(load)
