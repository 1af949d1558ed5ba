"""Asking a live run for settings, from any thread, and what becomes of that."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import memlab
from memlab.jupyter.panel import Panel
from memlab.live.control import Control, control_of
from memlab.live.effects import effect_of
from memlab.live.source import Can
from memlab.live.stage import Cancelled
from memlab.measuring.device import device_for
from memlab.measuring.runs import measure
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.records import prediction_of
from memlab.records.live_state import Activity, Asked, Moment
from memlab.runtime.batch import Batch
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload
from memlab.session import Session, fit, sessions, train_together
from memlab.session.snapshot import Snapshot
from memlab.session.switching import Switching
from memlab.techniques.checkpointing.checkpointing import ActivationCheckpointing
from tests.helpers.hand import Hand
from tests.helpers.snapshots import changed_between
from tests.helpers.stages import Later, Playing

HOME = Path(memlab.__file__).parent


class Blocks(nn.Module):
    """Three blocks of one class, so that checkpointing applies, and dropout, so that random state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


@pytest.fixture
def workload() -> Workload:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, optimizer, (torch.randn(8, 16), torch.randn(8, 1)), mse_loss)


@pytest.fixture
def control(workload: Workload) -> Iterator[Control]:
    made = Control(workload.model, Playing())
    made.begin(workload)
    yield made
    assert made.model.session is None or made.model.session.undo() is None


def step(workload: Workload) -> float:
    inputs, target = workload.batch
    loss = mse_loss(workload.model(inputs), target)
    loss.backward()
    for optimizer in workload.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def toggle(moment: Moment, field: str) -> Any:
    return next(each for each in moment.toggles if each.field == field)


def session_of_control(control: Control) -> Session:
    assert control.model.session is not None
    return control.model.session


class Cell:
    """A training cell: a meter and the control, as a `%%memfit` cell has them."""

    def __init__(self, control: Control, workload: Workload, capacity_bytes: int | None = None) -> None:
        self.control, self.workload, self.session = control, workload, session_of_control(control)
        self.device = device_for(workload.device, capacity_bytes)
        self.meter = Meter(workload.model, workload.optimizers, self.device)

    def __enter__(self) -> Self:
        self.session.observers.add(self.meter)
        self.meter.plan_changed(self.session.plan)
        self.control.training_begins(self.session, self.meter)
        return self

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(step(self.workload))
            self.control.steps.stepped()
        return losses

    def __exit__(self, *_exc: object) -> None:
        self.control.steps.end()
        self.session.observers.remove(self.meter)
        self.meter.close()
        self.device.close()


