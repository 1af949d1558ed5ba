"""`%%memfit --inference` in a real shell."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from memlab.inferring.inference import inference_of
from memlab.runtime.workload import Workload
from memlab.session import session_of, sessions
from memlab.session.snapshot import Snapshot
from tests.helpers.fingerprint import differing, fingerprint
from tests.helpers.snapshots import changed_between
from tests.jupyter.conftest import STEP, Cell

pytest.importorskip("transformers", reason="the cells generate")

MAKE = """
import torch
from tests.inferring.small_models import PROMPT, bert, generate, gpt2, llama, plain, t5
torch.manual_seed(0)
model = gpt2(dropout=0.5)
optimizer = torch.optim.AdamW(model.parameters())
"""


@pytest.fixture
def made(cell: Cell) -> Cell:
    assert cell(MAKE).error is None
    return cell


def test_a_generation_is_measured_and_nothing_else_changes(shell: Any, made: Cell) -> None:
    names = shell.user_ns
    workload = Workload(names["model"], names["optimizer"])
    values, marks = Snapshot(workload), fingerprint(workload.model, workload.optimizers)
    ran = made("%%memfit --inference --budget 1MiB\nfor _ in range(2):\n    output = generate(model)\noutput.shape")
    assert ran.error is None, ran.err
    assert ran.result.result == (2, 22)
    title, head, _, row = ran.out[ran.out.index("inference (generate)") :].splitlines()[:4]
    assert title == "inference (generate) · GPT2LMHeadModel 30.6k · cpu · CPU ledger"
    assert head.split()[:3] == ["plan", "peak", "allocated"]
    assert row.startswith("--inference ")
    assert "generate: 2 calls, the largest of 2 rows × 12 tokens; prefill " in ran.out
    assert "KV cache: 21.0 KiB for 2 rows × 21 tokens, 512 B a token; by its formula 21.0 KiB = 2 × 2 layers" in ran.out
    assert "the model was in train mode: its calls ran in eval mode, without dropout" in ran.out
    assert "batch: up to " in ran.out
    assert changed_between(values, Snapshot(workload)) == []
    assert differing(marks, fingerprint(workload.model, workload.optimizers)) == []
    assert sessions() == ()


def test_precisions_are_rows_of_one_receipt_and_kinds_have_their_own(made: Cell) -> None:
    made("%%memfit --inference\ngenerate(model);")
    ran = made("%%memfit --inference --bf16\ngenerate(model);")
    rows = [line.split("  ")[0] for line in ran.out.splitlines() if line.startswith("--inference")]
    assert rows == ["--inference", "--inference --bf16 ◂ this cell"]
    ran = made("%%memfit --inference\nmodel(PROMPT)\ngenerate(model);")
    assert "inference (forward) · " in ran.out
    assert "inference (generate) · " in ran.out


def test_the_graph_that_was_not_kept_is_told_where_gradients_were_on(made: Cell) -> None:
    assert "graph of the largest one" not in made("%%memfit --inference\nmodel(PROMPT);").out
    made("%config MemLab.predict = True")
    assert "graph of the largest one would have kept " in made("%%memfit --inference\nmodel(PROMPT);").out
    ran = made("%%memfit --inference\nwith torch.no_grad():\n    model(PROMPT)")
    assert "graph of the largest one" not in ran.out


def test_how_many_rows_fit_is_told_where_there_is_a_budget(made: Cell) -> None:
    ran = made("%%memfit --inference --budget 1MiB\ngenerate(model);")
    assert "rows of as many tokens fit into 1.0 MiB (" in ran.out
    assert "batch: " not in made("%%memfit --inference\ngenerate(model);").out


@pytest.mark.parametrize("make", ["gpt2", "llama", "t5"])
def test_a_model_made_in_the_cell_is_found_when_it_is_called(shell: Any, made: Cell, make: str) -> None:
    ran = made(f"%%memfit --inference --bf16\nmade = {make}()\noutput = generate(made)")
    assert ran.error is None, ran.err
    assert "inference (generate) · " in ran.out
    assert {p.dtype for p in shell.user_ns["made"].parameters()} == {torch.float32}


def test_a_model_behind_a_function_or_an_object_is_found(made: Cell) -> None:
    assert "GPT2LMHeadModel" in made("%%memfit --inference\n(lambda: generate(model))()").out
    made(
        "class Pipe:\n    def __init__(self, model): self.model = model\n"
        "    def __call__(self, x): return self.model(x)\npipe = Pipe(bert())"
    )
    assert "BertForSequenceClassification" in made("%%memfit --inference\npipe(PROMPT).logits.shape").out


def test_of_several_models_one_must_be_named(made: Cell) -> None:
    made("teacher = bert()")
    cell = "model(PROMPT); teacher(PROMPT);"
    assert "several models found: model (GPT2LMHeadModel), teacher" in made(f"%%memfit --inference\n{cell}").err
    ran = made(f"%%memfit --inference --model teacher\n{cell}")
    assert "inference (forward) · BertForSequenceClassification" in ran.out
    assert "--model nobody: no variable of that name" in made(f"%%memfit --inference --model nobody\n{cell}").err


def test_a_cell_that_trains_is_told_in_one_line(shell: Any, made: Cell) -> None:
    before = shell.user_ns["model"].lm_head.weight.detach().clone()
    ran = made("%%memfit --inference\nmodel(PROMPT, labels=PROMPT).loss.backward()")
    assert ran.err.startswith("UsageError: backward() under --inference, where the model's calls have no gradients: ")
    assert "Traceback" not in ran.out + ran.err
    ran = made("%%memfit --inference\nmodel(PROMPT)\noptimizer.step()")
    assert ran.err.startswith("UsageError: AdamW steps GPT2LMHeadModel under --inference")
    assert torch.equal(shell.user_ns["model"].lm_head.weight, before)
    assert inference_of(shell.user_ns["model"]) is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--accumulate 4", "--accumulate with --inference"),
        ("--checkpoint", "--checkpoint with --inference"),
        ("--adam8bit", "--optim with --inference"),
        ("--offload optimizer", "--offload with --inference"),
        ("--optimizer optimizer", "--optimizer with --inference: no optimizer runs"),
        ("--keep precision", "--keep with --inference: an inference cell is not rescued"),
        ("--background", "--background with --inference: an inference cell runs in the foreground"),
        ("--budget 1GiB --lossless", "--lossless with --inference"),
    ],
)
def test_flags_that_mean_nothing_are_refused_before_the_cell_runs(
    shell: Any, made: Cell, line: str, reason: str
) -> None:
    ran = made(f"%%memfit --inference {line}\nhas_run = True")
    assert reason in ran.err
    assert "has_run" not in shell.user_ns


def test_memory_that_runs_out_is_told_with_what_would_fit(shell: Any, made: Cell) -> None:
    ran = made("%%memfit --inference --capacity 1MiB\nmodel(PROMPT)\nmodel(PROMPT.repeat(50, 1))")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert "Try next: fewer rows at a time (up to " in ran.out + ran.err
    assert "%%memfit --inference --bf16" in ran.out + ran.err
    assert inference_of(shell.user_ns["model"]) is None
    assert {p.dtype for p in shell.user_ns["model"].parameters()} == {torch.float32}


def test_a_cell_without_a_call_says_so(made: Cell) -> None:
    assert "memfit: no call of the model was seen" in made("%%memfit --inference\nmodel.config;").out
    assert "memfit: no model found" in made("%%memfit --inference\n1 + 1").out


def test_other_errors_are_shown_as_they_are_and_the_model_is_back(shell: Any, made: Cell) -> None:
    ran = made("%%memfit --inference --fp16\nmodel(PROMPT)\n{}['gone']")
    assert isinstance(ran.error, KeyError)
    assert (ran.out + ran.err).count("Traceback (most recent call last)") == 1
    assert {p.dtype for p in shell.user_ns["model"].parameters()} == {torch.float32}


def test_ctrl_c_leaves_a_receipt_and_the_model_as_it_was(shell: Any, made: Cell) -> None:
    ran = made("%%memfit --inference --bf16\nmodel(PROMPT)\nraise KeyboardInterrupt")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert "inference (forward)" in ran.out
    assert inference_of(shell.user_ns["model"]) is None


def test_a_plan_in_force_stays_and_training_goes_on(shell: Any, cell: Cell) -> None:
    cell(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "inputs, target = torch.randn(12, 16), torch.randint(0, 4, (12,))"
    )
    cell(f"%%memfit --accumulate 2\n{STEP}")
    ran = cell("%%memfit --inference --bf16\nmodel(inputs);")
    assert "inference (forward)" in ran.out
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 2"
    ran = cell(f"%%memfit\n{STEP}")
    assert ran.error is None
    assert "1 step" in ran.out
    assert "--inference" not in ran.out


def test_the_receipt_keeps_no_model_alive(shell: Any, made: Cell) -> None:
    made("%%memfit --inference\ngenerate(model);")
    model = weakref.ref(shell.user_ns["model"])
    made("del model, optimizer")
    gc.collect()
    assert model() is None


def test_help_names_the_flags(made: Cell) -> None:
    ran = made("%%memfit -h\n1")
    assert "--inference " in ran.out
