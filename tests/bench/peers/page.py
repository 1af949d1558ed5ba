"""Results as text, as a section of `docs/compared.md` and as a page: functions of records, with nothing but the standard library.

Verdicts are words, and marks of different shape, so nothing hangs on a colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from memlab.units import format_bytes, format_seconds
from tests.bench.peers.picture import dots
from tests.bench.peers.records import MEMORY, SCALES, Contest, Record, Status, newest
from tests.bench.peers.verdicts import Pairing, Ratio, Verdict, pairings

Causes = Mapping[tuple[str, str], str]
_BYTES = {MEMORY.key}


@dataclass(frozen=True)
class Sheet:
    """All pairings of one device at one scale.

    Args:
        device: in words.
        scale: one of `SCALES`.
        pairings: in the order of the contests.
        records: that they were made of.
    """

    device: str
    scale: str
    pairings: tuple[Pairing, ...]
    records: tuple[Record, ...]

    @property
    def versions(self) -> dict[str, str]:
        """Of all packages that took part."""
        found = {name: at for each in self.records for name, at in each.key.versions.items() if at}
        return dict(sorted(found.items()))

    @property
    def dates(self) -> str:
        """First and last day of the records."""
        days = sorted({each.date for each in self.records if each.status is Status.MEASURED})
        return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"

    @property
    def heading(self) -> str:
        """Device, scale, date."""
        return f"{self.device} · {self.scale} scale · {self.dates}"

    @property
    def about(self) -> str:
        """Versions in one line."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    @property
    def compared(self) -> tuple[Pairing, ...]:
        """Pairings with figures."""
        return tuple(each for each in self.pairings if each.ratios)

    @property
    def missing(self) -> tuple[Pairing, ...]:
        """Pairings without."""
        return tuple(each for each in self.pairings if not each.ratios)


def sheets(contests: Sequence[Contest], records: Iterable[Record], scales: Sequence[str] = SCALES[1:]) -> list[Sheet]:
    """One sheet for each device, at the largest of the scales it has records of.

    Args:
        contests: in the order of the table.
        records: of all devices.
        scales: that count, from small to large.
    """
    latest = [each for each in newest(records) if each.key.scale in scales]
    found = []
    for device in dict.fromkeys(each.key.device for each in latest):
        scale = max((each.key.scale for each in latest if each.key.device == device), key=scales.index)
        own = tuple(each for each in latest if each.key.device == device and each.key.scale == scale)
        found.append(Sheet(device, scale, tuple(pairings(contests, own, scale, device)), own))
    return found


