"""`%memfit predict`, `find`, `snapshot`, `%%memfit --budget`, and the column of predictions in receipts.

What is predicted is made up here: the predictor and the search have tests of their own.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from memlab.errors import BudgetError, PlanError, TraceError
from memlab.hardware.gpus import gpu
from memlab.jupyter import prediction
from memlab.jupyter.cell_observers import without_graph
from memlab.jupyter.display import PredictedPlans
from memlab.jupyter.flags import PREDICT_FLAGS
from memlab.jupyter.parser import predict_options
from memlab.live.control import control_of
from memlab.measuring.runs import each_of
from memlab.plan import Plan, Precision
from memlab.plan.space import plan_space
from memlab.predicting import predict_all
from memlab.records import Measurement, Prediction
from memlab.records.comparison import Comparison, FoundPlan
from memlab.records.run_record import RunRecord
from memlab.runtime.batch import Batch
from memlab.runtime.workload import Workload
from memlab.session import session_of, sessions
from tests.jupyter.conftest import STEP, TRAIN, Cell
from tests.jupyter.test_refusals import one_line

KIB = 2**10
PLANS = ("", "--accumulate 2", "--accumulate 4", "--bf16", "--accumulate 4 --bf16", "--checkpoint")


def predicted(plan: Plan, device: str | None = None) -> Prediction:
    """The more is saved, the less is needed and the slower it is."""
    if plan.checkpointing != "off":
        return Prediction(plan.label, device or "CPU ledger", 0, None, 0, {}, (), float("nan"), 0, 0, (0, 0), (0, 0),
                          refused="checkpointing: Sequential repeats no block")  # fmt: skip
    needed = int(64 * KIB / plan.accumulation * (0.7 if plan.precision == "bf16" else 1))
    seconds = 0.01 * (1 + 0.1 * plan.accumulation) * (0.8 if plan.precision == "bf16" else 1)
    parts = {"parameters": needed // 2, "activations": needed - needed // 2}
    return Prediction(plan.label, device or "CPU ledger", needed, None, 0, parts, (), seconds, 12, 0,
                      (int(needed * 0.98), int(needed * 1.02)), (seconds * 0.9, seconds * 1.1))  # fmt: skip


class Oracle:
    """Stands in for the predictor and the search, and notes what it was asked."""

    def __init__(self) -> None:
        self.workloads: list[Workload] = []
        self.asked: list[str] = []
        self.fixed: list[Plan] = []
        self.measured: list[Measurement | None] = []
        self.error: Exception | None = None

    def predict(self, workload: Workload, plan: Plan | str = "", device: str | None = None, **more: Any) -> Prediction:
        return self.predict_all(workload, device, plans=[plan if isinstance(plan, Plan) else Plan.parse(plan)])[0]

    def predict_all(
        self, workload: Workload, device: str | None = None, *, plans: Any = None, measured: Any = None,
        progress: Callable[[str], None] | None = None,
    ) -> list[Prediction]:  # fmt: skip
        if self.error is not None:
            raise self.error
        name = gpu(device).name if device else None
        wanted = [Plan.parse(text) for text in PLANS] if plans is None else list(plans)
        self.workloads += each_of(workload)
        self.measured.append(measured)
        self.asked += [plan.label for plan in wanted]
        if progress is not None:
            progress(f"1 of {len(wanted)}: {wanted[0].label}")
        return [predicted(plan, name) for plan in wanted]

    def choose_plan(
        self, workload: Workload, budget_bytes: int, *, device: object = None, fixed: Plan = Plan(),  # noqa: B008
        lossless: bool = False, measured: Any = None, progress: Callable[[str], None] | None = None,
    ) -> tuple[Plan, list[Prediction]]:  # fmt: skip
        self.fixed.append(fixed)
        plans = [
            replace(Plan.parse(text), **{name: getattr(fixed, name) for name in fixed.changes()}) for text in PLANS
        ]
        predictions = self.predict_all(workload, plans=dict.fromkeys(plans), measured=measured)
        fits = [p for p in predictions if not p.refused and p.needed_bytes <= budget_bytes]
        if not fits:
            raise BudgetError("no plan fits 1.0 KiB: the smallest needs 11.2 KiB")
        best = max(fits, key=lambda p: p.samples_per_second)
        return Plan() if best.plan == "as written" else Plan.parse(best.plan), predictions

    def find_plan(self, workload: Workload, budget: str, **options: Any) -> FoundPlan:
        plan, predictions = self.choose_plan(workload, 32 * KIB)
        row = Measurement(plan.label, "CPU ledger", 22 * KIB, None, 0, {}, (), (0.01, 0.01), 12, 0)
        return FoundPlan(each_of(workload)[0].describe(), 32 * KIB, plan, row, (row,), tuple(predictions))

    def save_snapshot(
        self, path: str, workload: Workload, plan: Plan, device: str | None = None, *, measured: bool
    ) -> Path:
        self.asked.append(f"{plan.label} for {device}, {'measured' if measured else 'predicted'}")
        Path(path).write_bytes(b"snapshot")
        return Path(path)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    made = Oracle()
    for name, methods in (
        ("memlab.predicting", ("predict", "predict_all", "save_snapshot")),
        ("memlab.search", ("choose_plan", "find_plan")),
    ):
        module = ModuleType(name)
        for method in methods:
            setattr(module, method, getattr(made, method))
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def telling(made: Cell, oracle: Oracle) -> Iterator[Cell]:
    """A notebook in which receipts show predictions."""
    made("%config MemLab.predict = True")
    made("%config MemLab.predict_cells = True")
    return made


# -- %memfit predict


def test_all_plans_of_the_model_in_the_notebook(shell: Any, made: Cell, oracle: Oracle) -> None:
    ran = made("p = %memfit predict --batch inputs")
    assert ran.error is None, ran.err
    predicted_plans = shell.user_ns["p"]
    assert isinstance(predicted_plans, PredictedPlans)
    assert [each.plan for each in predicted_plans] == [Plan.parse(text).label for text in PLANS]
    assert predicted_plans[0] is predicted_plans.predictions[0]
    assert oracle.workloads[0].batch is shell.user_ns["inputs"]
    assert sessions() == ()
    shown = made("%memfit predict --batch inputs --budget 40KiB").out
    assert (
        "memfit · Sequential 1.73k · AdamW · predicted for CPU ledger · 5 plans · 1 refused · budget 40.0 KiB" in shown
    )
    assert "fits, 8.0 KiB to spare" in shown
    assert "refused: --checkpoint: checkpointing: Sequential repeats no block" in shown


def test_the_batch_of_the_last_cell_is_taken(shell: Any, made: Cell, oracle: Oracle) -> None:
    made(f"%%memfit\n{TRAIN}")
    made("p = %memfit predict")
    assert oracle.workloads[0].batch.args[0] is shell.user_ns["inputs"]
    assert oracle.workloads[0].model is shell.user_ns["model"]
    assert [each.plan for each in shell.user_ns["p"].measurements] == ["as written"]
    # predicted times are put right by the measured one, on this device only
    made("p = %memfit predict --device T4")
    assert [each.plan if each else None for each in oracle.measured] == ["as written", None]
    assert shell.user_ns["p"].measurements == ()


def test_ranks_of_several_processes(shell: Any, made: Cell) -> None:
    ran = made("p = %memfit predict --scale zero3 --nproc 3 --batch inputs")
    assert ran.error is None, ran.err
    predicted_plans = shell.user_ns["p"]
    assert [(each.scale, each.ranks) for each in predicted_plans.predictions] == [
        ("--scale zero3", n) for n in (1, 2, 3)
    ]
    assert sessions() == ()
    shown = made("p").out
    assert "Sequential 1.73k · AdamW · cpu · CPU ledger" in shown
    assert "sent a step" in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--scale fsdp2", "--scale fsdp2 needs --nproc"),
        ("--nproc 2", "--nproc 2 needs --scale"),
        ("--scale fsdp2 --nproc 2 --budget 1GiB", "--budget with --scale: ranks are predicted for one plan"),
        ('--scale fsdp2 --nproc 2 --plans "--bf16"', "--plans with --scale: ranks are predicted for one plan"),
        ("--scale fsdp2 --nproc 0", "--nproc 0: expected a whole number of processes"),
    ],
)
def test_ranks_that_cannot_be_predicted(line: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        predict_options("predict", shlex.split(line))


def test_one_plan_stands_beside_the_one_as_written(shell: Any, made: Cell, oracle: Oracle) -> None:
    ran = made("%memfit predict --accumulate 4 --batch inputs --device t4")
    assert oracle.asked == ["as written", "--accumulate 4"]
    assert "predicted for T4 · 2 plans" in ran.out
    assert "--accumulate 4 · T4 · predicted" in ran.out
    assert "activations" in ran.out
    assert "•" not in ran.out


def test_several_plans_are_quoted(shell: Any, made: Cell, oracle: Oracle) -> None:
    made('p = %memfit predict --batch inputs --plans "--bf16" "--accumulate 4 --bf16"')
    assert [each.plan for each in shell.user_ns["p"]] == ["as written", "--bf16", "--accumulate 4 --bf16"]


def test_a_loop_with_its_own_loss(shell: Any, made: Cell, oracle: Oracle) -> None:
    made("criterion = torch.nn.functional.cross_entropy")
    made("p = %memfit predict --batch inputs,target --loss-fn criterion")
    workload = oracle.workloads[0]
    assert workload.loss_fn is torch.nn.functional.cross_entropy
    assert workload.batch == (shell.user_ns["inputs"], shell.user_ns["target"])


def test_a_predicted_plans_has_three_static_formats(shell: Any, made: Cell, oracle: Oracle) -> None:
    made("p = %memfit predict --batch inputs --budget 40KiB\nq = %memfit predict --batch inputs --accumulate 2")
    made("f = %memfit find --batch inputs --budget 32KiB")
    shell.display_formatter.active_types = shell.display_formatter.format_types
    for name in ("p", "f"):
        data, _ = shell.display_formatter.format(shell.user_ns[name])
        assert set(data) == {"text/plain", "text/html", "image/png"}
        assert data["text/html"].startswith('<div class="memlab-receipt"')
    # without a timeline there is no picture of a single plan
    assert set(shell.display_formatter.format(shell.user_ns["q"])[0]) == {"text/plain", "text/html"}
    made("%config MemLab.picture = False")
    assert "image/png" not in shell.display_formatter.format(shell.user_ns["p"])[0]


def test_the_budget_of_the_configuration(shell: Any, made: Cell, oracle: Oracle) -> None:
    made("%config MemLab.budget = '40KiB'\np = %memfit predict --batch inputs")
    assert shell.user_ns["p"].budget_bytes == 40 * KIB
    made("%config MemLab.budget = ''\n%config MemLab.capacity = '50KiB'\np = %memfit predict --batch inputs")
    assert shell.user_ns["p"].budget_bytes == 50 * KIB
    made("q = %memfit predict --batch inputs --device T4")
    assert shell.user_ns["q"].budget_bytes is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("predict", "%memfit predict needs a batch: run one training cell with %%memfit first (again after %memfit undo), or pass --batch NAME "
                    "(a variable of this notebook)"),
        ("predict --batch nothing", "--batch nothing: no variable of that name"),
        ("predict --batch words", "--batch words: list without a tensor; name what the model is called with"),
        ("predict --batch words,nothing", "--batch nothing: no variable of that name"),
        ("predict --batch inputs --loss-fn sum", "--loss-fn sum: no variable of that name"),
        ("predict --batch inputs --budget 4GX", "size '4GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ("predict --batch inputs --checkpoint", "checkpointing: Sequential repeats no block"),
        ("predict --batch inputs --plans", '--plans needs plans, each in quotes, as in --plans "--accumulate 4" "--checkpoint"'),
        ("predict --batch inputs --fp16 --plans --bf16", "%memfit predict: give flags of one plan, or several plans after --plans, not both"),
        ("predict --batch inputs --capacity 8GiB", "--capacity is a flag of a cell, as in %%memfit --capacity SIZE"),
        ("--capacity 8GiB", "--capacity is a flag of a cell, as in %%memfit --capacity SIZE"),
        ("predict --batch inputs everything", "%memfit predict everything: unknown; see %memfit help"),
        ("find --batch inputs", "%memfit find needs a budget, as in %memfit find --budget 8GiB"),
        ("find --budget 8GiB", "%memfit find needs a batch: run one training cell with %%memfit first (again after %memfit undo), or pass --batch "
                               "NAME (a variable of this notebook)"),
        ("snapshot --batch inputs", "%memfit snapshot needs one file name, as in %memfit snapshot step.pickle --predicted"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(made: Cell, oracle: Oracle, line: str, said: str) -> None:
    made("words = ['a', 'b']")
    assert one_line(made(f"%memfit {line}")) == said


def test_a_gpu_that_is_not_known(made: Cell, oracle: Oracle) -> None:
    said = one_line(made("%memfit predict --batch inputs --device H101"))
    assert said.startswith("no GPU 'H101' in the catalogue; did you mean H100 PCIe or H100 SXM? There are GTX 1080, ")


def test_a_flag_that_is_not_known_names_the_nearest(made: Cell, oracle: Oracle) -> None:
    assert one_line(made("%memfit predict --devize T4")).startswith("unknown flag --devize; did you mean --device?")


UNTRACEABLE = TraceError("what this model computes depends on values (aten.nonzero.default), which …", "aten.nonzero")


def test_a_model_that_cannot_be_traced_is_measured_as_it_is(shell: Any, made: Cell, oracle: Oracle) -> None:
    oracle.error = UNTRACEABLE
    before = {name: value.clone() for name, value in shell.user_ns["model"].state_dict().items()}
    made("criterion = torch.nn.functional.cross_entropy")
    ran = made("p = %memfit predict --batch inputs,target --loss-fn criterion --budget 1GiB")
    assert ran.error is None, ran.err
    assert ran.out == f"memfit: {UNTRACEABLE}; so one step of the plan as written is measured\n"
    comparison = shell.user_ns["p"]
    assert isinstance(comparison, Comparison)
    (row,) = comparison.measurements
    assert (row.plan, len(row.step_seconds), row.fits) == ("as written", 1, True)
    assert comparison.title == "memfit · Sequential 1.73k · AdamW · CPU ledger · measured, not predicted"
    assert all(torch.equal(value, before[name]) for name, value in shell.user_ns["model"].state_dict().items())
    # a device too small for it
    made("%config MemLab.capacity = '16KiB'")
    made("p = %memfit predict --batch inputs,target --loss-fn criterion")
    assert [row.fits for row in shell.user_ns["p"].measurements] == [False]


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("predict --accumulate 2", 'measure it instead: %memfit compare "--accumulate 2"'),
        (
            'predict --plans "--bf16" "--accumulate 2"',
            'measure them instead: %memfit compare "--bf16" "--accumulate 2"',
        ),
        ("find --budget 1GiB", 'measure plans instead, as in %memfit compare "--accumulate 4" "--checkpoint"'),
        ("predict --device T4", "without --device one step is measured here"),
    ],
)
def test_what_only_a_prediction_can_tell_is_refused(made: Cell, oracle: Oracle, line: str, advice: str) -> None:
    oracle.error = UNTRACEABLE
    command, _, rest = line.partition(" ")
    said = one_line(made(f"%memfit {command} --batch inputs {rest}"))
    assert said == f"{UNTRACEABLE}; {advice}"


def test_a_plan_cannot_be_chosen_for_a_model_that_cannot_be_traced(made: Cell, oracle: Oracle) -> None:
    oracle.error = UNTRACEABLE
    said = one_line(made(f"%%memfit --budget 1GiB\n{TRAIN}"))
    assert said == f"{UNTRACEABLE}; choose the plan yourself instead, as in %%memfit --accumulate 4"


def test_exact_plans_are_predicted_where_asked(made: Cell, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    always = predicted(Plan())

    def predicted_anyway(plan: Plan, device: str | None = None) -> Prediction:
        return replace(always, plan=plan.label)

    monkeypatch.setattr(sys.modules[__name__], "predicted", predicted_anyway)
    for flags, expected in {
        "--lossless": plan_space(rows=12, lossless=True),
        "--lossless --device T4": plan_space(rows=12, lossless=True, half=Precision.FP16),
    }.items():
        oracle.asked.clear()
        assert made(f"p = %memfit predict --batch inputs {flags}").error is None
        assert oracle.asked == [plan.label for plan in expected]


def test_no_model(cell: Cell, oracle: Oracle) -> None:
    assert one_line(cell("%memfit predict")).startswith("%memfit predict needs a model: no variable of this notebook")


# -- %memfit find, snapshot


def test_find_shows_the_evidence_and_how_to_apply_it(shell: Any, made: Cell, oracle: Oracle) -> None:
    ran = made("%memfit find --batch inputs --budget 32KiB")
    assert "memfit: to apply it: %memfit --accumulate 4 --bf16\n" in ran.out
    assert "found --accumulate 4 --bf16: 22.0 KiB of 32.0 KiB, 10.0 KiB to spare" in ran.out
    assert isinstance(ran.result.result, FoundPlan)


def test_snapshot(made: Cell, oracle: Oracle, tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    ran = made(f"%memfit snapshot '{file}' --predicted --accumulate 4 --device T4 --batch inputs")
    assert ran.out == f"memfit: --accumulate 4, saved to {file}; open it at https://docs.pytorch.org/memory_viz\n"
    assert oracle.asked[-1] == "--accumulate 4 for T4, predicted"
    made(f"%%memfit --accumulate 2\n{TRAIN}")
    made(f"%memfit snapshot {file}")
    assert oracle.asked[-1] == "--accumulate 2 for None, predicted"  # a CPU has no allocator to record


# -- %%memfit --budget


def test_a_budget_chooses_the_plan_of_the_first_step(shell: Any, made: Cell, oracle: Oracle) -> None:
    ran = made(f"%%memfit --budget 40KiB\n{TRAIN}")
    assert ran.error is None, ran.err
    session = session_of(shell.user_ns["model"])
    assert session.plan.label == "--accumulate 4 --bf16"
    rows = [line for line in ran.out.splitlines() if line.startswith(("as written", "--"))]
    assert len(rows) == 1
    assert rows[0].startswith(session.plan.label)
    assert f"budget 40.0 KiB: {session.plan.label}, chosen of 6 plans, predicted " in ran.out
    assert ", measured " in ran.out
    assert "predicted" in ran.out.splitlines()[1]
    assert session.observers.all == (control_of(session.workload.model),)


def test_what_predictions_train_is_no_model_of_the_cell(made: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose_plan(workload: Any, *_args: Any, **_kwargs: Any) -> tuple[Plan, list[Prediction]]:
        return Plan(), predict_all(workload, plans=["", "--checkpoint --offload activations"])

    monkeypatch.setattr("memlab.search.choose_plan", choose_plan)
    ran = made(f"%%memfit --budget 1GiB\n{TRAIN}")
    assert ran.error is None, ran.err
    assert " + " not in ran.out.splitlines()[0]


def test_flags_beside_a_budget_are_kept(shell: Any, made: Cell, oracle: Oracle) -> None:
    made(f"%%memfit --budget 20KiB --bf16\n{TRAIN}")
    assert oracle.fixed == [Plan.parse("--bf16")] * 2  # at the first call, and once the loss of the loop is known
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4 --bf16"


def test_a_model_made_in_the_cell(shell: Any, cell: Cell, oracle: Oracle) -> None:
    from tests.jupyter.conftest import MAKE

    ran = cell(f"%%memfit --budget 20KiB\n{MAKE}\n{TRAIN}")
    assert ran.error is None, ran.err
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4 --bf16"


def test_the_same_choice_is_made_once(made: Cell, oracle: Oracle) -> None:
    for _ in range(2):
        made(f"%%memfit --budget 40KiB\n{TRAIN}")
    assert len(oracle.fixed) == 2
    made("inputs, target = inputs[:8], target[:8]")
    made(f"%%memfit --budget 40KiB\n{TRAIN}")
    assert len(oracle.fixed) == 4


def test_a_budget_that_nothing_fits_is_one_line_and_trains_nothing(shell: Any, made: Cell, oracle: Oracle) -> None:
    before = [p.detach().clone() for p in shell.user_ns["model"].parameters()]
    assert one_line(made(f"%%memfit --budget 1KiB\n{TRAIN}")) == "no plan fits 1.0 KiB: the smallest needs 11.2 KiB"
    assert all(torch.equal(a, b) for a, b in zip(before, shell.user_ns["model"].parameters(), strict=True))
    assert made(f"%%memfit\n{TRAIN}").error is None


def test_the_configured_budget_is_for_cells_that_say_nothing(shell: Any, made: Cell, oracle: Oracle) -> None:
    made("%config MemLab.budget = '20KiB'")
    made(f"%%memfit --accumulate 2\n{TRAIN}")
    assert oracle.fixed == []
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 2"
    made(f"%%memfit\n{TRAIN}")
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4 --bf16"


def test_a_wrong_budget_is_refused_when_it_is_set(made: Cell, caplog: pytest.LogCaptureFixture) -> None:
    made("%config MemLab.budget = '1GX'")
    assert "size '1GX': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'" in caplog.text


# -- receipts


def test_receipts_show_what_was_predicted(telling: Cell, oracle: Oracle) -> None:
    telling(f"%%memfit\n{TRAIN}")
    ran = telling(f"%%memfit --accumulate 4\n{TRAIN}")
    assert oracle.asked == ["as written", "--accumulate 4"]
    lines = ran.out.splitlines()
    assert lines[1].split()[:4] == ["plan", "peak", "allocated", "predicted"]
    # the oracle's 64 and 16 KiB are far from what such a model takes, which is marked
    assert lines[3].split()[4:7] == ["≠", "64.0", "KiB"]
    assert lines[5].removeprefix("--accumulate 4 ◂ this cell").split()[2:5] == ["≠", "16.0", "KiB"]


@pytest.mark.parametrize("error", [TraceError("a step depends on values: nonzero"), RuntimeError("boom\nmore")])
def test_a_prediction_that_fails_is_one_note_and_asked_no_more(telling: Cell, oracle: Oracle, error: Exception) -> None:
    oracle.error = error
    first = telling(f"%%memfit\n{TRAIN}")
    assert first.error is None
    notes = [line for line in first.out.splitlines() if line.startswith("no prediction: ")]
    assert len(notes) == 1
    assert notes[0].endswith(("nonzero", "RuntimeError: boom"))
    oracle.error = None
    again = telling(f"%%memfit --accumulate 4\n{TRAIN}")
    assert "predict" not in again.out
    assert oracle.asked == []


def test_predictions_that_take_long_are_left_out(
    telling: Cell, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(prediction, "monotonic", lambda: float(next(clock)))
    ran = telling(f"%%memfit\n{TRAIN}")
    assert "receipts show no more predictions, which took 6 s; use %memfit predict" in ran.out
    assert "no more" not in telling(f"%%memfit\n{TRAIN}").out


def test_an_interrupted_cell_is_not_kept_waiting(telling: Cell, oracle: Oracle) -> None:
    ran = telling(f"%%memfit\n{TRAIN}raise KeyboardInterrupt")
    assert "4 steps" in ran.out
    assert oracle.asked == []


def test_compared_plans_are_predicted_too(shell: Any, cell: Cell, oracle: Oracle) -> None:
    from tests.jupyter.test_line import MAKE_WITH_LOSS, TRAIN_WITH_LOSS

    cell(f"%config MemLab.predict = True\n{MAKE_WITH_LOSS}")
    cell(f"%%memfit\n{TRAIN_WITH_LOSS}")
    cell('c = %memfit compare "--accumulate 2"')
    assert [row.prediction.plan for row in shell.user_ns["c"].rows] == ["as written", "--accumulate 2"]


def test_a_saved_run_holds_what_was_predicted(telling: Cell, oracle: Oracle, tmp_path: Path) -> None:
    telling(f"%%memfit\n{TRAIN}\n")
    telling("p = %memfit predict")
    telling(f"%memfit record {tmp_path}/run.json")
    record = RunRecord.from_json((tmp_path / "run.json").read_text())
    assert [each.plan for each in record.comparison.predictions] == ["as written"]
    assert len(record.predictions) == len(PLANS)


# -- parts


def test_a_kept_batch_holds_no_graph() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    batch = Batch((leaf * 2,), {"mask": leaf, "kind": "text", "nested": [leaf + 1]})
    kept = without_graph(batch)
    assert kept.args[0].grad_fn is None
    assert kept.args[0].requires_grad
    assert kept.args[0].data_ptr() == batch.args[0].data_ptr()
    assert kept.kwargs["mask"] is leaf
    assert kept.kwargs["nested"][0].grad_fn is None
    assert kept.kwargs["kind"] == "text"


def test_every_flag_is_read() -> None:
    words = [
        "--lossless",
        "--all",
        "--model",
        "m",
        "--optimizer=o",
        "--batch",
        "x, y",
        "--budget",
        "1GiB",
        "--fp16",
    ]
    options = predict_options("predict", words)
    assert (options.lossless, options.every, options.models, options.optimizer) == (True, True, ("m",), "o")
    assert (options.batch, options.budget, str(options.plan)) == (("x", "y"), "1GiB", "--fp16")
    assert {flag.name for flags in PREDICT_FLAGS.values() for flag in flags} == {
        "budget", "device", "all", "plans", "lossless", "batch", "loss_fn", "model", "optimizer", "predicted",
        "steps", "nproc",
    }  # fmt: skip


def test_a_step_outside_of_cells_is_not_touched_by_a_chooser(shell: Any, made: Cell, oracle: Oracle) -> None:
    made(f"%%memfit --budget 40KiB\n{TRAIN}")
    assert made(STEP).error is None
    assert len(oracle.fixed) == 2


def test_with_the_real_predictor(shell: Any, cell: Cell) -> None:
    from tests.jupyter.test_line import MAKE_WITH_LOSS, TRAIN_WITH_LOSS

    cell(f"%config MemLab.predict_cells = True\n{MAKE_WITH_LOSS}")
    cell(f"%%memfit\n{TRAIN_WITH_LOSS}")
    cell("c = %memfit report\np = %memfit predict --accumulate 2 --device T4")
    (row,) = shell.user_ns["c"].rows
    assert row.prediction is not None, shell.user_ns["c"].events
    assert row.prediction.peak_allocated_bytes == pytest.approx(row.measurement.peak_allocated_bytes, rel=0.02)
    assert [each.plan for each in shell.user_ns["p"]] == ["as written", "--accumulate 2"]
    assert all(each.peak_reserved_bytes for each in shell.user_ns["p"])


def test_a_batch_that_its_model_empties_is_remembered_and_the_loops_own_is_left_alone(shell: Any, cell: Cell) -> None:
    cell("""
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    def forward(self, batch, seen):
        target = batch.pop("target")
        seen.append(self.body(batch["inputs"]))
        return {"loss": (seen[-1] - target).square().mean()}
model = Net(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
""")
    ran = cell("""%%memfit
for _ in range(3):
    seen, batch = [], {"inputs": torch.ones(6, 4), "target": torch.zeros(6, 2)}
    model(batch, seen)["loss"].backward(); optimizer.step(); optimizer.zero_grad()
""")
    assert ran.error is None, ran.err
    (prediction,) = shell.run_line_magic("memfit", 'predict --plans ""').predictions
    (measured,) = shell.run_line_magic("memfit", 'compare ""').measurements
    assert measured.peak_allocated_bytes == prediction.peak_allocated_bytes
    assert [sorted(shell.user_ns["batch"]), len(shell.user_ns["seen"])] == [["inputs"], 1]
