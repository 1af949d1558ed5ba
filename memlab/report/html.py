"""Tables as HTML that lives on in a saved notebook: inline styles, no script, either theme.

Colours of text and lines derive from the page (`currentColor`, translucent grey), so the table
reads on a light and on a dark page. Where styles are stripped (GitHub), a plain table with every number
remains, and in the place of a bar stands in words what its colours show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from memlab.report.segments import categories_of, swatch
from memlab.report.table import Bar, BarLook, Column, ColumnKind, Table, TableRow
from memlab.units import format_bytes

_FLAG = re.compile(r"--[a-z][^ ]*( [^- ][^ ]*(?= --|$))?")
# numbers with their units, and with what belongs to them
_WHOLE = re.compile(r"\([^()]*\d[^()]*\)|(± )?[^ ()]+ (%|[KMGT]?i?B)(?= |$)")
_NOWRAP = '<span style="white-space:nowrap">{}</span>'
_RULE = "rgba(128,128,128,.35)"
_WRAPPER = "container-type:inline-size;overflow-x:auto;overflow-wrap:break-word;font-variant-numeric:tabular-nums;font-size:13px;line-height:1.45"
# smaller on a narrow page, and more so with many columns
_TABLE = "border-collapse:collapse;margin:0;color:inherit;background:transparent;border:0;font-size:clamp({},13px)"
_SMALL, _SMALLER, _MANY_COLUMNS = "11px,2cqw", "9.5px,1.85cqw", 9
_CAPTION = "caption-side:top;text-align:left;font-weight:600;padding:0 0 6px;color:inherit"
# a table may be narrower than its title, which is as wide as the page at most
_TITLE = "width:max-content;max-width:100cqw"
_CELL = f"padding:5px .7cqw 5px 0;vertical-align:top;background:transparent;border:solid {_RULE};border-width:0 0 1px"
_NOTE = f"{_CELL};padding:0 0 5px;text-align:left;white-space:normal"
# not wider than what is to be seen of a table that is scrolled sideways
_IN_SIGHT = "position:sticky;left:0;max-width:min(60em,100cqw)"
_HEAD = f"{_CELL};border-width:0 0 2px;font-weight:600"
# notebooks give code a ground and room of its own
_CODE = "padding:0;font-family:Menlo,Consolas,monospace;background:transparent;color:inherit;font-size:.92em"
# shorter beside many columns and on a narrow page; its words are for pages without styles
_BAR = "display:flex;height:8px;margin-top:4px;width:clamp(52px,100cqw - {}px,170px);font-size:0"
_COLUMN_PIXELS = 95  # that a column without a bar takes, about
_PLAN_PIXELS = 300  # and that of the plans, in two lines
# where the page is wide enough for that, what is written in a column stays in one line
_IN_ONE_LINE = ";min-width:clamp(0px,(100cqw - {}px)*9,{}ch)"
_SENTENCES = ";min-width:clamp(4em,100cqw - 560px,12em)"
_EXPLAINED = "clamp(9em,100cqw - 600px,14em)"
# what is predicted is paler and dashed, in every picture
_PREDICTED = "opacity:.65;border-bottom:1px dashed currentColor"
_GREY = "#9AA5B1"
# the green of a plan that was found, translucent so that it reads on either theme
_FITS = "rgba(0,158,115,.14)"
_BADGE = "color:inherit;border:1px solid #009E73;border-radius:9px;padding:0 7px;font-size:11px;white-space:nowrap"
_ONE_LINE_CHARACTERS = 20
_OVER = "padding:0 1cqw 2px 0;text-align:left;font-weight:400;opacity:.75;background:transparent;border:0"
_OF_CATEGORIES = (BarLook.MEASURED, BarLook.PREDICTED)
_KEY = "display:inline-block;width:10px;height:10px;margin-right:5px"


def table(content: Table) -> str:
    """Write a table.

    Returns:
        A `<div>` that holds the table with its caption, the key of its bars and its foot. All text is escaped.

    Example:
        >>> "gpt2 &lt;124M&gt;</div></caption>" in table(Table("gpt2 <124M>"))
        True
    """
    columns, drawn = [], []
    wide = _COLUMN_PIXELS * sum(column.kind is not ColumnKind.NOTE for column in content.columns)
    for place, column in enumerate(content.columns):
        bars = [bar for each in content.rows if (bar := each.bars[place]) is not None]
        # numbers are set flush right, but for those that have a bar below them
        side = "right" if column.kind is ColumnKind.NUMBER and not bars else "left"
        scale = max((sum(bar.parts.values()) for bar in bars), default=0.0)
        texts = [column.title, *(each.texts[place] for each in content.rows)]
        longest = max(map(len, texts))
        least = ""
        if column.kind is ColumnKind.NUMBER and any(map(_breaks, texts)):
            least = _IN_ONE_LINE.format(wide + _PLAN_PIXELS, longest)
        elif column.kind is ColumnKind.WORDS and longest > _ONE_LINE_CHARACTERS:
            least = _SENTENCES
        columns.append(_Placed(column, f"text-align:{side}", least, scale, _BAR.format(wide)))
        drawn += [bar.parts for bar in bars if bar.look in _OF_CATEGORIES]
    rows = "".join(_row(columns, each) for each in content.rows)
    headed = [each for each in columns if each.column.kind is not ColumnKind.NOTE]
    body = f"<thead>{_heads(headed)}</thead><tbody>{rows}</tbody>" if columns else ""
    key = keys(categories_of(drawn), "margin-top:8px")
    more = "".join(f'<div style="margin-top:8px">{table(inner)}</div>' for inner in content.more)
    foot = "".join(f'<div style="margin-top:4px">{_unbroken(line)}</div>' for line in content.foot)
    size = _SMALLER if len(headed) >= _MANY_COLUMNS else _SMALL
    return (
        f'<div class="memlab-receipt" style="{_WRAPPER}"><table style="{_TABLE.format(size)}">'
        f'<caption style="{_CAPTION}"><div style="{_TITLE}">{escape(content.title)}</div></caption>{body}</table>{key}{more}{foot}</div>'
    )


@dataclass(frozen=True)
class _Placed:
    """A column as it is drawn: to which side its texts are flush, how wide it is at least, what a whole bar stands for, and how long it is."""

    column: Column[Any]
    side: str
    least: str
    scale: float
    bar: str


def _heads(columns: Sequence[_Placed]) -> str:
    """The headings, under one over several columns where there is one."""
    heads = "".join(
        f'<th scope="col" style="{_HEAD};{each.side}{each.least}">{_head(each.column.title)}</th>' for each in columns
    )
    over = [(group, len(list(each))) for group, each in groupby(columns, key=lambda placed: placed.column.group)]
    if len(over) == 1:
        return f'<tr style="background:transparent">{heads}</tr>'
    groups = "".join(
        f'<th scope="colgroup" colspan="{count}" style="{_OVER}">{group}</th>'
        if group
        else f'<td colspan="{count}" style="{_OVER}"></td>'
        for group, count in over
    )
    return f'<tr style="background:transparent">{groups}</tr><tr style="background:transparent">{heads}</tr>'


def _head(title: str) -> str:
    """A heading; a mark is spoken in words."""
    return f'<span title="Pareto-optimal" aria-label="Pareto-optimal">{title}</span>' if len(title) == 1 else title


def _row(columns: Sequence[_Placed], each: TableRow) -> str:
    """A row; its notes stand below it over the whole width, since a wide table would push them out of sight."""
    notes = [text for of, text in zip(columns, each.texts, strict=True) if of.column.kind is ColumnKind.NOTE and text]
    rule = ";border-width:0" if notes else ""
    cells = [
        _plan_cell(text, each, rule) if of.column.kind is ColumnKind.PLAN else _cell(of, text, bar, rule)
        for of, text, bar in zip(columns, each.texts, each.bars, strict=True)
        if of.column.kind is not ColumnKind.NOTE
    ]
    below = "".join(
        f'<td colspan="{len(cells)}" style="{_NOTE}"><div style="{_IN_SIGHT}">{_unbroken(note)}</div></td>'
        for note in notes
    )
    style = f"background:{_FITS if each.fits else 'transparent'}{';opacity:.65' if each.is_left_out else ''}"
    return "".join(f'<tr style="{style}">{content}</tr>' for content in ("".join(cells), below) if content)


def _cell(of: _Placed, text: str, bar: Bar | None, rule: str) -> str:
    """A cell. On a narrow page a sentence goes on in a second line, as what stands behind a number does; the rest stays whole."""
    content, wraps = _unbroken(text), ";white-space:nowrap"
    if of.column.kind is ColumnKind.NUMBER and _breaks(text):
        content, wraps = _WHOLE.sub(_NOWRAP.format(r"\g<0>"), escape(text)), ""
    elif of.column.kind is ColumnKind.WORDS and len(text) > _ONE_LINE_CHARACTERS:
        wraps = ""
    return f'<td style="{_CELL};{of.side}{rule}{wraps}">{content}{_bar(bar, of) if bar is not None else ""}</td>'


def _breaks(number: str) -> bool:
    """Return whether a number goes on in a second line on a narrow page."""
    return " " in number and not _WHOLE.fullmatch(number)


def _plan_cell(plan: str, each: TableRow, rule: str) -> str:
    said = "✓ fits" if each.fits else "this cell" if each.is_new else ""
    mark = f' <span style="{_BADGE}{"" if each.fits else f";border-color:{_GREY}"}">{said}</span>' if said else ""
    below = (
        f'<div style="{"" if each.is_left_out else "opacity:.75;"}font-size:12px">{escape(each.below)}</div>'
        if each.below
        else ""
    )
    style = f"{_CELL};text-align:left;font-weight:400;min-width:{_EXPLAINED if each.below else '10em'}{rule}"
    # an ablation has most columns: on a narrow page its flags and their values stand in two lines
    words = escape(plan) if each.below else _unbroken(plan)
    return f'<th scope="row" style="{style}"><code style="{_CODE}">{words}</code>{mark}{below}</th>'


def _bar(bar: Bar, of: _Placed) -> str:
    whole = sum(bar.parts.values())
    width = f"width:{100 * whole / max(1e-12, of.scale):.2f}%"
    if bar.look is BarLook.TOO_SMALL:
        return f'<div aria-hidden="true" style="{of.bar}"><span style="{width};border:1px dashed #D9534F"></span></div>'
    if bar.look is BarLook.SPEED:
        return f'<div aria-hidden="true" style="{of.bar};max-width:90px"><span style="{width};background-color:{_GREY}"></span></div>'
    spoken = ", ".join(f"{name} {format_bytes(size)}" for name, size in bar.parts.items())
    pieces = "".join(
        f'<span title="{escape(name)} {format_bytes(size)}" '
        f'style="width:{100 * size / max(1, of.scale):.2f}%;background-color:{swatch(name).colour};'
        f'box-shadow:inset -1px 0 #fffb">{escape(name)} {100 * size / max(1, whole):.0f} % </span>'
        for name, size in bar.parts.items()
    )
    look = f"{of.bar};{_PREDICTED}" if bar.look is BarLook.PREDICTED else of.bar
    return f'<div role="img" aria-label="{escape(spoken)}" style="{look}">{pieces}</div>'


def keys(names: Sequence[str], style: str) -> str:
    """Return what the colours of categories mean, in a line; nothing without any."""
    # spaces are for pages without styles
    spans = " ".join(
        f'<span style="margin-right:12px;white-space:nowrap"><span aria-hidden="true" '
        f'style="{_KEY};background-color:{swatch(name).colour}"></span>{escape(name)}</span>'
        for name in names
    )
    return f'<div style="{style}">at the peak: {spans}</div>' if spans else ""


def _unbroken(text: str) -> str:
    """Escaped text in which no line breaks between a flag and its value, or inside of them but after a comma."""
    return _FLAG.sub(lambda flag: "<wbr>".join(map(_NOWRAP.format, re.split("(?<=,)", flag[0]))), escape(text))
