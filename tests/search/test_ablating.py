"""`ablation` on real models and the CPU device: every row, and everything as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab import Workload, ablation
from memlab.errors import PlanError, TraceError, WorkloadError
from memlab.measuring.device import device_for
from memlab.plan import Plan
from memlab.plan.savings import to_measure
from memlab.records import Prediction
from memlab.records.ablation import Ablation
from memlab.search import ablating
from memlab.search.ablating import default_techniques
from memlab.session import fit, sessions, snapshot
from memlab.session.snapshot import Snapshot
from memlab.units import MIB
from tests.helpers.ctrl_c import interrupt, pythons_own_handler  # noqa: F401 - a fixture
from tests.helpers.snapshots import changed_between
from tests.techniques.models import gpt2, ragged_batch, workload

CPU = torch.device("cpu")


def quiet(line: str) -> None:
    """No progress."""


@pytest.fixture
def load() -> Workload:
    gc.collect()  # what another test has left would come free between two rows, and look like a gain
    load = workload(gpt2(), **ragged_batch())
    load.scheduler = torch.optim.lr_scheduler.LambdaLR(load.optimizers[0], lambda step: 0.9**step)
    return load


@pytest.fixture
def plain() -> Workload:
    """A network to which most techniques do not apply."""
    layers = (torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.ReLU(), torch.nn.Linear(96, 4))
    model = torch.nn.Sequential(*layers)
    batch = (torch.randn(64, 64), torch.randint(0, 4, (64,)))
    return Workload(model, torch.optim.AdamW(model.parameters()), batch, torch.nn.functional.cross_entropy)


def labels(found: Ablation) -> list[str]:
    return [row.label for row in found.rows]


@pytest.mark.full
def test_a_whole_ablation_leaves_no_difference(load: Workload) -> None:
    load.model(**load.batch).loss.backward()
    load.model.eval()
    before = Snapshot(load)
    lines: list[str] = []
    with fit(load, "--checkpoint") as session:
        found = ablation(load, steps=1, progress=lines.append)
        assert (str(session.plan), session.observers.all) == ("--checkpoint", ())
    assert changed_between(before, Snapshot(load)) == []
    assert labels(found)[:12] == ["as written", *(f"+ {technique}" for technique in to_measure())]
    assert lines[:2] == ["1 of 12: as written", lines[1]]
    assert lines[1].startswith("2 of 12: + --chunk-loss, after ")
    assert found.counts_tokens
    assert found.last.ran is not None
    assert found.first.ran is not None
    assert found.last.ran.peak_allocated_bytes < 0.5 * found.first.ran.peak_allocated_bytes
    # predictions on the CPU ledger are exact to a few bytes
    pairs = [(row.ran, row.prediction) for row in found.rows if row.ran and row.prediction]
    assert len(pairs) == len(found.rows) - 1
    # beside the head, whose loss is chunked by then, no layer is large
    assert [row.technique for row in found.rows if row.refused] == ["--tile 4"]
    assert all(p.peak_allocated_bytes == pytest.approx(m.peak_allocated_bytes, rel=0.005) for m, p in pairs)


@pytest.mark.full
def test_rows_stand_on_the_techniques_that_were_kept(load: Workload) -> None:
    found = ablation(load, ["--accumulate 4", "--release-grads", "--adam8bit"], steps=1, progress=quiet)
    assert [(row.technique, row.kept) for row in found.rows[:4]] == [
        ("", True), ("--accumulate 4", True), ("--release-grads", False), ("--adam8bit", True)
    ]  # fmt: skip
    assert [row.plan for row in found.rows[:4]] == [
        "as written", "--accumulate 4", "--accumulate 4 --release-grads", "--accumulate 4 --adam8bit"
    ]  # fmt: skip
    assert "no gain; the peak is in the " in found.steps[2].verdict


@pytest.mark.full
def test_what_gave_nothing_is_tried_again_when_it_is_predicted_to_help(load: Workload) -> None:
    found = ablation(
        load, ["--chunk-loss", "--accumulate 4", "--release-grads", "--offload optimizer"], steps=1, progress=quiet
    )
    tried = [row for row in found.rows if row.technique == "--release-grads"]
    assert [(row.kept, row.again) for row in tried] == [(False, False), (True, True)]
    assert found.rows[-1] is tried[1]


@pytest.mark.full
def test_refusals_are_rows(plain: Workload) -> None:
    before = Snapshot(plain)
    found = ablation(plain, steps=1, progress=quiet)
    assert changed_between(before, Snapshot(plain)) == []
    refused = {row.technique: row.refused for row in found.rows if row.refused}
    assert list(refused) == ["--chunk-loss", "--accumulate 4", "--tile 4", "--offload params"]
    assert "BatchNorm" in refused["--accumulate 4"]
    assert not found.counts_tokens
    assert [row.measurement for row in found.rows if row.refused] == [None] * 4
    assert all(row.ran is not None for row in found.rows if not row.refused)


def test_settings_that_exclude_each_other_are_a_row(plain: Workload) -> None:
    found = ablation(plain, ["--offload optimizer", "--bf16"], fixed="--optim sgd", steps=1, progress=quiet)
    assert "exclude each other" in found.rows[1].refused
    assert found.rows[2].ran is not None


def test_a_technique_under_which_the_model_fails_is_a_row(plain: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fit_plan() == "--bf16":
            raise ValueError("this loss knows no\nbf16")
        return torch.nn.functional.cross_entropy(output, target)

    def fit_plan() -> str:
        return str(sessions()[0].plan) if sessions() else ""

    plain.loss_fn = broken
    before = Snapshot(plain)
    found = ablation(plain, ["--bf16", "--offload optimizer"], steps=1, progress=quiet)
    assert changed_between(before, Snapshot(plain)) == []
    assert found.rows[1].refused == "failed with ValueError: this loss knows no"
    assert found.rows[2].ran is not None


def test_a_budget_ends_the_ablation_at_the_first_row_that_fits(load: Workload) -> None:
    found = ablation(load, ["--chunk-loss", "--accumulate 4", "--adam8bit"], budget="14MiB", steps=1, progress=quiet)
    assert labels(found) == ["as written", "+ --chunk-loss"]
    assert [step.is_first_to_fit for step in found.steps] == [False, True]
    assert found.events == ("ended at the first row that fits; not tried: --accumulate 4, --adam8bit",)


def test_a_budget_that_nothing_fits_is_said(load: Workload) -> None:
    found = ablation(load, ["--chunk-loss"], budget="1MiB", steps=1, progress=quiet)
    assert found.fitting is None
    assert found.events[0].startswith("no row fits 1.0 MiB: the lowest needs 11.2 MiB; ")


def test_what_runs_out_of_memory_is_a_row_and_the_ablation_goes_on(load: Workload) -> None:
    before = Snapshot(load)
    small = device_for(CPU, 10 * MIB)
    found = ablation(load, ["--chunk-loss", "--accumulate 4", "--adam8bit"], steps=1, device=small, progress=quiet)
    assert changed_between(before, Snapshot(load)) == []
    assert [row.ran_out for row in found.rows] == [True, True, False, False]
    assert found.steps[0].verdict.startswith("out of memory: Tried to allocate ")
    assert found.first.technique == "--accumulate 4"
    assert found.plan == "--accumulate 4 --adam8bit --chunk-loss"
    assert "capacity 10.0 MiB" in found.title


@pytest.mark.parametrize("at_call", [6, 8, 11])
@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_ends_it_with_the_rows_so_far(plain: Workload, at_call: int) -> None:
    calls = 0

    def counted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += not isinstance(output, torch._subclasses.FakeTensor) and type(output) is torch.Tensor
        if calls == at_call:
            calls += 1
            interrupt()
        return torch.nn.functional.cross_entropy(output, target)

    plain.loss_fn = counted
    before = Snapshot(plain)
    found = _without_predictions(lambda: ablation(plain, ["--bf16", "--offload optimizer", "--adam8bit"], steps=1))
    assert changed_between(before, Snapshot(plain)) == []
    assert sessions() == ()
    assert 1 <= len(found.rows) < 4
    assert found.events[0].startswith("interrupted; not tried: ")
    assert found.events[0].endswith("--adam8bit")


@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_before_the_first_row_is_raised(plain: Workload) -> None:
    def at_once(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        interrupt()
        return torch.nn.functional.cross_entropy(output, target)

    plain.loss_fn = at_once
    before = Snapshot(plain)
    with pytest.raises(KeyboardInterrupt):
        _without_predictions(lambda: ablation(plain, ["--bf16"], steps=1))
    assert changed_between(before, Snapshot(plain)) == []


@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_while_everything_is_put_back_waits(plain: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = snapshot._restore_optimizer, []

    def interrupted(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            interrupt()
        honest(*args)

    monkeypatch.setattr(snapshot, "_restore_optimizer", interrupted)
    before = Snapshot(plain)
    found = ablation(plain, ["--bf16", "--adam8bit"], steps=1, progress=quiet)
    assert changed_between(before, Snapshot(plain)) == []
    assert labels(found) == ["as written"]


# bytes and seconds of a step that each technique is said to take away or add
SAID = {
    "--offload optimizer": (20, 0.5),
    "--offload activations": (30, 0.1),
    "--adam8bit": (10, 0.0),
    "--bf16": (0, -0.5),
}


def made_up(predictor: object, plan: Plan, measured: object) -> Prediction:
    """A prediction that follows `SAID`."""
    said = [SAID[f"--offload {what}"] for what, _ in plan.offload]
    said += [SAID[flag] for flag in ("--adam8bit", "--bf16") if flag in str(plan)]
    size_bytes, seconds = 100 - sum(freed for freed, _ in said), 1 + sum(added for _, added in said)
    return Prediction(
        plan.label, "cpu", size_bytes, None, 0, {}, (), seconds, 64, 0, (size_bytes, size_bytes), (seconds, seconds)
    )


def test_by_gain_free_techniques_come_first_then_most_bytes_for_a_second(
    plain: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablating, "predicted_by", made_up)
    found = ablation(plain, list(SAID), order="gain", steps=1, progress=quiet)
    assert [row.technique for row in found.rows[1:5]] == [
        "--adam8bit", "--offload activations", "--offload optimizer", "--bf16"
    ]  # fmt: skip


def test_by_gain_with_real_predictions(load: Workload) -> None:
    found = ablation(
        load, ["--checkpoint selective", "--chunk-loss"], order="gain", budget="14MiB", steps=1, progress=quiet
    )
    assert labels(found) == ["as written", "+ --chunk-loss"]


class Deciding(torch.nn.Module):
    """What it computes depends on values, so that nothing can be predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return (y[y > 0].sum() if float(y.sum().item()) > 0 else y.sum()) + y.pow(2).sum()