def test_a_toggle_passes_twelve_files_at_most(
    control: Control, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which one calls the next, from the click until it is noted, and from the boundary of a step to the technique."""
    seen: set[str] = set()

    def spied(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.update(frame.filename for frame in traceback.extract_stack() if frame.filename.startswith(str(HOME)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)

    spied(Switching, "ask")
    spied(ActivationCheckpointing, "attach_model")
    panel = Panel(control)
    with Cell(control, workload) as cell:
        cell.train(1)
        asking = threading.Thread(target=lambda: Hand(panel).flip("checkpointing"))
        asking.start()
        asking.join()
        cell.train(1)
    panel.close()
    assert control.moment().plan == Plan.parse("--checkpoint")
    files = sorted(str(Path(each).relative_to(HOME)) for each in seen)
    assert {"jupyter/panel.py", "session/in_force.py"} <= {*files}
    assert len(files) <= 12, files


def test_a_setting_is_applied_where_nothing_runs(control: Control, workload: Workload) -> None:
    control.ask("accumulation", "4")
    assert session_of_control(control).plan == Plan.parse("--accumulate 4")
    assert toggle(control.moment(), "accumulation").text == "applied at step 1"


def test_a_setting_waits_for_the_step_boundary_while_a_cell_trains(control: Control, workload: Workload) -> None:
    control.loop.stage = Later()
    with Cell(control, workload) as cell:
        cell.train(2)
        asking = threading.Thread(target=control.ask, args=("checkpointing", "full"))
        asking.start()
        asking.join()
        assert toggle(control.moment(), "checkpointing").asked is Asked.PENDING
        assert toggle(control.moment(), "checkpointing").wanted == "full"
        assert cell.session.plan == Plan()
        cell.train(1)
        assert cell.session.plan == Plan.parse("--checkpoint")
        assert toggle(control.moment(), "checkpointing").text == "applied at step 3"
    moment = control.moment()
    assert [change.step for change in moment.changes] == [3]
    assert [each.plan for each in moment.measurements] == ["as written", "--checkpoint"]
    assert [point.step for point in moment.points] == [1, 2, 3]
    assert moment.points[2].live_bytes
    assert control.can() == Can.SWITCH | Can.RUN | Can.PREDICT | Can.FIND | Can.UNDO


def test_a_setting_asked_for_before_the_cell_calls_the_model_is_applied_in_that_cell(workload: Workload) -> None:
    control = Control(workload.model, Later())
    control.ask("checkpointing", "full")  # no session yet
    with fit(workload, "--accumulate 2") as session:
        control.follow(session)
        with Cell(control, workload) as cell:
            assert toggle(control.moment(), "checkpointing").asked is Asked.PENDING
            cell.train(2)
        assert session.plan == Plan.parse("--accumulate 2 --checkpoint")
        assert toggle(control.moment(), "checkpointing").text == "applied at step 1"


def test_a_click_is_applied_though_what_was_asked_for_before_it_fails(workload: Workload) -> None:
    """A prediction that waits for the main thread fails there (there is no batch), and the click after it is not lost."""
    control = Control(workload.model, stage := Later())
    control.predict()
    control.ask("checkpointing", "full")
    stage.idle()
    moment = control.moment()
    assert moment.errors == (
        "WorkloadError: no batch is known yet: run the cell that trains with %%memfit first, or name one, as in "
        "%memfit panel --batch NAME",
    )
    assert toggle(moment, "checkpointing").text == "applied at step 1"
    assert (moment.plan, moment.pending) == (Plan.parse("--checkpoint"), None)
    session_of_control(control).undo()


def test_a_click_on_a_model_that_cannot_be_taken_over_is_refused() -> None:
    model = nn.LazyLinear(2)
    control = Control(model, stage := Later())
    control.ask("accumulation", "4")
    stage.idle()
    moment = control.moment()
    assert toggle(moment, "accumulation").asked is Asked.REFUSED
    assert moment.pending is None


def test_a_plan_that_turns_out_impossible_is_refused_and_the_loop_goes_on(control: Control, workload: Workload) -> None:
    control.loop.stage = Later()
    with Cell(control, workload) as cell:
        cell.train(2)
        control.ask("accumulation", "16")
        cell.train(2)
        asked = toggle(control.moment(), "accumulation")
    reason = "accumulation: --accumulate 16 needs at least 16 rows in a batch of Blocks, this one has 8"
    assert asked.text == f"refused: {reason}; use --accumulate 8 or larger batches"
    assert asked.value == "1"
    moment = control.moment()
    assert moment.plan == Plan()
    assert moment.changes == ()
    assert [each.plan for each in moment.measurements] == ["as written"]
    assert moment.step == 4
    assert f"refused --accumulate 16: {reason}" in moment.events[-1]


class AsksForCheckpoints(Observer):
    """A click at the start of a forward, when the plan before it has come into force."""

    control: Control

    def forward_begins(self, batch: Batch) -> None:
        self.control.ask("checkpointing", "full")


def test_a_click_after_a_plan_that_is_refused_later_comes_into_force_without_it(
    control: Control, workload: Workload
) -> None:
    session = session_of_control(control)
    with Cell(control, workload):
        control.ask("accumulation", "16")  # of 8 rows
        asking = AsksForCheckpoints()
        asking.control = control
        session.observers.add(asking)
        step(workload)
        session.observers.remove(asking)
        assert toggle(control.moment(), "accumulation").asked is Asked.REFUSED
        assert control.moment().pending == session.pending == Plan.parse("--checkpoint")
        step(workload)
    assert control.moment().plan == session.plan == Plan.parse("--checkpoint")


def with_another(control: Control, workload: Workload) -> tuple[Workload, Session, Session, Control]:
    """A second model that trains in the loop of a first: it, the sessions of both, and its own control."""
    other = Blocks()
    control.begin(workload)
    beside = Workload(other, torch.optim.SGD(other.parameters(), lr=0.1), workload.batch, mse_loss)
    session, second = session_of_control(control), fit(beside)
    train_together([session, second])
    return beside, session, second, control_of(other)


def test_clicks_on_two_models_of_one_loop_add_up(workload: Workload) -> None:
    control = control_of(workload.model)
    beside, session, second, panel = with_another(control, workload)
    panel.loop.stage = Later()
    panel.follow(second)
    with session, second, Cell(control, workload):
        step(workload)
        control.ask("checkpointing", "full")
        panel.ask("accumulation", "2")
        both = Plan.parse("--accumulate 2 --checkpoint")
        assert control.moment().pending == panel.moment().pending == both
        for _ in range(2):
            step(workload)
            assert panel.moment().pending == second.pending
            step(beside)
        assert session.plan == second.plan == control.moment().plan == panel.moment().plan == both
        assert control.moment().pending is None
        assert panel.moment().pending is None


def test_each_model_of_a_loop_has_a_panel_that_shows_and_holds_the_loop(workload: Workload) -> None:
    control = control_of(workload.model)
    beside, session, second, panel = with_another(control, workload)
    panel.loop.stage = stage = Later()
    shown: list[Activity] = []
    end_watching = panel.watch(lambda moment: shown.append(moment.activity))

    def resumed(moment: Moment) -> None:
        if moment.activity is Activity.PAUSED:
            panel.resume()

    end_resuming = panel.watch(resumed)
    with session, second, Cell(control, workload) as cell:
        panel.training_begins(second, cell.meter, control)
        assert shown[-1] is Activity.TRAINING
        assert panel.can() == Can.SWITCH | Can.PAUSE | Can.CANCEL | Can.UNDO
        panel.ask("accumulation", "2")
        step(workload)
        step(beside)
        assert session.plan == second.plan == Plan.parse("--accumulate 2")
        panel.steps.stepped()
        assert panel.moment().step == control.moment().step > 0
        panel.pause()
        assert control.can() == panel.can() == Can.SWITCH | Can.RESUME | Can.CANCEL | Can.UNDO
        step(workload)
        assert shown[-1] is Activity.TRAINING
        assert Activity.PAUSED in shown
        panel.undo()
        assert control.moment().pending == panel.moment().pending == Plan()
        step(beside)
        step(workload)
        assert session.plan == second.plan == control.moment().plan == panel.moment().plan == Plan()
        workload.model(workload.batch[0])
        panel.cancel()
        step(beside)  # the other model is within a step
        step(workload)
        with pytest.raises(Cancelled):
            step(beside)
        panel.steps.end()
    assert shown[-1] is Activity.IDLE
    stage.idle()
    end_watching()
    end_resuming()


def test_a_plan_that_is_clicked_between_cells_does_not_end_the_next_one(control: Control, workload: Workload) -> None:
    control.ask("accumulation", "16")
    with Cell(control, workload) as cell:
        cell.train(1)
    assert toggle(control.moment(), "accumulation").text.startswith("refused: accumulation: --accumulate 16 needs")
    assert session_of_control(control).plan == Plan()


def test_what_is_predicted_not_to_apply_is_refused_at_once(control: Control, workload: Workload) -> None:
    stage = control.loop.stage = Later()
    control.predict()
    stage.idle()
    stage.play_out()
    assert effect_of(control.moment(), "accumulation", "16").text == "does not apply"  # type: ignore[union-attr]
    control.ask("accumulation", "16")
    assert toggle(control.moment(), "accumulation").text.startswith("refused: accumulation: --accumulate 16 needs")
    control.ask("accumulation", "4")
    stage.idle()
    assert toggle(control.moment(), "accumulation").text == "applied at step 1"


def test_what_was_asked_for_after_the_last_step_is_applied_when_the_cell_has_ended(
    control: Control, workload: Workload
) -> None:
    stage = control.loop.stage = Later()
    with Cell(control, workload) as cell:
        cell.train(1)
        control.ask("accumulation", "2")
        stage.idle()
        assert cell.session.plan == Plan()
    stage.idle()
    assert session_of_control(control).plan == Plan.parse("--accumulate 2")


def test_taking_a_wish_back_leaves_nothing_pending(control: Control, workload: Workload) -> None:
    control.loop.stage = Later()
    with Cell(control, workload) as cell:
        cell.train(1)
        control.ask("accumulation", "2")
        control.ask("accumulation", "1")
        assert control.moment().pending is None
        assert toggle(control.moment(), "accumulation").asked is Asked.IDLE
        cell.train(1)
    assert control.moment().changes == ()


def test_pending_changes_add_up(control: Control, workload: Workload) -> None:
    control.loop.stage = Later()
    with Cell(control, workload) as cell:
        cell.train(1)
        control.ask("accumulation", "2")
        control.ask("checkpointing", "full")
        assert control.moment().pending == Plan.parse("--accumulate 2 --checkpoint")
        cell.train(1)
        assert cell.session.plan == Plan.parse("--accumulate 2 --checkpoint")


def test_settings_that_exclude_each_other_are_refused_at_once(control: Control) -> None:
    control.ask("optimizer", "sgd")
    control.ask("offload", "optimizer")
    refused = toggle(control.moment(), "offload")
    assert refused.asked is Asked.REFUSED
    assert "exclude each other" in refused.reason
    assert refused.value == "none"
    assert session_of_control(control).plan == Plan.parse("--optim sgd")


def test_a_technique_that_refuses_says_why_in_a_running_cell(control: Control, workload: Workload) -> None:
    control.loop.stage = Later()
    with Cell(control, workload) as cell:
        cell.train(1)
        control.ask("loss", "chunked")
        cell.train(1)
    refused = toggle(control.moment(), "loss")
    assert refused.asked is Asked.REFUSED
    assert "no linear layer onto 2048 or more classes" in refused.reason
    assert control.moment().pending is None
    assert any(event.startswith("refused --chunk-loss") for event in control.moment().events)


BOTH = (("loss", "chunked"), ("checkpointing", "full"))


@pytest.mark.parametrize("clicks", [BOTH, BOTH[::-1]])
@pytest.mark.parametrize("while_it_trains", [True, False])
def test_of_two_clicks_at_once_only_the_impossible_one_is_refused(
    control: Control, workload: Workload, clicks: tuple[tuple[str, str], ...], while_it_trains: bool
) -> None:
    stage = control.loop.stage = Later()
    if while_it_trains:
        with Cell(control, workload) as cell:
            cell.train(1)
            for click in clicks:
                control.ask(*click)
            cell.train(2)
    else:
        for click in clicks:
            control.ask(*click)
    stage.idle()
    assert toggle(control.moment(), "loss").text.startswith("refused: loss: Blocks has no linear layer")
    assert toggle(control.moment(), "checkpointing").asked is Asked.APPLIED
    assert session_of_control(control).plan == control.moment().plan == Plan.parse("--checkpoint")


def test_of_two_clicks_the_one_that_turns_out_impossible_in_the_call_is_refused(
    control: Control, workload: Workload
) -> None:
    control.loop.stage = Later()
    with Cell(control, workload) as cell:
        cell.train(1)
        control.ask("accumulation", "16")  # of 8 rows
        control.ask("checkpointing", "full")
        cell.train(2)
    assert toggle(control.moment(), "accumulation").text.startswith("refused: accumulation: --accumulate 16 needs")
    assert toggle(control.moment(), "checkpointing").text == "applied at step 3"
    assert session_of_control(control).plan == control.moment().plan == Plan.parse("--checkpoint")


def test_a_refusal_stays_until_the_setting_is_asked_for_again(control: Control) -> None:
    control.ask("loss", "chunked")
    control.ask("accumulation", "2")
    assert toggle(control.moment(), "loss").asked is Asked.REFUSED
    control.ask("loss", "keep")
    assert toggle(control.moment(), "loss").asked is Asked.IDLE


def test_cancelling_ends_the_loop_between_two_steps(control: Control, workload: Workload) -> None:
    with Cell(control, workload) as cell:
        cell.train(2)
        before = Snapshot(workload)
        control.cancel()
        with pytest.raises(Cancelled, match="cancelled from the panel after step 2"):
            cell.train(1)
        assert changed_between(before, Snapshot(workload)) == []
        assert isinstance(Cancelled(), KeyboardInterrupt)
    with Cell(control, workload) as cell:
        assert len(cell.train(2)) == 2
    assert control.moment().step == 4


def test_a_paused_loop_stands_still_and_the_pause_is_no_step_time(control: Control, workload: Workload) -> None:
    states: list[Activity] = []
    control.watch(lambda moment: states.append(moment.activity))
    with Cell(control, workload) as cell:
        cell.train(3)
        control.pause()
        assert Can.RESUME in control.can()
        timer = threading.Timer(0.6, control.resume)
        timer.start()
        cell.train(1)
        timer.join()
        assert Activity.PAUSED in states
        seconds = cell.meter.steps[-1].seconds
    assert seconds < 0.5


@pytest.mark.parametrize("clicks", [["pause"], ["pause", "resume"], ["pause", "resume", "pause"]])
def test_clicks_within_a_step_of_its_own_are_shown_and_keep_nobody_waiting(
    control: Control, workload: Workload, clicks: list[str]
) -> None:
    stage = control.loop.stage = Later()
    control.run(keep=False)
    stage.idle()
    (played,) = stage.played
    assert played.advance()

    class Clicking(Observer):
        def step_boundary(self) -> None:
            for each in clicks:
                getattr(control, each)()

    clicking = Clicking()
    session_of_control(control).observers.add(clicking, first=True)
    assert played.advance()  # a cell that is run now would wait for a step that stood still
    session_of_control(control).observers.remove(clicking)
    is_paused = clicks[-1] == "pause"
    assert control.moment().activity is (Activity.PAUSED if is_paused else Activity.MEASURING)
    assert played.advance() is not is_paused
    control.resume()
    assert played.advance()
    assert control.moment().activity is Activity.MEASURING
    control.pause()
    control.cancel()
    stage.idle()
    assert control.moment().activity is Activity.IDLE
    assert control.can() & Can.RUN


def test_ctrl_c_ends_a_pause(control: Control, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cell(control, workload) as cell:
        cell.train(1)
        control.pause()

        def interrupted() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(control.loop.hold._go, "wait", lambda _seconds: interrupted())
        with pytest.raises(KeyboardInterrupt) as shown:
            cell.train(1)
    assert shown.traceback[-1].name == "wait"  # one of memlab's frames, which are left out: none of what it calls
    assert control.moment().activity is Activity.IDLE


@pytest.mark.parametrize("keep", [False, True])
def test_a_run_of_its_own_leaves_nothing_behind_unless_it_is_kept(
    control: Control, workload: Workload, keep: bool
) -> None:
    stage = control.loop.stage = Later()
    step(workload)
    before = Snapshot(workload)
    control.run(keep=keep)
    stage.idle()
    (played,) = stage.played
    for _ in range(3):
        assert played.advance()
    assert control.moment().activity is Activity.MEASURING
    control.ask("checkpointing", "full")
    assert played.advance()
    assert toggle(control.moment(), "checkpointing").asked is Asked.APPLIED
    control.cancel()
    stage.idle()
    assert control.moment().activity is Activity.IDLE
    assert session_of_control(control).plan == Plan.parse("--checkpoint")
    assert bool(changed_between(before, Snapshot(workload))) is keep
    assert [each.plan for each in control.moment().measurements] == ["as written", "--checkpoint"]
    assert all(not isinstance(observer, Meter) for observer in session_of_control(control).observers.all)
    assert session_of_control(control).rescuer is None


def test_a_dry_run_under_converted_moments_is_put_back_bit_for_bit(control: Control, workload: Workload) -> None:
    stage = control.loop.stage = Later()
    step(workload)
    control.ask("optimizer", "adam8bit")
    stage.idle()
    before = Snapshot(workload)
    control.run(keep=False)
    stage.idle()
    played = stage.played[-1]
    assert played.advance()
    control.ask("optimizer", "keep")
    assert played.advance()
    control.ask("optimizer", "adam8bit")
    assert played.advance()
    control.cancel()
    stage.idle()
    assert changed_between(before, Snapshot(workload)) == []


def test_a_run_without_a_batch_says_what_is_missing(workload: Workload) -> None:
    control = Control(workload.model)
    control.begin(Workload(workload.model, workload.optimizers))
    control.run(keep=False)
    assert "no batch is known yet" in control.moment().errors[0]
    session_of_control(control).undo()


def test_a_run_whose_model_gives_no_loss_says_so(workload: Workload) -> None:
    control = Control(workload.model, stage := Later())
    control.begin(Workload(workload.model, workload.optimizers, (workload.batch[0],)))
    control.run(keep=False)
    stage.idle()
    stage.played[0].advance()
    assert "returned no loss" in control.moment().errors[0]
    assert control.moment().activity is Activity.IDLE
    assert Can.RUN not in control.can()  # by now it is known
    control.run(keep=False)
    stage.idle()
    assert control.moment().errors == (
        "WorkloadError: the loop computes the loss itself: name a loss function, as in %memfit panel --batch "
        "inputs,target --loss-fn NAME",
    )
    session_of_control(control).undo()


def test_live_predictions_fills_in_what_settings_give(control: Control) -> None:
    stage = control.loop.stage = Later()
    control.predict()
    stage.idle()
    stage.play_out()
    moment = control.moment()
    assert prediction_of("--accumulate 4", moment.predictions) is not None
    assert prediction_of("--checkpoint", moment.predictions) is not None
    assert not moment.errors


@pytest.mark.full
def test_the_fastest_plan_that_fits_is_asked_for(control: Control) -> None:
    stage = control.loop.stage = Later()
    control.find()
    stage.idle()
    stage.play_out()
    assert "set a budget first" in control.moment().errors[0]
    sizes = [each.needed_bytes for each in control.moment().predictions if not each.refused]
    as_written = prediction_of("as written", control.moment().predictions)
    assert as_written is not None
    control.set_budget((min(sizes) + as_written.needed_bytes) // 2)
    control.find()
    stage.idle()
    stage.play_out()
    stage.idle()
    plan = session_of_control(control).plan
    assert plan != Plan()
    found = prediction_of(plan.label, control.moment().predictions)
    assert found is not None
    assert found.needed_bytes <= control.moment().budget_bytes


def test_undoing_gives_the_model_back_and_a_later_wish_begins_again(control: Control, workload: Workload) -> None:
    control.ask("accumulation", "2")
    session = session_of_control(control)
    control.undo()
    assert not session.attached
    assert control.moment().plan == Plan()
    assert "forward" not in vars(workload.model)
    control.ask("accumulation", "4")
    assert session_of_control(control).plan == Plan.parse("--accumulate 4")
    assert session_of_control(control).workload.optimizers == workload.optimizers


def test_training_again_after_undoing_begins_a_new_run(control: Control, workload: Workload) -> None:
    control.loop.stage = stage = Later()
    with Cell(control, workload) as cell:
        cell.train(2)
        control.ask("checkpointing", "full")
        cell.train(2)
    control.undo()
    stage.idle()
    assert [point.step for point in control.moment().points] == [1, 2, 3, 4]
    control.follow(fit(workload))
    with Cell(control, workload) as cell:
        cell.train(2)
        moment = control.moment()
    assert [(point.step, point.plan) for point in moment.points] == [(1, "as written"), (2, "as written")]
    assert moment.changes == ()
    assert [each.asked for each in moment.toggles] == [Asked.IDLE] * len(moment.toggles)
    assert [each.plan for each in moment.measurements] == ["as written", "--checkpoint"]


def test_what_is_switched_off_does_not_read_as_applied(control: Control) -> None:
    control.ask("accumulation", "4")
    control.ask("accumulation", "1")
    assert toggle(control.moment(), "accumulation").text == "off since step 1"


def test_undoing_while_a_cell_trains_takes_the_settings_off_at_the_next_step(
    control: Control, workload: Workload
) -> None:
    control.ask("accumulation", "2")
    with Cell(control, workload) as cell:
        cell.train(1)
        control.ask("loss", "chunked")
        cell.train(1)
        assert toggle(control.moment(), "loss").asked is Asked.REFUSED
        control.undo()
        assert toggle(control.moment(), "loss").text == ""
        cell.train(1)
        assert cell.session.plan == Plan()
        assert cell.session.attached


def test_undoing_while_a_cell_is_paused_takes_the_settings_off_when_it_goes_on(
    control: Control, workload: Workload
) -> None:
    control.ask("checkpointing", "full")
    control.loop.stage = stage = Later()
    pending: list[Plan | None] = []

    def press(moment: Moment) -> None:
        if moment.activity is Activity.PAUSED and not pending:
            pending.append(moment.pending)
            control.undo()
            pending.append(control.moment().pending)
            control.resume()

    end_watching = control.watch(press)
    with Cell(control, workload) as cell:
        cell.train(1)
        control.pause()
        cell.train(1)
        assert pending == [None, Plan()]
        assert cell.session.plan == Plan()
        control.ask("accumulation", "4")
        cell.train(1)
    end_watching()
    stage.idle()
    assert session_of_control(control).plan == control.moment().plan == Plan.parse("--accumulate 4")


def test_undoing_before_a_cell_calls_the_model_comes_with_its_first_step_and_not_after_it(
    control: Control, workload: Workload
) -> None:
    control.ask("checkpointing", "full")
    control.loop.stage = stage = Later()
    control.undo()
    assert toggle(control.moment(), "checkpointing").text == "pending"
    with Cell(control, workload) as cell:
        cell.train(1)
        assert cell.session.plan == Plan()
        control.ask("accumulation", "4")
        cell.train(1)
    stage.idle()
    assert session_of_control(control).plan == Plan.parse("--accumulate 4")


def test_a_loop_in_a_plain_cell_is_steered_and_shown(control: Control, workload: Workload) -> None:
    control.loop.stage = stage = Later()
    shown: list[str] = []
    end_watching = control.watch(lambda moment: shown.append(toggle(moment, "accumulation").text))
    control.ask("accumulation", "2")
    step(workload)
    assert shown[-1] == "applied at step 1"
    control.ask("accumulation", "16")
    step(workload)
    assert shown[-1].startswith("refused: accumulation: --accumulate 16 needs")
    control.undo()
    step(workload)
    assert session_of_control(control).plan == Plan()
    assert shown[-1] == "off since step 3"
    stage.idle()
    assert control.model.session is None
    end_watching()


def test_two_views_show_one_state_and_a_failing_one_is_told(control: Control) -> None:
    first: list[Moment] = []
    second: list[Moment] = []

    def broken(_moment: Moment) -> None:
        raise ZeroDivisionError("no picture")

    for view in (first.append, broken, second.append):
        control.watch(view)
    control.ask("accumulation", "2")
    assert toggle(first[-1], "accumulation").value == toggle(second[-1], "accumulation").value == "2"
    control.views.draw()
    assert first[-1].errors == ("ZeroDivisionError: no picture",)


def test_a_dropped_view_is_drawn_no_more(control: Control) -> None:
    class View:
        def draw(self, _moment: Moment) -> None:
            pass

    view = View()
    control.watch(view.draw)
    assert control.views.any_open
    del view
    gc.collect()
    assert not control.views.any_open


def test_neither_model_nor_session_is_kept_alive() -> None:
    model = Blocks()
    gone = weakref.ref(model)
    control = control_of(model)
    assert control_of(model) is control
    moments: list[Moment] = []
    control.watch(moments.append)
    control.begin(
        Workload(model, torch.optim.AdamW(model.parameters()), (torch.ones(2, 16), torch.ones(2, 1)), mse_loss)
    )
    control.ask("accumulation", "2")
    del model
    gc.collect()
    assert gone() is None
    assert moments[-1].activity is Activity.GONE
    assert moments[-1].status == "Blocks is deleted: this panel is over"
    assert control.can() is Can.NOTHING
    control.ask("accumulation", "4")
    assert toggle(control.moment(), "accumulation").text == "refused: Blocks is deleted"


def test_hours_of_steps_stay_bounded(control: Control, workload: Workload) -> None:
    with Cell(control, workload) as cell:
        cell.train(320)
        for number in range(52):
            control.ask("accumulation", str(1 + number % 2))
            cell.train(2)
    moment = control.moment()
    assert len(moment.points) <= 300
    assert len(moment.changes) <= 100
    assert len(moment.events) <= 20
    assert moment.step == 424


def test_a_rescue_is_seen(workload: Workload) -> None:
    workload.batch = (torch.randn(2048, 16), torch.randn(2048, 1))
    capacity_bytes = measure(workload, steps=1).peak_allocated_bytes * 3 // 4
    with fit(workload, rescue=True):
        control = Control(workload.model)
        control.begin(workload)
        with Cell(control, workload, capacity_bytes) as cell:
            cell.train(2)
        assert control.moment().rescues
        assert any("→" in event for event in control.moment().events)


@pytest.mark.parametrize("runs_itself", [True, False])
def test_a_plan_that_is_in_force_already_has_the_steps_and_what_it_keeps_elsewhere(runs_itself: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    batch = torch.randn(32, 64), torch.randn(32, 1)
    workload = Workload(model, torch.optim.AdamW(model.parameters()), batch, mse_loss)
    with fit(workload, "--offload optimizer") as session:
        stage = Playing()
        control = Control(workload.model, stage)
        control.begin(workload)
        if runs_itself:
            control.run(keep=True)
            for _ in range(4):
                stage.played[-1].advance()
        else:
            with control.training():
                for _ in range(4):
                    step(workload)
        (measured,) = control.moment().measurements
        assert (measured.plan, measured.host_bytes) == ("--offload optimizer", session.host_bytes)
        assert session.host_bytes
        assert {point.plan for point in control.moment().points} == {"--offload optimizer"}
        control.cancel()


def test_a_loop_is_measured_without_a_cell(workload: Workload) -> None:
    control = Control(workload.model)
    control.begin(workload)
    assert Can.RUN not in control.can()  # nothing makes its steps
    with control.training():
        with control.training():
            step(workload)
        for _ in range(3):
            step(workload)
        assert control.moment().activity is Activity.TRAINING
        control.ask("checkpointing", "full")
        step(workload)
    moment = control.moment()
    assert [each.plan for each in moment.measurements] == ["as written", "--checkpoint"]
    assert (moment.activity, moment.step) == (Activity.IDLE, 5)
    session = session_of_control(control)
    assert session.observers.all == (control,)
    session.undo()


def test_a_click_on_the_panel_of_a_model_that_was_wrapped_is_refused() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    control = Control(model)
    control.begin(Workload(model, optimizer))
    session_of_control(control).undo()
    with fit(Workload(nn.Sequential(model), optimizer)) as session:
        control.ask("checkpointing", "full")
        asked = toggle(control.moment(), "checkpointing")
        assert asked.asked is Asked.REFUSED
        assert asked.reason == "Linear is trained as a part of Sequential: ask its panel (%memfit panel)"
        assert sessions() == (session,)
