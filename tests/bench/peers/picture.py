"""Ratios as dots on a line, with their spread: an SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tests.bench.peers.verdicts import Ratio, Verdict

_LEFT, _RIGHT, _WIDTH = 600, 1010, 1140
_ROW, _TOP, _BOTTOM = 19, 22, 24
_TICKS = (0.05, 0.1, 0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0, 10.0, 20.0)


def dots(title: str, rows: Sequence[tuple[str, Ratio]]) -> str:
    """One line per ratio, on a logarithmic scale with 1 marked; the shape of a dot is its verdict.

    Args:
        title: said by screen readers, with the rows.
        rows: a name and a ratio each, one or more.
    """
    low = min(0.8, *(each.low for _, each in rows), 0.8)
    high = max(1.25, *(each.high for _, each in rows), 1.25)

    def at(ratio: float) -> float:
        return _LEFT + (math.log(ratio) - math.log(low)) / (math.log(high) - math.log(low)) * (_RIGHT - _LEFT)

    height = _TOP + _ROW * len(rows) + _BOTTOM
    ticks = "".join(_tick(at(each), each, height) for each in _TICKS if low <= each <= high)
    drawn = "".join(_row(name, ratio, _TOP + _ROW * (number + 0.5), at) for number, (name, ratio) in enumerate(rows))
    said = "; ".join(f"{name}: {ratio.median:.2f}, {ratio.verdict}" for name, ratio in rows)
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" font-size="12" fill="currentColor">'
        f"<title>{escape(title)}</title><desc>{escape(said)}</desc>{ticks}{drawn}{_key()}</svg>"
    )


def _tick(x: float, ratio: float, height: int) -> str:
    strong = 'stroke="currentColor" stroke-width="1.5"' if ratio == 1 else 'stroke="currentColor" stroke-opacity=".2"'
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}" {strong}/>'
        f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" fill-opacity=".75">{ratio:g}</text>'
    )


def _row(name: str, ratio: Ratio, y: float, at: object) -> str:
    low, median, high = (at(each) for each in (ratio.low, ratio.median, ratio.high))  # type: ignore[operator]
    return (
        f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-width="2" stroke-opacity=".45"/>'
        f"{_mark(ratio.verdict, median, y)}"
        f'<text x="{_RIGHT + 14}" y="{y + 4:.1f}">{ratio.median:.2f} {ratio.verdict}</text>'
    )


def _mark(verdict: Verdict, x: float, y: float) -> str:
    """A triangle that points to less, a circle, a square; an empty circle where nothing is decided."""
    if verdict is Verdict.AHEAD:
        return f'<path d="M{x - 6:.1f} {y:.1f}l9 -5v10z" fill="var(--ahead,currentColor)"/>'
    if verdict is Verdict.BEHIND:
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" fill="var(--behind,currentColor)"/>'
    filled = "" if verdict is Verdict.LEVEL else ' fill="none" stroke="currentColor" stroke-width="1.5"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"{filled}/>'


def _key() -> str:
    places = zip(Verdict, (_LEFT, _LEFT + 70, _LEFT + 130, _LEFT + 200), strict=True)
    return "".join(f'{_mark(each, x, 10)}<text x="{x + 9}" y="14">{each}</text>' for each, x in places)