def text(sheet: Sheet) -> str:
    """A sheet as aligned text."""
    rows = [
        ("", "memlab against", *_HEADS),
        *((each.contest.title, each.peer.title, *_cells(each)) for each in sheet.compared),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    missing = [f"{each.contest.title}: {each.peer.title}: {each.reason}" for each in sheet.missing]
    return "\n".join([sheet.heading, sheet.about, "", *lines, *([""] if missing else []), *missing])


_HEADS = ("peak allocated", "time", "further")


def _cells(pairing: Pairing) -> tuple[str, str, str]:
    memory = [each for each in pairing.ratios if each.measure is MEMORY]
    rest = [each for each in pairing.ratios if each.measure is not MEMORY]
    further = [*(f"{each.measure.title} {_ratio(each)}" for each in rest[:-1]), *_remarks(pairing)]
    return _joined(memory), _joined(rest[-1:]), "; ".join(further)


def _joined(ratios: Sequence[Ratio]) -> str:
    return _ratio(ratios[0]) if ratios else "–"


def _ratio(ratio: Ratio) -> str:
    """As in "0.83 × ahead", with the spread between rounds where there is one."""
    low, median, high = (_times(each) for each in (ratio.low, ratio.median, ratio.high))
    spread = "" if low == high else f" ({low} to {high})"
    return f"{median} ×{spread} {ratio.verdict}"


def _times(ratio: float) -> str:
    return f"{ratio:.4f}" if ratio < 0.1 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _remarks(pairing: Pairing) -> list[str]:
    remarks = [*pairing.notes]
    if pairing.same_result is False:
        remarks.append(f"ANOTHER RESULT: losses differ by {pairing.difference:.1e}")
    kept = [_first(records, "rows") for records in (pairing.ours, pairing.theirs)]
    if kept[0] and kept[1] and kept[0] != kept[1]:
        remarks.append(f"batch of {kept[0]:.0f} kept, the peer's is {kept[1]:.0f}")
    tried = [_first(records, "trials") for records in (pairing.ours, pairing.theirs)]
    if tried[0] and tried[1]:
        remarks.append(f"{tried[0]:.0f} trials, the peer {tried[1]:.0f}")
    return remarks


def _first(records: Sequence[Record], number: str) -> float | None:
    return next((each.measured.numbers.get(number) for each in records if each.measured is not None), None)


def causes_of(sheet: Sheet, causes: Causes) -> list[tuple[Pairing, Ratio, str]]:
    """What memlab takes more of, with its cause."""
    return [
        (pairing, ratio, causes.get((pairing.name, ratio.measure.key), "cause not known yet"))
        for pairing in sheet.compared
        for ratio in pairing.behind
    ]


# --- the section of docs/compared.md ---------------------------------------------------------------


def section(found: Sequence[Sheet], causes: Causes) -> str:
    """Return the section: for each device a table, what fell short and why, and what was not run."""
    return "\n\n".join(_markdown(each, causes) for each in found)


def _markdown(sheet: Sheet, causes: Causes) -> str:
    verdicts = [ratio.verdict for each in sheet.compared for ratio in each.ratios]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in Verdict if each in verdicts)
    parts = [f"**{sheet.heading}** ({sheet.about}): {counts}.", _markdown_table(sheet)]
    short = causes_of(sheet, causes)
    if short:
        parts.append("Behind, and why:\n\n" + "\n".join(_markdown_cause(*each) for each in short))
    reasons = dict.fromkeys(each.reason for each in sheet.missing)
    parts += [f"Not compared here ({each}): {_titles_of(sheet.missing, each)}." for each in reasons]
    return "\n\n".join(parts)


def _titles_of(missing: Iterable[Pairing], reason: str) -> str:
    return "; ".join(each.peer.title for each in missing if each.reason == reason)


def _markdown_table(sheet: Sheet) -> str:
    lines = ["| work | memlab against | " + " | ".join(_HEADS) + " |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.contest.title} | {each.peer.title} | " + " | ".join(_cells(each)) + " |" for each in sheet.compared
    ]
    return "\n".join(lines)


def _markdown_cause(pairing: Pairing, ratio: Ratio, cause: str) -> str:
    return f"- {pairing.contest.title}, against {pairing.peer.title}, {ratio.measure.title} {_times(ratio.median)} ×: {cause}."


# --- the page -------------------------------------------------------------------------------------

_STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfb;--ink:#22262b;--faint:#6b7178;--rule:#d9dadd;--ahead:#00734f;--behind:#b3261e}
@media(prefers-color-scheme:dark){:root{--paper:#17191c;--ink:#e6e7e9;--faint:#9aa1a9;--rule:#3a3e44;--ahead:#4cc79a;--behind:#ff8a80}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th,td{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}.ahead{color:var(--ahead)}.behind{color:var(--behind);font-weight:600}
.wide{overflow-x:auto}svg{max-width:100%;height:auto}.faint{color:var(--faint);font-size:13px}
"""
_INTRODUCTION = (
    "Every way of doing the work ran in a process of its own, in turns. Ratios are memlab's number over the peer's, the median of the "
    "rounds, with the least and the greatest. Less is better: below 1 memlab is ahead. A ratio is level where rounds disagree, and within "
    "2 % (0.5 % for bytes); times of fewer than three rounds are undecided. Losses after training are compared, so that faster and wrong does not count."
)


def html(found: Sequence[Sheet], causes: Causes) -> str:
    """A page that needs nothing else: tables and plots, on light and on dark, readable without colour."""
    body = "".join(_html_sheet(each, causes) for each in found)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>memlab against its peers</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>memlab against its peers</h1><p>{_INTRODUCTION}</p>{body}</body></html>\n"
    )


def _html_sheet(sheet: Sheet, causes: Causes) -> str:
    plots = "".join(_plot(sheet, title, wanted) for title, wanted in _PLOTS)
    return (
        f"<h2>{escape(sheet.heading)}</h2><p class='faint'>{escape(sheet.about)}</p>"
        f"{plots}<div class='wide'>{_html_table(sheet)}</div>{_html_causes(sheet, causes)}{_html_missing(sheet)}{_html_notes(sheet)}"
    )


_PLOTS: tuple[tuple[str, Callable[[Ratio], bool]], ...] = (
    ("Peak allocated, memlab over the peer", lambda ratio: ratio.measure is MEMORY),
    ("Time, memlab over the peer", lambda ratio: ratio.measure is not MEMORY),
)


def _plot(sheet: Sheet, title: str, wanted: Callable[[Ratio], bool]) -> str:
    rows = [
        (f"{each.contest.title} · {each.peer.title}", ratio)
        for each in sheet.compared
        for ratio in [[ratio for ratio in each.ratios if wanted(ratio)][-1:]]
        for ratio in ratio
    ]
    return f"<h3>{escape(title)}</h3>{dots(title, rows)}" if rows else ""


def _html_table(sheet: Sheet) -> str:
    head = "<tr><th>work</th><th>memlab against</th><th>of what</th><th class='n'>memlab</th><th class='n'>peer</th><th class='n'>ratio</th><th>verdict</th><th>result</th></tr>"
    return f"<table>{head}{''.join(_html_row(each, ratio) for each in sheet.compared for ratio in each.ratios)}</table>"


def _html_row(pairing: Pairing, ratio: Ratio) -> str:
    verdict = f"<td class='{ratio.verdict}'>{ratio.verdict}</td>"
    numbers = [_value(ratio, ratio.ours), _value(ratio, ratio.theirs), _ratio(ratio).rpartition(" ")[0]]
    cells = "".join(f"<td class='n'>{escape(each)}</td>" for each in numbers)
    titles = "".join(
        f"<td>{escape(each)}</td>" for each in (pairing.contest.title, pairing.peer.title, ratio.measure.title)
    )
    return f"<tr>{titles}{cells}{verdict}<td>{escape(_result(pairing))}</td></tr>"


def _value(ratio: Ratio, value: float) -> str:
    return format_bytes(value) if ratio.measure.key in _BYTES else format_seconds(value)


def _result(pairing: Pairing) -> str:
    if pairing.same_result is None:
        return "not compared"
    return f"{'same' if pairing.same_result else 'ANOTHER'} loss ({pairing.difference:.0e})"


def _html_causes(sheet: Sheet, causes: Causes) -> str:
    items = [_markdown_cause(*each)[2:] for each in causes_of(sheet, causes)]
    return _list("Behind, and why", items)


def _html_missing(sheet: Sheet) -> str:
    return _list(
        "Not compared here", [f"{each.contest.title}: {each.peer.title}: {each.reason}" for each in sheet.missing]
    )


def _html_notes(sheet: Sheet) -> str:
    notes = [
        f"{each.contest.title}, {each.peer.title}: {'; '.join(_remarks(each))}"
        for each in sheet.compared
        if _remarks(each)
    ]
    notes += [
        f"{each.title}: {each.note}"
        for each in dict.fromkeys(pairing.contest for pairing in sheet.pairings)
        if each.note
    ]
    return _list("Notes", notes)


def _list(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<h3>{escape(title)}</h3><ul>{''.join(f'<li>{escape(each)}</li>' for each in items)}</ul>"
