"""Times measured on batches of another size or length calibrate nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memlab import measure
from memlab.live.control import Control
from memlab.live.live_predictions import LivePredictions, calibration
from memlab.plan import Plan
from memlab.records import Measurement
from memlab.runtime.batch import Batch
from memlab.runtime.workload import Workload
from tests.helpers.stages import Playing

LONG = Measurement("", "cpu", 0, None, 0, {}, (), (0.5,), 4, 4 * 32)


@pytest.mark.parametrize(
    "other",
    [replace(LONG, samples_per_step=8), replace(LONG, tokens_per_step=4 * 24), replace(LONG, step_seconds=())],
    ids=["size", "length", "not timed"],
)
def test_only_times_of_such_batches_count(other: Measurement) -> None:
    workload = Workload(nn.Embedding(9, 2), [], Batch.of({"input_ids": torch.ones(4, 16, dtype=torch.long)}))
    assert calibration([other], workload) is None
    assert calibration([other, LONG], workload) is LONG


def test_a_panel_does_not_calibrate_by_texts_of_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Embedding(9, 2)
    stage = Playing()
    control = Control(model, stage=stage)
    control.model.batch = Batch.of({"input_ids": torch.ones(4, 16, dtype=torch.long)})
    control.know([replace(LONG, tokens_per_step=4 * 24)])
    seen: list[Measurement | None] = []
    monkeypatch.setattr(
        control.predicting.known, "plan_by_plan", lambda _w, _p, measured, **_: seen.append(measured) or iter(())
    )
    control.predict()
    stage.play_out()
    assert seen == [None]


def test_speeds_of_other_times_are_not_put_side_by_side() -> None:
    """Predictions that were broken off, by a cell that timed the loop again, begin anew."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    workload = Workload(model, optimizer, batch=(torch.randn(8, 4), torch.randn(8, 4)), loss_fn=nn.functional.mse_loss)
    known = LivePredictions()
    measured = measure(workload, "", steps=3)
    making = known.plan_by_plan(workload, Plan(), measured)
    next(making)
    making.close()
    before = known.predictions
    assert before
    slower = replace(measured, step_seconds=tuple(3 * each for each in measured.step_seconds))
    for _ in known.plan_by_plan(workload, Plan(), slower):
        pass
    times = {each.plan: each.step_seconds for each in known.predictions}
    assert all(times[each.plan] == pytest.approx(3 * each.step_seconds, rel=0.2) for each in before)
