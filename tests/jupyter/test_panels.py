"""Opening panels from cells: as widgets, as text, and closed again."""

from __future__ import annotations

import gc
import re
import sys
import textwrap
import weakref
from typing import Any

import pytest

for package in ("ipywidgets", "anywidget"):
    pytest.importorskip(package, reason=f"needs {package}")

import memlab  # noqa: E402
from memlab.errors import SessionError  # noqa: E402
from memlab.jupyter import display  # noqa: E402
from memlab.jupyter import panel as opening  # noqa: E402
from memlab.jupyter.panel import Panel, Panels  # noqa: E402
from memlab.live.control import Control, control_of  # noqa: E402
from memlab.plan import Plan  # noqa: E402
from memlab.runtime.workload import Workload  # noqa: E402
from memlab.session import session_of  # noqa: E402
from tests.helpers.hand import Hand  # noqa: E402
from tests.helpers.stages import Playing  # noqa: E402
from tests.jupyter.conftest import MAKE, STEP, TRAIN, Cell  # noqa: E402
from tests.jupyter.test_refusals import one_line  # noqa: E402


class Rich:
    """A shell with a page behind it, in which a cell runs."""

    kernel: Any = None

    def __init__(self) -> None:
        self.cell = "a"

    def get_parent(self) -> dict[str, Any]:
        return {"metadata": {"cellId": self.cell}}


@pytest.fixture
def rich(monkeypatch: pytest.MonkeyPatch) -> Rich:
    monkeypatch.setattr(opening, "is_rich", lambda shell: isinstance(shell, Rich))
    return Rich()


@pytest.fixture
def control(made: Cell, shell: Any) -> Control:
    names = shell.user_ns
    control = control_of(names["model"])
    control.begin(Workload(names["model"], names["optimizer"]))
    control.loop.stage = Playing()
    return control


def test_in_a_terminal_the_panel_is_text_with_the_magic_for_each_setting(made: Cell, shell: Any) -> None:
    ran = made("%memfit panel")
    assert ran.error is None
    lines = ran.out.splitlines()
    assert lines[0] == "memfit · Sequential 1.73k · AdamW · cpu"
    assert re.split(r"  +", lines[3]) == ["Gradient accumulation", "1", "4", "%memfit --accumulate 4"]
    assert session_of(shell.user_ns["model"]) is not None


MADE_AGAIN = MAKE.replace("torch.nn.Linear(16, 32)", "torch.nn.Linear(16, 8), torch.nn.Linear(8, 32)")
LEFT = "Sequential is in no variable of this notebook any more"


def test_after_its_model_was_made_again_a_panel_is_on_the_new_one(made: Cell, shell: Any) -> None:
    """The old one lives on with its plan, under the same name: it was clicked in vain."""
    made(f"%%memfit --accumulate 2\n{TRAIN}")
    old = shell.user_ns["model"]
    made(MADE_AGAIN)
    ran = made("%memfit --accumulate 4")
    assert f"--accumulate 2 → --accumulate 4 on Sequential\nmemfit: {LEFT}: %memfit undo removes the plan" in ran.out
    assert f"memfit: {LEFT}: %memfit undo removes the plan" in made("%memfit predict --accumulate 2").out
    ran = made("%memfit panel")
    assert ran.out.splitlines()[0] == "memfit · Sequential 1.61k · AdamW · cpu"
    assert session_of(shell.user_ns["model"]) is not None
    assert session_of(old).plan == Plan.parse("--accumulate 4")
    made("nets = [model]\ndel model")  # which is held as well as by a name
    assert LEFT not in made("%memfit --checkpoint").out
    assert LEFT not in made("%memfit undo").out


def test_an_open_panel_says_that_its_model_was_made_again(
    made: Cell, shell: Any, rich: Rich, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(f"%%memfit --accumulate 2\n{TRAIN}")
    model = shell.user_ns["model"]  # as its plan may keep it, for a while
    old = control_of(model)
    monkeypatch.setattr(opening.panels(), "_open", {"a": Panel(old)})
    made(f"%%memfit\n{TRAIN}")
    assert LEFT not in old.moment().status
    made(f"%%memfit\n{MADE_AGAIN}\n{TRAIN}")
    assert old.moment().status.endswith(f"· {LEFT}: run %memfit panel again")
    made(f"%%memfit\n{TRAIN}\nseen = control.moment().status")


def test_a_budget_and_a_batch_can_be_given(made: Cell, shell: Any) -> None:
    made("loss_fn = torch.nn.functional.cross_entropy")
    assert made("%memfit panel --budget 1MiB --batch inputs,target --loss-fn loss_fn").error is None
    control = control_of(shell.user_ns["model"])
    assert control.moment().budget_bytes == 2**20
    assert control.model.batch is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--accumulate 4", "%memfit panel --accumulate 4: unknown; see %memfit help"),
        ("wide", "%memfit panel wide: unknown; see %memfit help"),
        ("--budget much", "size 'much': expected a number above zero and its unit"),
        ("--batch nothing", "--batch nothing: no variable of that name"),
        ("--model nothing", "nothing"),
        ("--model ''", "--model needs a value: --model NAME[,NAME…]"),
        (
            "--batch inputs,target --loss-fn torch",
            "--loss-fn torch: a module cannot be called; name what is called with output and target",
        ),
    ],
)
def test_what_is_refused_is_one_line(made: Cell, line: str, said: str) -> None:
    assert said in one_line(made(f"%memfit panel {line}"))


