"""Tables as HTML that lives on in a saved notebook: inline styles, no script, either theme.

Colours of text and lines derive from the page (`currentColor`, translucent grey), so the table
reads on a light and on a dark page. Where styles are stripped, a plain table with every number
remains; the bars, which repeat numbers, are the only thing lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from memlab.records import Measurement, Prediction
from memlab.records.ablation import Ladder, Step
from memlab.records.comparison import Comparison, FoundPlan, Row
from memlab.report import ladder as rungs
from memlab.report.columns import MEMORY, NOTE, PLAN, Column, cells, columns
from memlab.report.listing import Listing, found_listing, models_listing, predictions_listing
from memlab.report.segments import categories_of, segments, swatch
from memlab.units import format_bytes

_FLAG = re.compile(r"--[a-z][^ ]*( [^- ][^ ]*(?= --|$))?")
_RULE = "rgba(128,128,128,.35)"
_WRAPPER = "overflow-x:auto;font-variant-numeric:tabular-nums;font-size:13px;line-height:1.45"
_TABLE = "border-collapse:collapse;margin:0;color:inherit;background:transparent;border:0;font-size:inherit"
# a table may be narrower than its title, which then stays on one line
_CAPTION = "caption-side:top;text-align:left;font-weight:600;padding:0 0 6px;color:inherit;white-space:nowrap"
_CELL = f"padding:5px 14px 5px 0;vertical-align:top;background:transparent;border:0;border-bottom:1px solid {_RULE}"
_HEAD = f"{_CELL};border-bottom:2px solid {_RULE};font-weight:600;white-space:nowrap"
_CODE = "font-family:ui-monospace,Menlo,Consolas,monospace;background:transparent;color:inherit;font-size:12px"
_BAR = "display:flex;height:8px;margin-top:4px;width:170px"
# what is predicted is paler and dashed, in every picture
_PREDICTED = "opacity:.65;border-bottom:1px dashed currentColor"
_GREY = "#9AA5B1"
# the green of a plan that was found, translucent so that it reads on either theme
_FITS = "rgba(0,158,115,.14)"
_BADGE = "color:inherit;border:1px solid #009E73;border-radius:9px;padding:0 7px;font-size:11px;white-space:nowrap"
_OVER = "padding:0 14px 2px 0;text-align:left;font-weight:400;opacity:.75;background:transparent;border:0"
_KEY = "display:inline-block;width:10px;height:10px;margin-right:5px"


def table(comparison: Comparison) -> str:
    """Write a comparison as one HTML table.

    Args:
        comparison: the settings that were tried; the first row is what the others are compared with.

    Returns:
        A `<div>` that holds the table with its caption, the key of the bars and the events. All text
        is escaped.

    Example:
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> "<caption" in table(Comparison("gpt2 <124M>", (m,)))
        True
    """
    chosen = columns(comparison)
    most_bytes = max(sum(segments(m).values()) for m in comparison.measurements)
    heads = "".join(f'<th scope="col" style="{_HEAD};{_align(column)}">{column.title}</th>' for column in chosen)
    rows = "".join(
        _row(row.measurement, chosen, cells(row, chosen, is_first=index == 0), most_bytes)
        for index, row in enumerate(comparison.rows)
    )
    return (
        f'<div class="memlab-receipt" style="{_WRAPPER}"><table style="{_TABLE}">'
        f'<caption style="{_CAPTION}">{escape(comparison.title)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        f"{_legend(comparison)}{_of_models(comparison)}{_events(comparison.events)}</div>"
    )


def predictions_table(
    predictions: Sequence[Prediction],
    budget_bytes: int | None = None,
    *,
    title: str = "",
    every: bool = False,
    how_to_see_all: str = "every=True shows them",
) -> str:
    """Write predictions as one HTML table, the best first; see `memlab.report.text.predictions_table`.

    Example:
        >>> p = Prediction("as written", "T4", 2**30, None, 0, {}, (), 0.5, 8, 0, (2**30, 2**30), (0.5, 0.5))
        >>> "fits, 1.00 GiB to spare" in predictions_table([p], 2**31)
        True
    """
    return listing(
        predictions_listing(predictions, budget_bytes, title=title, every=every, how_to_see_all=how_to_see_all)
    )


def found_table(found: FoundPlan) -> str:
    """Write the evidence for a found plan as one HTML table."""
    return listing(found_listing(found))


def ladder_table(ladder: Ladder) -> str:
    """Write a ladder as one HTML table: bars that descend like stairs, and the throughput beside them.

    Args:
        ladder: its rungs, from top to bottom.

    Returns:
        A `<div>` as that of `table`. Rungs that were left out are set back; the first that fits is marked.

    Example:
        >>> from memlab.records.ablation import Rung
        >>> m = Measurement("as written", "cpu", 2**30, None, 0, {}, (), (0.5,) * 5, 8, 0)
        >>> "the loop as it is" in ladder_table(Ladder("gpt2 <124M>", (Rung("", "as written", "the loop as it is", m),)))
        True
    """
    groups = rungs.groups(ladder)
    parts = [segments(each.ran) if each.ran is not None else {} for each in ladder.rungs]
    most_bytes = max(1, *(each.measurement.peak_allocated_bytes for each in ladder.rungs if each.measurement))
    fastest = max((ladder.speed(each.ran) for each in ladder.rungs if each.ran is not None), default=0.0)
    rows = "".join(
        _rung(ladder, step, groups, part, most_bytes, fastest) for step, part in zip(ladder.steps, parts, strict=True)
    )
    foot = "".join(f'<div style="margin-top:4px">{_unbroken(line)}</div>' for line in rungs.foot(ladder))
    return (
        f'<div class="memlab-receipt" style="{_WRAPPER}"><table style="{_TABLE}">'
        f'<caption style="{_CAPTION}">{escape(rungs.heading(ladder))}</caption>'
        f"<thead>{_ladder_heads(groups)}</thead><tbody>{rows}</tbody></table>{_keys(categories_of(parts))}{foot}</div>"
    )


def _ladder_heads(groups: Mapping[str, tuple[Column[Step], ...]]) -> str:
    over = "".join(
        f'<th scope="colgroup" colspan="{len(columns)}" style="{_OVER}">{name}</th>' for name, columns in groups.items()
    )
    heads = "".join(
        f'<th scope="col" style="{_HEAD};{_left_if(index == 0)}">{column.title}</th>'
        for columns in groups.values()
        for index, column in enumerate(columns)
    )
    lever, verdict = (
        f'<th scope="col" style="{_HEAD};text-align:left">{name}</th>' for name in ("technique", "verdict")
    )
    return (
        f'<tr style="background:transparent"><td style="{_OVER}"></td>{over}<td style="{_OVER}"></td></tr>'
        f'<tr style="background:transparent">{lever}{heads}{verdict}</tr>'
    )


def _left_if(is_first: bool) -> str:
    """The first column of a group has the bar below its figure, and so starts at the left."""
    return "text-align:left" if is_first else "text-align:right"


def _rung(
    ladder: Ladder,
    step: Step,
    groups: Mapping[str, tuple[Column[Step], ...]],
    part: Mapping[str, int],
    most_bytes: int,
    fastest: float,
) -> str:
    speed = ladder.speed(step.rung.ran) / fastest if step.rung.ran is not None and fastest else 0.0
    memory = _ran_out_bar(step, most_bytes) if step.rung.ran_out else _bar(part, most_bytes) if part else ""
    bars = {rungs.MEMORY: memory, rungs.THROUGHPUT: _speed_bar(speed)}
    figures = "".join(
        f'<td style="{_CELL};{_left_if(index == 0)};white-space:nowrap">{escape(column.cell(step))}'
        f"{bars[name] if index == 0 else ''}</td>"
        for name, columns in groups.items()
        for index, column in enumerate(columns)
    )
    set_back = "" if step.rung.kept else ";opacity:.65"
    return (
        f'<tr style="background:{_FITS if step.is_first_to_fit else "transparent"}{set_back}">{_lever_cell(step)}{figures}'
        f'<td style="{_CELL};text-align:left;min-width:18em;max-width:30em">{_unbroken(step.verdict)}</td></tr>'
    )


def _lever_cell(step: Step) -> str:
    mark = f' <span style="{_BADGE}">✓ fits</span>' if step.is_first_to_fit else ""
    style = f"{_CELL};text-align:left;font-weight:400;min-width:19em"
    return (
        f'<th scope="row" style="{style}"><code style="{_CODE}">{_unbroken(rungs.lever(step))}</code>{mark}'
        f'<div style="{"opacity:.75;" if step.rung.kept else ""}font-size:12px">{escape(step.rung.what)}</div></th>'
    )


def _ran_out_bar(step: Step, most_bytes: int) -> str:
    """An empty outline as long as the device is large."""
    size_bytes = step.rung.measurement.peak_allocated_bytes if step.rung.measurement is not None else 0
    width = f"width:{100 * size_bytes / most_bytes:.2f}%"
    return f'<div aria-hidden="true" style="{_BAR}"><span style="{width};border:1px dashed #D9534F"></span></div>'


def _speed_bar(share: float) -> str:
    width = f"width:{100 * share:.2f}%"
    return f'<div aria-hidden="true" style="{_BAR};width:90px"><span style="{width};background-color:{_GREY}"></span></div>'


def listing(content: Listing) -> str:
    """Write a table of ready texts; bars of what is predicted have a dashed outline."""
    heads = "".join(
        f'<th scope="col" style="{_HEAD};{_listed_align(column)}">{_head(column.title)}</th>'
        for column in content.columns
    )
    most_bytes = max((sum(part.values()) for part in content.parts), default=0)
    parts = content.parts or ({},) * len(content.rows)
    rows = "".join(
        f'<tr style="background:transparent">{_listed(content.columns, texts, part, most_bytes)}</tr>'
        for texts, part in zip(content.rows, parts, strict=True)
    )
    body = f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>" if content.columns else ""
    foot = "".join(f'<div style="margin-top:4px">{_unbroken(line)}</div>' for line in content.foot)
    return (
        f'<div class="memlab-receipt" style="{_WRAPPER}"><table style="{_TABLE}">'
        f'<caption style="{_CAPTION}">{escape(content.title)}</caption>{body}</table>'
        f"{_keys(categories_of(content.parts))}{foot}</div>"
    )


def _listed(columns: tuple[Column[None], ...], texts: tuple[str, ...], part: Mapping[str, int], most_bytes: int) -> str:
    return "".join(
        _plan_cell(text)
        if column.title == PLAN.title
        else f'<td style="{_CELL};{_listed_align(column)};white-space:nowrap">{_unbroken(text)}'
        f"{_bar(part, most_bytes, is_predicted=True) if column.title == MEMORY.title and part else ''}</td>"
        for column, text in zip(columns, texts, strict=True)
    )


def _listed_align(column: Column[None]) -> str:
    return "text-align:right" if column.is_number and column.title != MEMORY.title else "text-align:left"


def _head(title: str) -> str:
    """A heading; a mark is spoken in words."""
    return f'<span title="Pareto-optimal" aria-label="Pareto-optimal">{title}</span>' if len(title) == 1 else title


def _align(column: Column[Row]) -> str:
    return "text-align:right" if column.is_number and column is not MEMORY else "text-align:left"


def _row(measurement: Measurement, chosen: tuple[Column[Row], ...], texts: tuple[str, ...], most_bytes: int) -> str:
    row_cells = (_cell(measurement, column, text, most_bytes) for column, text in zip(chosen, texts, strict=True))
    return f'<tr style="background:transparent">{"".join(row_cells)}</tr>'


def _cell(measurement: Measurement, column: Column[Any], text: str, most_bytes: int) -> str:
    if column is PLAN:
        return _plan_cell(text)
    bar = _bar(segments(measurement), most_bytes) if column is MEMORY else ""
    wrap = "white-space:normal;min-width:16em;max-width:34em" if column is NOTE else "white-space:nowrap"
    return f'<td style="{_CELL};{_align(column)};{wrap}">{_unbroken(text)}{bar}</td>'


def _plan_cell(plan: str) -> str:
    style = f"{_CELL};text-align:left;font-weight:400;min-width:12em"
    return f'<th scope="row" style="{style}"><code style="{_CODE}">{_unbroken(plan)}</code></th>'


def _unbroken(text: str) -> str:
    """Escaped text in which no line breaks inside a flag, or between a flag and its value."""
    return _FLAG.sub(r'<span style="white-space:nowrap">\g<0></span>', escape(text))


def _bar(parts: Mapping[str, int], most_bytes: int, *, is_predicted: bool = False) -> str:
    spoken = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    pieces = "".join(
        f'<span title="{escape(name)} {format_bytes(size)}" '
        f'style="width:{100 * size / max(1, most_bytes):.2f}%;background-color:{swatch(name).colour};'
        'box-shadow:inset -1px 0 rgba(255,255,255,.7)"></span>'
        for name, size in parts.items()
    )
    look = f"{_BAR};{_PREDICTED}" if is_predicted else _BAR
    return f'<div role="img" aria-label="{escape(spoken)}" style="{look}">{pieces}</div>'


def _legend(comparison: Comparison) -> str:
    return _keys(categories_of([segments(measurement) for measurement in comparison.measurements]))


def _of_models(comparison: Comparison) -> str:
    by_model = models_listing(comparison)
    return "" if by_model is None else f'<div style="margin-top:8px">{listing(by_model)}</div>'


def _keys(names: Sequence[str]) -> str:
    keys = "".join(
        f'<span style="margin-right:16px;white-space:nowrap"><span aria-hidden="true" '
        f'style="{_KEY};background-color:{swatch(name).colour}"></span>{escape(name)}</span>'
        for name in names
    )
    return f'<div style="margin-top:8px">at the peak: {keys}</div>' if keys else ""


def _events(events: tuple[str, ...]) -> str:
    items = "".join(f"<li>{escape(event)}</li>" for event in events)
    return f'<ul style="margin:8px 0 0;padding-left:1.3em">{items}</ul>' if items else ""
