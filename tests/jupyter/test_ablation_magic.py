"""`%memfit ablation` in a real shell, on real small models."""

from __future__ import annotations

from typing import Any

import pytest

from memlab import Workload
from memlab.records.ablation import Ablation
from memlab.session import session_of, sessions
from memlab.session.snapshot import Snapshot
from tests.helpers.ctrl_c import pythons_own_handler  # noqa: F401 - a fixture
from tests.helpers.snapshots import changed_between
from tests.jupyter.conftest import MAKE, Cell
from tests.jupyter.test_refusals import one_line

MAKE_GPT2 = """
from tests.techniques.models import gpt2, ragged_batch
import torch
model = gpt2(width=32)
optimizer = torch.optim.AdamW(model.parameters())
batch = ragged_batch(rows=4)
"""

TRAIN_GPT2 = """
for _ in range(2):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_ablation_of_a_language_model(shell: Any, cell: Cell) -> None:
    cell(MAKE_GPT2)
    assert cell(f"%%memfit --checkpoint\n{TRAIN_GPT2}").error is None
    workload = Workload(shell.user_ns["model"], shell.user_ns["optimizer"])
    before = Snapshot(workload)
    ran = cell('l = %memfit ablation --steps 1 --plans "--chunk-loss" "--accumulate 2"')
    assert ran.error is None, ran.err
    found = shell.user_ns["l"]
    assert isinstance(found, Ablation)
    assert [row.label for row in found.rows] == ["as written", "+ --chunk-loss", "+ --accumulate 2"]
    assert changed_between(before, Snapshot(workload)) == []
    assert str(session_of(workload.model).plan) == "--checkpoint"
    assert ran.out == f"memfit: to apply it: %memfit {found.plan}\n"
    assert cell(f"%memfit {found.plan}").error is None


def test_it_shows_as_text_html_and_picture(shell: Any, cell: Cell) -> None:
    cell(MAKE_GPT2)
    shown = cell("%memfit ablation --batch batch --steps 1 --budget 1TiB").out
    assert "memfit ablation · GPT2LMHeadModel" in shown
    assert "fits 1024.00 GiB" in shown
    assert "Ablation(" not in shown
    cell("l = %memfit ablation --batch batch --steps 1 --budget 1TiB")
    shell.display_formatter.active_types = shell.display_formatter.format_types
    data, _ = shell.display_formatter.format(shell.user_ns["l"])
    assert set(data) == {"text/plain", "text/html", "image/png"}
    assert sessions() == ()


def test_capacity_budget_and_what_does_not_apply(shell: Any, cell: Cell) -> None:
    cell(f"{MAKE}\nloss_fn = torch.nn.functional.cross_entropy")
    cell("%memfit device --capacity 30KiB")
    ran = cell("l = %memfit ablation --batch inputs,target --loss-fn loss_fn --steps 1 --lossless --budget 1KiB")
    assert ran.error is None, ran.err
    found = shell.user_ns["l"]
    assert found.rows[0].ran_out
    assert "--chunk-loss" in {row.technique for row in found.rows if row.refused}
    assert not {"--bf16", "--adam8bit"} & {row.technique for row in found.rows}
    assert found.events[0].startswith("no row fits 1.0 KiB: ")


@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_gives_the_rows_so_far(shell: Any, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    from memlab.search import ablating
    from tests.helpers.ctrl_c import interrupt

    honest, calls = ablating.run_trial, []

    def pressed(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            interrupt()
        return honest(*args)

    monkeypatch.setattr(ablating, "run_trial", pressed)
    cell(MAKE_GPT2)
    workload = Workload(shell.user_ns["model"], shell.user_ns["optimizer"])
    before = Snapshot(workload)
    assert cell("l = %memfit ablation --batch batch --steps 1").error is None
    assert changed_between(before, Snapshot(workload)) == []
    assert [row.label for row in shell.user_ns["l"].rows] == ["as written", "+ --chunk-loss"]
    assert shell.user_ns["l"].events[0].startswith("interrupted; not tried: --accumulate 4, ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ablation --batch inputs everything", "%memfit ablation everything: unknown; see %memfit help"),
        ("ablation --steps 0 --batch inputs", "--steps 0: expected a whole number of steps, 1 or more, as in '--steps 3'"),
        ("ablation --plans", '--plans needs plans, each in quotes, as in --plans "--accumulate 4" "--checkpoint"'),
        ("ablation", "%memfit ablation needs a batch: run one training cell with %%memfit first (again after %memfit undo), or pass --batch NAME "
                   "(a variable of this notebook)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(made: Cell, line: str, said: str) -> None:
    assert one_line(made(f"%memfit {line}")) == said
