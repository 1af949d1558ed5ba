"""Tab on the lines of the magics: words, flags and values, in IPython with Jedi and without, and asked of a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython", reason="the magics need IPython")

from IPython.core.completer import provisionalcompleter

from memlab.exporting import TARGETS
from memlab.hardware.gpus import gpus
from memlab.jupyter.completion import completions
from memlab.jupyter.flags import CELL_FLAGS, WORDS
from memlab.plan import FIELDS, plan_flags
from tests.jupyter.conftest import Cell


def found(text: str, variables: dict[str, Any] | None = None) -> list[str]:
    return list(completions(text, variables or {})[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%memfit pre", ["predict"]),
        ("%memfit --off", ["--offload"]),
        ("%%memfit --off", ["--offload"]),
        ("    %memfit --ad", ["--adam8bit"]),
        ("found = %memfit fi", ["find"]),
        ("runs[0].plans=%memfit predict --bud", ["--budget"]),
        ("found == %memfit fi", []),
        ("%memfit export tr", ["trainer"]),
        ("%memfit export ", [*TARGETS, "--nproc", *plan_flags()]),
        ("%memfit export torch --sc", ["--scale"]),
        ("%memfit undo ", ["all"]),
        ("%memfit device ", ["--capacity"]),
        ("%memfit device --capacity n", ["none"]),
        ("%memfit predict --device a100", ['"A100 40GB"', '"A100 80GB"']),
        ("%memfit predict --device=T", ["--device=T4"]),
        ("%memfit predict --plans \"--accumulate 4\" \"--che", ["--checkpoint"]),
        ("%memfit compare \"--accumulate 4 --pre", ["--precision"]),
        ("%memfit compare '--precision bf", ["bf16"]),
        ("%memfit switch --optim pag", ["paged-adam8bit"]),
        ("%%memfit --accumulate ", ["1", "2", "4", "8", "16"]),
        ("%%memfit --precision=p", ["--precision=pure-bf16"]),
        ("%%memfit --checkpoint e", ["every:2", "every:"]),
        ("%%memfit --offload optimizer:", ["optimizer:host", "optimizer:disk"]),
        ("%%memfit --offload optimizer,a", ["optimizer,activations"]),
        ("%%memfit --nproc 2 --scale z", ["zero1", "zero2", "zero3"]),
        ("%%memfit --nproc 2 --scale d", ["ddp"]),
        ("%%memfit --keep prec", ["precision"]),
        ("%%memfit --budget 8", ["8GiB", "80GiB"]),
        ("%%memfit --fp16 --fp", []),
        ("%matplotlib in", []),
        ("memory = ", []),
    ],
)  # fmt: skip
def test_what_the_last_word_may_become(text: str, expected: list[str]) -> None:
    assert found(text) == expected


def test_every_word_flag_and_value_of_the_tables_is_reached() -> None:
    assert [word for word in found("%memfit ") if not word.startswith("-")] == [word.word for word in WORDS]
    assert set(found("%%memfit ")) == {*plan_flags(), *(flag.flag for flag in CELL_FLAGS)}
    for spec in FIELDS:
        choices = set(spec.choices) if spec.name != "offload" else {"optimizer", "activations", "params"}
        assert choices <= set(found(f"%%memfit {spec.flag} "))
    assert {each.strip('"') for each in found("%memfit predict --device ")} == {gpu.name for gpu in gpus()}


def test_flags_that_name_a_variable_offer_those_of_its_kind() -> None:
    import torch

    variables = {
        "net": torch.nn.Linear(2, 2), "adam": torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]),
        "inputs": torch.ones(2), "target": torch.ones(2), "criterion": torch.nn.functional.mse_loss, "text": "a",
        "_hidden": torch.ones(1),
    }  # fmt: skip
    assert found("%%memfit --model ", variables) == ["net"]
    assert found("%%memfit --optimizer a", variables) == ["adam"]
    assert found("%memfit find --batch ", variables) == ["inputs", "target"]
    assert found("%memfit find --batch inputs,", variables) == ["inputs,target"]
    assert found("%memfit find --loss-fn c", variables) == ["criterion"]


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run one.json").touch()
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert found("%memfit replay ru") == ["run one.json", "runs/"]
    assert found("%memfit snapshot x") == []


@pytest.mark.parametrize("use_jedi", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%memfit pre", "predict"), ("%%memfit --off", "--offload"), ("%%memfit --offload optimizer:d", "optimizer:disk"),
        ("%memfit predict --device T", "T4"), ("%%memfit --model mo", "model"), ("x = 1\n%memfit rep", "report"),
        ("found = %memfit rep", "report"),
    ],
)  # fmt: skip
def test_ipython_completes_the_lines(shell: Any, made: Cell, text: str, expected: str, use_jedi: bool) -> None:
    shell.Completer.use_jedi = use_jedi
    with provisionalcompleter():
        answers = list(shell.Completer.completions(text, len(text)))
    whole = {text[: each.start] + each.text + text[each.end :] for each in answers}
    line = text.rpartition("\n")[2]
    assert text[: len(text) - len(line.split(" ")[-1])] + expected in whole
    assert len(answers) <= 3


def test_nothing_is_completed_once_memlab_is_unloaded(shell: Any) -> None:
    shell.run_line_magic("unload_ext", "memlab")
    with provisionalcompleter():
        assert "predict" not in [each.text for each in shell.Completer.completions("%memfit pre", 11)]
