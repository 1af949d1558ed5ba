"""Marks of plan changes in the live figure: a line each, and names that stand clear of one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from memlab.records.live_state import Change, Moment
from memlab.report.wording import flags

# a picture in the narrowest window, in pixels, and how much of it a character of a label takes
_WIDTH_PIXELS, _HEIGHT_PIXELS, _CHARACTER_PIXELS, _LABEL_PIXELS = 290, 205, 5.8, 14
_MOST_LABEL_ROWS = 3


@dataclass(frozen=True)
class Label:
    """The mark of a change."""

    step: int
    plan: str
    text: str
    at: float
    start: float
    stop: float
    row: int

    def covers(self, other: Label) -> bool:
        """The two texts stand on each other."""
        return self.row == other.row and self.start < other.stop and other.start < self.stop

    def crosses(self, other: Label) -> bool:
        """A line runs through the other's text; a line ends at the row of its own text."""
        return any(
            one.row <= text.row and text.start < one.at < text.stop for one, text in ((self, other), (other, self))
        )


def change_labels(moment: Moment) -> list[Label]:
    """Names of the changes, placed so that none stands on another.

    The newest are placed first: where room runs out, the oldest lose theirs.
    """
    if not moment.points:
        return []
    start = moment.points[0].step - 0.5
    steps = max(1, moment.points[-1].step + 0.5 - start)
    numbers = {measurement.plan: number for number, measurement in enumerate(moment.measurements, 1)}
    labels: list[Label] = []
    for each, was in reversed(list(zip(moment.changes, _plans_before(moment), strict=True))):
        at = (each.step - 0.5 - start) / steps * _WIDTH_PIXELS
        labels.append(_placed(each, was, numbers.get(each.plan), at, labels))
    used = sorted({label.row for label in labels})
    return [replace(label, row=used.index(label.row)) for label in reversed(labels)]


def _placed(each: Change, was: str, number: int | None, at: float, taken: Sequence[Label]) -> Label:
    """The best place there is left: no crossing if possible, the number alone if need be."""
    words = what_changed(was, each.plan)
    head = f"<b>{number}</b>" if number else "·"
    candidates = [
        Label(each.step, each.plan, text, at, start, start + long, row)
        for text, characters in ((f"{head} {escape(words)}", len(words) + 2), (head, 2))
        for long in (characters * _CHARACTER_PIXELS + 6,)
        for start in (at, at - long)
        for row in range(_MOST_LABEL_ROWS)
        if start > -8 and start + long < _WIDTH_PIXELS + 8
    ]
    free = [label for label in candidates if not any(label.covers(other) for other in taken)]
    clear = [label for label in free if not any(label.crosses(other) for other in taken)]
    named = [label for label in free if label.text != head]
    bare = Label(each.step, each.plan, "", at, at, at, 0)
    return next(iter([*(label for label in clear if label in named), *named, *clear, *free, bare]))


def _plans_before(moment: Moment) -> list[str]:
    if not moment.changes:
        return []
    earlier = [point.plan for point in moment.points if point.step < moment.changes[0].step]
    return [earlier[-1] if earlier else "", *(each.plan for each in moment.changes[:-1])]


def what_changed(was: str, now: str) -> str:
    """The flags that came and went, short enough for a mark; the whole plan where there is nothing to compare.

    Example:
        >>> what_changed("--accumulate 4", "--accumulate 4 --checkpoint")
        '+ checkpoint'
        >>> what_changed("--accumulate 4 --bf16", "--accumulate 8 --bf16")
        'accumulate 8'
        >>> what_changed("--accumulate 4 --bf16", "--bf16")
        '− accumulate'
        >>> what_changed("--bf16", "as written")
        'as written'
    """
    if not was.startswith("--") or not now.startswith("--"):
        return now
    old, new = ({flag.split()[0]: flag for flag in flags(plan)} for plan in (was, now))
    gone = [f"− {name[2:]}" for name in old if name not in new]
    came = [f"{'' if name in old else '+ '}{flag[2:]}" for name, flag in new.items() if flag != old.get(name)]
    return " ".join([*gone, *came]) or now


def share_below(rows: int) -> float:
    """Share of the picture's height that is left below so many rows of names."""
    return 1 - (rows * _LABEL_PIXELS + 4) / _HEIGHT_PIXELS


def change_lines(labels: Sequence[Label]) -> list[dict[str, Any]]:
    """Lines of plotly, from the axis up to the names."""
    line = {"color": "rgba(128,128,128,.8)", "dash": "dot", "width": 1.2}
    return [
        {"type": "line", "xref": "x", "x0": each.step - 0.5, "x1": each.step - 0.5, "yref": "y domain",
         "y0": 0, "y1": 1 - each.row * _LABEL_PIXELS / _HEIGHT_PIXELS, "line": line}
        for each in labels
    ]  # fmt: skip


def change_names(labels: Sequence[Label]) -> list[dict[str, Any]]:
    """Annotations of plotly; the whole plan is in the hover text."""
    return [
        {"text": each.text, "x": each.step - 0.5, "xref": "x", "y": 1, "yref": "y domain", "yanchor": "top",
         "yshift": -each.row * _LABEL_PIXELS, "xanchor": "right" if each.start < each.at else "left",
         "showarrow": False, "font": {"size": 11}, "hovertext": escape(f"step {each.step}: {each.plan}")}
        for each in labels
    ]  # fmt: skip
