"""The line that says where a live run stands."""

from __future__ import annotations

from memlab.live.feed import Feed
from memlab.live.pending_changes import PendingChanges
from memlab.plan.fields import BY_NAME
from memlab.records.live_state import Activity, Asked
from memlab.units import format_bytes, format_seconds


def status_line(activity: Activity, name: str, feed: Feed, changes: PendingChanges, doing: str) -> str:
    """What a model called `name` does, under which plan and how fast, what is waited for, and what is done beside it."""
    if activity is Activity.GONE:
        return f"{name} is deleted: this panel is over"
    parts = [str(activity)]
    newest, plan = feed.newest, changes.plan
    if newest is not None:
        parts = [f"{activity}, step {feed.step}", plan.label]
    if newest is not None and newest.plan == plan.label:
        parts.append(f"{format_seconds(newest.seconds)} a step")
    measured = feed.measurements.get(plan.label)
    if measured is not None and measured.peak_allocated_bytes:
        parts.append(f"peak {format_bytes(measured.peak_allocated_bytes)}")
    waiting = (each for each in changes.toggles if each.asked is Asked.PENDING)
    parts += [f"{BY_NAME[each.field].title.lower()} {each.text}" for each in waiting]
    return " · ".join([*parts, *filter(None, [doing])])
