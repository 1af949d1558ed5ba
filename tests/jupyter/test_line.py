"""`%memfit`: state, undo, report, device, export, switch, compare, record, replay."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memlab.jupyter import live
from memlab.jupyter.flags import CELL_FLAGS, PREDICT_FLAGS, WORDS, cell_help, line_help
from memlab.jupyter.live import NotebookLine, Progress, TerminalLine
from memlab.live import views
from memlab.live.control import control_of
from memlab.live.views import Views
from memlab.plan import FIELDS, Plan, plan_flags
from memlab.records.comparison import Comparison
from memlab.records.live_state import Activity, LivePoint, Moment
from memlab.runtime.workload import Workload
from memlab.session import session_of, sessions
from memlab.session.snapshot import Snapshot
from tests.helpers.snapshots import changed_between
from tests.jupyter.conftest import MAKE, STEP, TRAIN, Cell
from tests.jupyter.test_refusals import one_line

# the model returns its loss, as those of Transformers do: only then can memlab run a step by itself
MAKE_WITH_LOSS = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    def forward(self, x, y):
        return {"loss": torch.nn.functional.cross_entropy(self.body(x), y)}
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(12, 16), torch.randint(0, 4, (12,))
"""

TRAIN_WITH_LOSS = """
for _ in range(4):
    model(x, y)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_nothing_in_force(cell: Cell) -> None:
    assert cell("%memfit").out == (
        "memfit: no plan is in force; put %%memfit on the cell that trains (%%memfit? explains)\n"
    )


def test_state(made: Cell) -> None:
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    lines = made("%memfit").out.splitlines()
    assert lines[0] == "memfit · Sequential 1.73k · AdamW · cpu"
    assert lines[1:3] == ["plan in force   --accumulate 4", "steps           4"]
    assert lines[3].startswith("peak allocated  ")
    assert lines[3].endswith("KiB on CPU ledger")
    assert lines[4] == "log             step 1: as written → --accumulate 4"


def test_undo(shell: Any, made: Cell) -> None:
    made(f"%%memfit --adam8bit\n{TRAIN}")
    control = control_of(shell.user_ns["model"])
    control.ask("checkpointing", "full")  # refused: no blocks
    assert {each.field for each in control.moment().toggles if each.text} == {"checkpointing"}
    assert made("%memfit undo").out == "memfit: Sequential is as it was\n"
    assert not any(each.text for each in control.moment().toggles)
    assert sessions() == ()
    for again in ("undo", "undo all"):
        assert made(f"%memfit {again}").out == "memfit: nothing to undo\n"
    states = shell.user_ns["optimizer"].state.values()
    assert all(state["exp_avg"].dtype is torch.float32 for state in states)


def test_undo_all(made: Cell) -> None:
    made(f"%%memfit\n{TRAIN}")
    made(f"first = model\n{MAKE_WITH_LOSS}")
    made(f"%%memfit --accumulate 2 --model model\n{TRAIN_WITH_LOSS}")
    assert len(sessions()) == 2
    assert made("%memfit undo all").out == "memfit: Net is as it was\nmemfit: Sequential is as it was\n"


@pytest.mark.parametrize("line", ["--accumulate 2", "switch --accumulate 2"])
def test_switch(shell: Any, made: Cell, line: str) -> None:
    made(f"%%memfit\n{TRAIN}")
    assert made(f"%memfit {line}").out == "memfit: as written → --accumulate 2 on Sequential\n"
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 2"


def test_report_returns_the_comparison(shell: Any, made: Cell) -> None:
    made(f"%%memfit\n{TRAIN}")
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    made("c = %memfit report")
    assert isinstance(shell.user_ns["c"], Comparison)
    assert [m.plan for m in shell.user_ns["c"].measurements] == ["as written", "--accumulate 4"]
    shown = made("%memfit report").out
    assert "peak allocated" in shown
    assert "Comparison(" not in shown


def test_a_receipt_has_three_static_formats(shell: Any, made: Cell) -> None:
    made(f"%%memfit\n{TRAIN}\n")
    shell.display_formatter.active_types = shell.display_formatter.format_types
    made("c = %memfit report")
    # one row has nothing to compare in a picture
    assert set(shell.display_formatter.format(shell.user_ns["c"])[0]) == {"text/plain", "text/html"}
    made(f"%%memfit --accumulate 4\n{TRAIN}\n")
    made("c = %memfit report")
    data, metadata = shell.display_formatter.format(shell.user_ns["c"])
    assert set(data) == {"text/plain", "text/html", "image/png"}
    assert metadata["image/png"]["alt"].startswith("2 settings measured: as written peaks at ")
    assert data["text/html"].startswith('<div class="memlab-receipt"')
    made("%config MemLab.picture = False")
    assert "image/png" not in shell.display_formatter.format(shell.user_ns["c"])[0]


def test_report_without_measurements(made: Cell) -> None:
    assert one_line(made("%memfit report")) == (
        "nothing is measured yet: put %%memfit on the cell that trains, and run it"
    )


def test_device(made: Cell) -> None:
    assert made("%memfit device").out == "memfit: memory is counted on CPU ledger, with the memory it has\n"
    for size in ("4 GiB", "4GiB"):
        shown = made(f"%memfit device --capacity {size}").out
        assert shown == "memfit: memory is counted on CPU ledger (capacity 4.00 GiB)\n"
    assert made("%config MemLab.capacity").result.result == "4GiB"
    assert "capacity        4GiB" in (made(f"%%memfit\n{TRAIN}"), made("%memfit"))[1].out
    assert (
        made("%memfit device --capacity=none").out
        == "memfit: memory is counted on CPU ledger, with the memory it has\n"
    )


def test_export(made: Cell) -> None:
    assert made("%memfit export trainer --accumulate 4").out.startswith(
        "# memlab plan: --accumulate 4\nfrom transformers"
    )
    made(f"%%memfit --accumulate 2\n{TRAIN}")
    assert "num_processes: 3\n" in made("%memfit export accelerate --scale zero3 --nproc=3").out
    assert "--nproc-per-node 2 " in made("%memfit export fsdp2 --scale fsdp2 --checkpoint").out
    assert made("%memfit export").out.startswith("# memlab plan: --accumulate 2\nimport torch")
    for flags in ('--checkpoint "budget:2 GiB" --bf16', '"--checkpoint budget:2GiB --bf16"'):
        assert made(f"%memfit export torch {flags}").out.startswith("# memlab plan: --checkpoint budget:2GiB --bf16\n")
    assert "--nproc-per-node 4 " in made('%memfit export torch "--scale ddp --nproc 4"').out


def test_compare_leaves_everything_as_it_was(shell: Any, cell: Cell) -> None:
    cell(MAKE_WITH_LOSS)
    cell(f"%%memfit --accumulate 4\n{TRAIN_WITH_LOSS}")
    workload = Workload(shell.user_ns["model"], shell.user_ns["optimizer"])
    before = Snapshot(workload)
    ran = cell('c = %memfit compare "--accumulate 2" "--accumulate 3 --bf16"')
    assert ran.error is None, ran.err
    assert [m.plan for m in shell.user_ns["c"].measurements] == [
        "as written",
        "--accumulate 2",
        "--accumulate 3 --bf16",
    ]
    assert shell.user_ns["c"].rows[1].loss_drift < 1e-5
    assert changed_between(before, Snapshot(workload)) == []
    assert session_of(shell.user_ns["model"]).plan.label == "--accumulate 4"


def test_compare_of_a_model_whose_loss_nobody_knows_says_what_to_do(made: Cell) -> None:
    made(f"%%memfit\n{STEP}")  # a single step, which is not recorded
    assert one_line(made('%memfit compare "--accumulate 2"')) == (
        "Sequential returned no loss: pass loss_fn=…, run a %%memfit cell of two steps or more, of which one is recorded, or put the labels into the batch"
    )


def test_record_and_replay(shell: Any, made: Cell, tmp_path: Path) -> None:
    made(f"%%memfit\n{TRAIN}")
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    file = tmp_path / "run one.json"
    assert made(f"%memfit record '{file}'").out == (
        f"memfit: saved to {file}; %memfit replay shows it again, on a machine without a GPU as well\n"
    )
    made(f"c = %memfit replay '{file}'")
    made("r = %memfit report")
    assert shell.user_ns["c"] == shell.user_ns["r"]
    assert one_line(made(f"%memfit replay {tmp_path}/none.json")).endswith("none.json: No such file or directory")
    file.write_text("{}")
    assert one_line(made(f"%memfit replay '{file}'")).startswith(f"{file}: not a run record of memlab")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "undoo",
            "%memfit undoo: unknown; did you mean %memfit undo?; allowed are panel, predict, find, ablation, report, compare, worst, switch, wait, cancel, undo, "
            "export, device, snapshot, record, replay, bug, help, or the flags of a plan",
        ),
        ("undo everything", "%memfit undo everything: unknown; see %memfit help"),
        ("switch", "%memfit switch needs the flags of a plan, as in %memfit switch --accumulate 4"),
        ("switch --accumulate 4", "no plan is in force; put %%memfit on the cell that trains (%%memfit? explains)"),
        ("export jax --fp16", "export to 'jax': allowed are torch, trainer, accelerate, deepspeed, fsdp2"),
        ("export fsdp2 --scale zero3", "--scale zero3 to 'fsdp2': allowed are trainer, accelerate, deepspeed"),
        (
            "export fsdp2 --scale fsdp2 --nproc x",
            "--nproc x: expected a whole number of processes, 1 or more, as in '--nproc 2'",
        ),
        ("device 4GiB", "%memfit device 4GiB: expected --capacity SIZE, as in --capacity 4GiB, or --capacity none"),
        ("device --capacity 4", "size '4': expected a number above zero and its unit, as in '8GiB', '512MiB' or '24GB'"),
        ("record", "%memfit record needs one file name, as in %memfit record run.json"),
        ("compare", '%memfit compare: name the plans, each in quotes, as in %memfit compare "--accumulate 4" "--checkpoint"'),
        ('compare "--fp16"', "no plan is in force; put %%memfit on the cell that trains (%%memfit? explains)"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(cell: Cell, line: str, said: str) -> None:
    assert one_line(cell(f"%memfit {line}")) == said


def test_flags_within_a_cell_are_for_its_model(shell: Any, made: Cell) -> None:
    made(f"%%memfit\n{TRAIN}\nother, its_optimizer = model, optimizer")
    made(MAKE)
    ran = made(f"%%memfit\n{TRAIN}%memfit --accumulate 2\n%memfit --accumulate 2\n{TRAIN}")
    assert (
        "memfit: as written → --accumulate 2 on Sequential\nmemfit: --accumulate 2 is in force on Sequential\n"
        in ran.out
    )
    assert session_of(shell.user_ns["model"]).plan == Plan.parse("--accumulate 2")
    assert session_of(shell.user_ns["other"]).plan == Plan()


def test_after_an_undo_within_a_cell_the_cell_is_measured_to_its_end(shell: Any, made: Cell) -> None:
    ran = made(f"%%memfit --accumulate 2\n{TRAIN}%memfit undo\n{TRAIN}%memfit --checkpoint\n{TRAIN}")
    assert "memfit: Sequential is as written from here on\n" in ran.out
    assert " · 12 steps" in ran.out
    assert [row.measurement.plan for row in shell.run_line_magic("memfit", "report").rows] == [
        "as written",
        "--accumulate 2",
        "--checkpoint",
    ]
    assert "no optimizer yet" not in ran.out
    assert made("%memfit undo").out == "memfit: Sequential is as it was\n"


def test_flags_before_a_cell_has_made_its_model(cell: Cell) -> None:
    said = "this cell has not trained a model yet, so no plan is in force; put the flags on its %%memfit line"
    assert one_line(cell(f"%%memfit\n%memfit --accumulate 2\n{MAKE}{TRAIN}")) == said


def test_help_is_generated_from_the_flags(shell: Any, cell: Cell) -> None:
    assert cell("%memfit help").out == cell("%memfit -h").out == f"{line_help()}\n"
    assert all(flag in cell_help() for flag in plan_flags())
    assert all(field.help in " ".join(cell_help().split()) for field in FIELDS)
    # a cell beside a side bar on a page of 1000 px has as many
    assert max(len(line) for line in (*cell_help().splitlines(), *line_help().splitlines())) <= 71
    assert all(flag.flag in cell_help() for flag in CELL_FLAGS)
    assert all(word.word in line_help() for word in WORDS)
    assert all(flag.flag in line_help() for flags in PREDICT_FLAGS.values() for flag in flags)
    assert shell.find_cell_magic("memfit").__doc__ == cell_help()
    assert shell.find_line_magic("memfit").__doc__ == line_help()


def test_the_question_mark_explains(shell: Any) -> None:
    assert shell.inspector.info(shell.find_cell_magic("memfit"))["docstring"].startswith("%%memfit [flags]")
    assert "Examples:" in shell.object_inspect("%%memfit")["docstring"]


class _Line:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.pages: list[str] = []

    def write(self, text: str, html: str = "") -> None:
        self.texts.append(text)
        self.pages.append(html)

    def clear(self) -> None:
        self.texts.append("")


def test_progress_begins_after_two_seconds_with_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(views, "monotonic", lambda: now)
    line = _Line()
    progress = Progress(line)
    point = LivePoint(20, "--accumulate 4", 0.1, 80.0, 2**20, {"parameters": 2**19})
    moment = Moment("gpt2", Activity.TRAINING, 20, Plan.parse("--accumulate 4"), None, (), (point,))
    shown = Views(lambda: replace(moment, frame=shown.frame))
    shown.watch(progress.draw, Progress.AFTER_SECONDS)
    for frame in range(1, 41):
        now = 100.0 + frame / 10
        shown.draw()
        shown.draw(figures=False)  # settings changed, no new figures
    assert len(line.texts) == 21
    assert line.texts[0] == (
        "memfit · --accumulate 4 · step 20 · 100.0 ms a step · 80.0 samples/s · peak allocated 1.0 MiB"
    )
    assert "<svg" in line.pages[0]
    progress.end()
    assert line.texts[-1] == ""


def test_beside_a_panel_progress_is_a_line() -> None:
    line = _Line()
    progress = Progress(line, lambda: True)
    point = LivePoint(1, "as written", 0.1, 80.0, 2**20, {})
    progress.draw(Moment("gpt2", Activity.TRAINING, 1, Plan(), None, (), (point,), frame=1))
    assert line.pages == [""]


def test_a_line_is_updated_in_place_and_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, str], str]] = []
    monkeypatch.setattr(live, "show", lambda data, raw, display_id: calls.append(("new", data, display_id)))
    monkeypatch.setattr(live, "replace_shown", lambda data, raw, display_id: calls.append(("update", data, display_id)))
    line = NotebookLine()
    line.clear()
    assert calls == []
    line.write("a < b")
    line.write("c")
    line.clear()
    assert [kind for kind, _, _ in calls] == ["new", "update", "update"]
    assert len({display_id for _, _, display_id in calls}) == 1
    assert "a &lt; b" in calls[0][1]["text/html"]
    assert "this page was loaded again" in calls[0][1]["text/html"]
    assert calls[-1][1] == {"text/plain": "", "text/html": ""}


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, "\r\x1b[Kone\r\x1b[K"), (False, "")])
def test_a_terminal_gets_one_line_and_a_file_none(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, expected: str
) -> None:
    out = io.StringIO()
    out.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", out)
    line = TerminalLine()
    line.write("one")
    line.clear()
    assert out.getvalue() == expected
