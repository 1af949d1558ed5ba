"""Two hours of training before a panel, on a simulated clock: what is kept stays bounded."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from itertools import pairwise

import pytest

for package in ("ipywidgets", "anywidget"):
    pytest.importorskip(package, reason=f"needs {package}")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from memlab.jupyter.panel import Panel  # noqa: E402
from memlab.live.control import Control  # noqa: E402
from memlab.plan import Plan  # noqa: E402
from memlab.records import Measurement, Phase, StepRecord, TimelinePoint  # noqa: E402
from memlab.runtime.workload import Workload  # noqa: E402
from memlab.session import fit  # noqa: E402

HOURS = 2
STEP_SECONDS = 1.5
PLANS = ("as written", "--accumulate 4", "--checkpoint", "--bf16")


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorded:
    """A meter that tells of steps that never were: two hours of them take no time."""

    def __init__(self) -> None:
        self.plan = PLANS[0]
        self.last = 0
        self.device = type("Device", (), {"capacity_bytes": 2**34, "name": "a device"})()

    @property
    def times(self) -> Recorded:
        """The same: what a meter knows of time."""
        return self

    @property
    def steps_ended(self) -> int:
        return self.last

    def steps_after(self, number: int) -> list[StepRecord]:
        return [self._step(each) for each in range(number + 1, self.last + 1)]

    def so_far(self, plan: str) -> Measurement:
        timeline = tuple(TimelinePoint(i / 300, Phase.FORWARD, {"parameters": 2**30 + i}) for i in range(300))
        seconds = tuple(STEP_SECONDS + (self.last + i) % 7 / 100 for i in range(200))
        return Measurement(plan, "a device", 2**33, None, 0, {"parameters": 2**30}, timeline, seconds, 8, 0)

    def _step(self, number: int) -> StepRecord:
        return StepRecord(number, self.plan, STEP_SECONDS + number % 7 / 100, 8, 0, 2**32 + number)


@pytest.fixture
def control() -> Iterator[Control]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    session = fit(Workload(model, torch.optim.AdamW(model.parameters())))
    made = Control(model)
    made.follow(session)
    yield made
    session.undo()


@pytest.mark.full
def test_two_hours_before_a_panel_stay_bounded(control: Control) -> None:
    clock, meter = Clock(), Recorded()
    panel = Panel(control)
    assert control.model.session is not None
    control.steps.begin(control.model.session, meter, control.moment().activity)  # type: ignore[arg-type]
    control.views.begin_anew(clock)
    frames, objects, sizes = [], [], []
    for step in range(1, round(HOURS * 3600 / STEP_SECONDS) + 1):
        clock.now += STEP_SECONDS
        meter.last = step
        if step % 150 == 0:
            meter.plan = PLANS[step // 150 % len(PLANS)]
            control.plan_changed(Plan.parse(meter.plan if meter.plan != PLANS[0] else ""))
        frame = control.views.frame
        control.steps.stepped()
        if control.views.frame > frame:
            frames.append(clock.now)
        if step % 600 == 0:
            gc.collect()
            objects.append(len(gc.get_objects()))
            sizes.append(len(json.dumps(panel.widget.figure)))
    panel.close()
    assert min(later - earlier for earlier, later in pairwise(frames)) >= 0.25
    assert len(frames) > 500
    # the first hour fills what is bounded; the second adds nothing. What else the process does makes single samples
    # larger, by some 100 objects; one object kept from each step would be 600 more in each sample
    half = len(objects) // 2
    assert min(objects[-2:]) <= max(objects[:half]) + 150
    assert max(sizes) < 400_000
    assert max(sizes[half:]) <= max(sizes[:half]) * 1.3
