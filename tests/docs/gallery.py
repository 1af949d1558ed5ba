"""The gallery: receipts, predictions and pictures of the run that the demo replays.

python -m tests.docs.gallery        draw its pictures anew, after another run was recorded
"""

from __future__ import annotations

from memlab.records.run_record import RunRecord
from memlab.report import html, image, pareto, pareto_image, tables, text, timeline_image
from tests.docs import demo

FOLDER = demo.RECORD.parent
# plans whose steps are drawn below each other
_STEPS = ("as written", "--accumulate 4", "--accumulate 4 --checkpoint")
_PAGE = """# Gallery

What memlab shows of training. Receipts, predictions and steps are of one run: a small GPT-2 on a CPU, under six plans one after
another. It plays in the [demo](demo.md).

## The panel

`%memfit panel`, while a cell trains. Settings are switched by a click; memory and throughput follow.

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="lab_dark.png">
  <img alt="JupyterLab while a cell trains: settings with the predicted effect of each on the left, memory and throughput on the right" src="lab_light.png">
</picture>

## A receipt

Below each cell with `%%memfit`: the plans that were run, with what each took.

{receipt}

In a terminal, and where pages show no HTML:

```
{in_text}
```

As a picture, where pages show nothing else:

![The receipt as a picture: memory by category and throughput of each plan](gallery_receipt.png)

## What would help

`%memfit predict --budget {budget}`, before anything is run: the fastest plans that fit come first.

{predicted}

![Predicted plans as points, memory against throughput; those that fit the budget are on the left of its line](gallery_map.png)

## Inside one step

Memory over the time of one step, under {count} of the plans.

![Memory of a step by category, under each plan](gallery_step.png)

## What the memory is for

`print` of a measurement, at its peak:

```
{measured}
```

## Techniques one by one

`%memfit ablation` adds one after another ([measured](measured.md#techniques-added-one-by-one)).

![Memory falls from row to row, throughput beside it](ablation.png)
"""


def page(record: RunRecord) -> str:
    """Return the page."""
    receipt = record.comparison
    predicted = tables.predictions(
        record.predictions,
        record.budget_bytes,
        title=record.title,
        how_to_see_all="%memfit predict --all shows them",
        measurements=receipt.measurements,
    )
    return _PAGE.format(
        receipt=html.table(tables.comparison(receipt)),
        in_text=text.table(tables.comparison(receipt)),
        budget=f"{(record.budget_bytes or 0) // 2**20}MiB",
        predicted=html.table(predicted),
        count=len(_STEPS),
        measured=receipt.measurements[0],
    )


def pictures(record: RunRecord) -> dict[str, bytes]:
    """Return the pictures by the names of their files."""
    of_plan = {each.plan: each for each in record.comparison.measurements}
    chart = pareto.chart(record.predictions, record.comparison.measurements, record.budget_bytes, title=record.title)
    return {
        "gallery_receipt.png": image.png(record.comparison),
        "gallery_map.png": pareto_image.png(chart),
        "gallery_step.png": timeline_image.together_png([of_plan[plan] for plan in _STEPS]),
    }


def draw(record: RunRecord) -> None:
    """Write the pictures."""
    for name, picture in pictures(record).items():
        (FOLDER / name).write_bytes(picture)


if __name__ == "__main__":
    draw(RunRecord.load(demo.RECORD))