def test_without_predictions() -> None:
    model = Deciding()
    load = Workload(model, torch.optim.AdamW(model.parameters()), batch=(torch.randn(4, 8),))
    found = ablation(load, ["--offload optimizer"], steps=1, progress=quiet)
    assert [row.prediction for row in found.rows] == [None, None]
    assert found.events[0].startswith("no prediction: ")
    with pytest.raises(TraceError, match=r"order='gain' needs predictions; .*order='documented' needs none"):
        ablation(load, ["--offload optimizer"], order="gain", steps=1, progress=quiet)


def test_default_techniques_suit_the_batch_and_what_is_fixed(load: Workload) -> None:
    load.batch = {name: tensor[:3] for name, tensor in load.batch.items()}
    assert [str(technique) for technique in default_techniques(load, Plan.parse("--bf16"))] == [
        "--chunk-loss", "--accumulate 3", "--checkpoint selective", "--tile 4", "--checkpoint", "--release-grads",
        "--offload optimizer", "--offload activations", "--offload params", "--adam8bit",
    ]  # fmt: skip
    assert all("bit" not in str(technique) for technique in default_techniques(load, lossless=True))


def test_fixed_settings_are_in_every_row(load: Workload) -> None:
    found = ablation(load, ["--accumulate 2"], fixed="--chunk-loss", steps=1, progress=quiet)
    assert [row.plan for row in found.rows] == ["--chunk-loss", "--accumulate 2 --chunk-loss"]
    assert found.rows[0].label == "--chunk-loss"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"order": "best"}, PlanError, "order='best': allowed are 'documented' and 'gain'"),
        ({"steps": 0}, WorkloadError, "steps=0: at least one step must be timed"),
        (
            {"budget": "8GX"},
            PlanError,
            "size '8GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'",
        ),
        ({"budget": 8}, PlanError, "budget: expected a size as text, as in '8GiB', got int 8"),
        ({"techniques": ["--nothing"]}, PlanError, "unknown flag --nothing"),
    ],
)
def test_what_is_wrong_is_said(load: Workload, change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ablation(load, **change)
    assert str(caught.value).startswith(text)


def test_what_is_missing_is_said(load: Workload) -> None:
    load.batch = None
    with pytest.raises(WorkloadError, match="needs a batch"):
        ablation(load, ["--bf16"])


def _without_predictions(ablated: Callable[[], Ablation]) -> Ablation:
    """Calls of the loss are then those of real steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablating, "predicted_by", _nothing_predicted)
        return ablated()


def _nothing_predicted(*_: object) -> None:
    raise WorkloadError("not now")