def test_without_a_model_it_says_so(cell: Cell) -> None:
    assert one_line(cell("%memfit panel")) == (
        "%memfit panel needs a model: no variable of this notebook is a trainable torch.nn.Module; make it first"
    )


def test_what_cells_have_measured_is_there_at_once(made: Cell, shell: Any) -> None:
    made(f"%%memfit\n{TRAIN}")
    made(f"%%memfit --accumulate 4\n{TRAIN}")
    made("%memfit panel")
    moment = control_of(shell.user_ns["model"]).moment()
    assert [each.plan for each in moment.measurements] == ["as written", "--accumulate 4"]
    assert moment.plan == Plan.parse("--accumulate 4")
    assert moment.step == 8


def test_from_python_a_panel_needs_a_notebook(made: Cell, shell: Any) -> None:
    workload = Workload(shell.user_ns["model"], shell.user_ns["optimizer"])
    with pytest.raises(SessionError, match=r"a panel needs a notebook; in a script, use memlab.fit"):
        memlab.panel(workload)


def test_run_again_a_cell_closes_its_panel_and_another_cell_does_not(rich: Rich, control: Control) -> None:
    panels = Panels()
    first = panels.open(rich, control)
    rich.cell = "b"
    second = panels.open(rich, control)
    rich.cell = "a"
    third = panels.open(rich, control)
    assert isinstance(first, Panel)
    assert isinstance(second, Panel)
    assert isinstance(third, Panel)
    assert [panel._is_closed for panel in (first, second, third)] == [True, False, False]
    panels.close()
    assert not panels.any_open()
    assert not control.views.any_open


