"""The run that the demo replays: a small GPT-2 on a CPU, trained under six plans one after another.

python -m tests.docs.record_demo        record it anew into docs/demo_run.json, and draw the gallery of it (a minute)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import memlab
from memlab.live.live_predictions import settings_beside
from memlab.plan import Plan
from memlab.records import Prediction, TimelinePoint
from memlab.records.run_record import RunRecord
from memlab.units import MIB
from tests.docs import gallery

RECORD = Path(__file__).parents[2] / "docs" / "demo_run.json"
PLANS = (
    "",
    "--offload activations",
    "--accumulate 4",
    "--accumulate 4 --checkpoint",
    "--checkpoint",
    "--checkpoint --adam8bit",
)
_STEPS = 12
_BUDGET_BYTES = 45 * MIB
_TOGETHER = 3  # points of the picture of a step that become one, the highest of them
_CELLS = (
    "%load_ext memlab",
    """import torch
torch.set_num_threads(1)
from memlab import workshop
here = workshop.here()
model, batches = here.gpt2(vocab_size=4000), here.batches(vocabulary=4000)
optimizer = torch.optim.AdamW(model.parameters())

def train(steps):
    for _ in range(steps):
        batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

train(2)""",
    *(f"%%memfit {plan}\ntrain({_STEPS})" for plan in PLANS),
)


def main() -> None:
    """Record the run, and what single settings would have given beside each plan."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    for cell in (*_CELLS, f"%memfit record {RECORD}", "%memfit undo"):
        shell.run_cell(cell).raise_error()
    record = RunRecord.load(RECORD)
    batch = next(shell.user_ns["batches"])
    names = {"input_ids": batch, "labels": batch}
    workload = memlab.Workload(shell.user_ns["model"], shell.user_ns["optimizer"], batch=names)
    measurements = tuple(replace(each, timeline=_thinned(each.timeline)) for each in record.comparison.measurements)
    record = replace(record, comparison=replace(record.comparison, measurements=measurements))
    record = replace(record, predictions=_predicted(workload, record), budget_bytes=_BUDGET_BYTES)
    known = json.loads(json.dumps(json.loads(record.to_json())), parse_float=lambda text: float(f"{float(text):.6g}"))
    RECORD.write_text(json.dumps(known, separators=(",", ":")) + "\n", encoding="utf-8")
    assert RunRecord.load(RECORD).comparison.title == record.comparison.title
    gallery.draw(record)
    size = RECORD.stat().st_size / 1024
    print(f"{RECORD.name}: {size:.0f} KiB, {len(record.points)} steps, {len(record.predictions)} predictions")


def _predicted(workload: memlab.Workload, record: RunRecord) -> tuple[Prediction, ...]:
    wanted = dict.fromkeys(each for plan in PLANS for each in settings_beside(Plan.parse(plan)))
    made = memlab.predict_all(workload, plans=wanted, measured=record.comparison.measurements[0])
    return tuple(replace(each, timeline=()) for each in made)


def _thinned(timeline: Sequence[TimelinePoint]) -> tuple[TimelinePoint, ...]:
    kept: list[TimelinePoint] = []
    for _, points in groupby(timeline, key=lambda point: point.phase):
        of_phase = [*points]
        parts = (of_phase[at : at + _TOGETHER] for at in range(0, len(of_phase), _TOGETHER))
        kept += (max(part, key=lambda point: sum(point.live_bytes.values())) for part in parts)
    return tuple(kept)


if __name__ == "__main__":
    main()
