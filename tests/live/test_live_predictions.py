"""Times measured on batches of another size or length calibrate nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memlab.live.control import Control
from memlab.live.live_predictions import calibration
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