def test_without_widgets_the_panel_is_a_table_that_follows_the_run(
    rich: Rich, control: Control, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    for name in ("show", "replace_shown"):
        monkeypatch.setattr(display, name, lambda data, **_options: shown.append(data["text/plain"]))
    monkeypatch.setitem(sys.modules, "anywidget", None)
    panels = Panels()
    assert panels.open(rich, control) is None
    assert not panels.any_open()
    assert capsys.readouterr().out == (
        "memfit: a table without controls, because the panel needs anywidget, which is not installed: pip install "
        "'memlab[lab]' (or pip install anywidget)\n"
    )
    assert "%memfit --checkpoint" in shown[-1]
    control.ask("accumulation", "4")
    assert len(shown) == 2
    assert "%memfit --accumulate 4 --checkpoint" in shown[-1]
    panels.close()
    control.ask("accumulation", "2")
    assert len(shown) == 2


def test_a_cancelled_cell_ends_in_one_line_and_keeps_nothing_alive(made: Cell, shell: Any) -> None:
    gone = weakref.ref(shell.user_ns["model"])
    loop = f"""
from memlab.live.control import control_of
for number in range(9):
    if number == 2:
        control_of(model).cancel()
{textwrap.indent(STEP, "    ")}
"""
    ran = made(f"%%memfit\n{loop}")
    assert ran.err == "UsageError: cancelled from the panel after step 2\n"
    assert "2 steps" in ran.out
    assert made("print(len(optimizer.state))").out == "6\n"
    assert made("del model, optimizer, loss").error is None
    made("1")  # a later cell: what IPython keeps of the last error is past
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("flags", ["", "--checkpoint", "--offload optimizer", "--precision pure-bf16"])
def test_after_an_undo_a_model_goes_with_its_name(made: Cell, shell: Any, flags: str) -> None:
    """Weights and moments likewise, and not when Python comes to collect garbage."""
    assert made(f"%%memfit {flags}\n{STEP}").error is None
    model, optimizer = (shell.user_ns[name] for name in ("model", "optimizer"))
    gone = [weakref.ref(each) for each in (model, next(model.parameters()), optimizer)]
    del model, optimizer
    made("%memfit undo all")
    gc.collect()
    gc.disable()
    try:
        assert made("del model, optimizer, loss").error is None
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()


def test_a_run_between_two_cells_that_free_gradients_is_measured_like_their_steps(made: Cell, shell: Any) -> None:
    # the last step's gradients are dropped at the top: by the run, and by the cell after it
    loop = "for _ in range(3):\n" + textwrap.indent(
        "optimizer.zero_grad()\nloss_fn(model(inputs), target).backward()\noptimizer.step()\n", "    "
    )
    made("loss_fn = torch.nn.functional.cross_entropy")
    assert made(f"%%memfit --release-grads\n{loop}").error is None
    made("%memfit panel --batch inputs,target --loss-fn loss_fn")
    control = control_of(shell.user_ns["model"])
    stage = control.loop.stage = Playing()
    before = {name: value.clone() for name, value in shell.user_ns["model"].state_dict().items()}
    control.run(keep=False)
    for _ in range(3):
        assert stage.played[-1].advance()
    control.cancel()
    assert not control.moment().errors
    assert control.moment().step == 6
    assert all(bool((value == before[name]).all()) for name, value in shell.user_ns["model"].state_dict().items())
    assert made(f"%%memfit\n{loop}").error is None
    assert made("print(model[0].weight.grad is None)").error is None


def test_a_run_makes_the_recorded_step_where_the_loop_computes_the_loss(made: Cell, shell: Any) -> None:
    made(f"%%memfit\n{TRAIN}")
    made("%memfit panel")
    control = control_of(shell.user_ns["model"])
    stage = control.loop.stage = Playing()
    panel = Panel(control)
    hand = Hand(panel)
    assert "run" not in hand.shown["off"]
    assert hand.shown["off"]["keep"] == (
        "the loop computes the loss itself: name a loss function, as in %memfit panel --batch inputs,target --loss-fn NAME"
    )
    assert hand.shown["off"]["find"] == "set a budget first"
    before = {name: value.clone() for name, value in shell.user_ns["model"].state_dict().items()}
    hand.press("run")
    for _ in range(2):
        assert stage.played[-1].advance()
    assert any(bool((value != before[name]).any()) for name, value in shell.user_ns["model"].state_dict().items())
    hand.press("cancel")
    assert not hand.shown["errors"]
    assert all(bool((value == before[name]).all()) for name, value in shell.user_ns["model"].state_dict().items())
    named = "%memfit panel --batch inputs,target --loss-fn torch.nn.functional.cross_entropy"
    assert made(named).error is None
    made(f"%%memfit\n{TRAIN}")  # what the loop calls the model with goes with no loss function
    control.views.draw()
    assert "keep" not in hand.shown["off"]
    hand.press("run")
    assert stage.played[-1].advance()
    hand.press("cancel")
    assert not hand.shown["errors"]
    panel.close()


def test_inputs_and_target_of_a_session_stay_together(made: Cell) -> None:
    made("import memlab, torch.nn.functional as F")
    made("session = memlab.fit(memlab.Workload(model, optimizer, (inputs, target), F.cross_entropy))")
    made(f"%%memfit\n{TRAIN}")
    for line in ("%memfit panel", "%memfit predict --checkpoint", '%memfit compare "--accumulate 2"'):
        assert made(line).error is None, line


def test_a_run_of_the_panel_leaves_its_receipt(made: Cell, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made("loss_fn = torch.nn.functional.cross_entropy")
    made("%memfit panel --batch inputs,target --loss-fn loss_fn")
    control = control_of(shell.user_ns["model"])
    made("other = torch.nn.Linear(16, 4)\nothers = torch.optim.SGD(other.parameters(), lr=0.1)")
    loop = TRAIN.replace("model(", "other(").replace("optimizer.", "others.")
    assert (
        made(f"%%memfit --model other --optimizer others\n{loop}").error is None
    )  # the last cell trains another model
    made("c = %memfit report")
    expected = shell.user_ns["c"].measurements
    stage = control.loop.stage = Playing()
    control.run(keep=False)
    for _ in range(3):
        assert stage.played[-1].advance()
    control.cancel()
    assert made("c = %memfit report").error is None
    assert shell.user_ns["c"].measurements == expected
    made("%memfit panel --model model --batch inputs,target --loss-fn loss_fn")
    assert made("c = %memfit report").error is None
    (row,) = shell.user_ns["c"].measurements
    assert row.plan == "as written"
    assert row.peak_allocated_bytes > expected[0].peak_allocated_bytes
