"""The demo in the browser: a page that replays a recorded run in the panel's own code, without a kernel.

python -m tests.docs.demo FILE        write the page

A page has no Python to ask. So everything that `RunReplay` answers is written down when the page is made: the states that it
goes through while it plays, and what becomes of each setting that somebody asks for. `demo.mjs` stands for the kernel.

A place is where a replay stands: playing or paused somewhere in a *stretch* (steps under one plan), at the end of a stretch,
or at the end of the recording. Within a stretch the answers are the same.
"""

from __future__ import annotations

import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from memlab.exporting import TARGETS
from memlab.jupyter.controls import MAGIC
from memlab.jupyter.panel import Panel
from memlab.live.effects import effect_of
from memlab.live.replaying import RunReplay
from memlab.plan import FIELDS
from memlab.records.live_state import Activity
from memlab.records.run_record import RunRecord
from tests.docs.patches import between
from tests.helpers.hand import Hand

RECORD = Path(__file__).parents[2] / "docs" / "demo_run.json"
TICK_SECONDS = 0.25  # as a panel's own clock
_HERE = Path(__file__).parent
_DIGITS = 7  # as many as a panel sends of a coordinate

State = dict[str, Any]


class Shown:
    """A panel on the recording."""

    def __init__(self, record: RunRecord) -> None:
        self.replay = RunReplay(record)
        self.panel = Panel(self.replay)
        self.hand = Hand(self.panel)

    @property
    def label(self) -> str:
        return self.replay.moment().plan.label

    @property
    def activity(self) -> Activity:
        return self.replay.moment().activity

    def state(self) -> State:
        """What the page draws from, as JSON has it."""
        widget = self.panel.widget
        return _plain({"controls": self.controls(), "figure": widget.figure, "table": widget.table})

    def controls(self) -> State:
        """What controls show; with what each choice would give, since the page has nobody to ask."""
        moment, shown = self.replay.moment(), self.hand.shown
        rows = []
        for spec, row in zip(FIELDS, shown["settings"], strict=True):
            effects = {text: effect_of(moment, spec.name, text) for _, text in row["choices"]}
            said = {text: [each.text, each.refused] for text, each in effects.items() if each is not None}
            rows.append(
                {name: value for name, value in row.items() if name not in ("effect", "why")} | {"effects": said}
            )
        return _plain({name: value for name, value in shown.items() if name != "heard"} | {"settings": rows})

    def play_to(self, tick: int) -> None:
        """Play from the first step for so many ticks of the clock."""
        self.hand.press("run")
        self.replay.advance(tick * TICK_SECONDS)


def demo(record: RunRecord) -> dict[str, Any]:
    """Return all that the page knows."""
    frames, pauses, ticks, labels = _played(record)
    end = Shown(record)
    ends = end.state()
    firsts = [0, *(place for place, (one, other) in enumerate(pairwise(labels), 1) if one != other)]
    plans = [labels[first] for first in firsts]
    answers = _Answers(record, [ticks[first] for first in firsts])
    stretches = [
        {"first": first, "last": stop - 1, "playing": answers.playing(number), "standing": answers.standing(number)}
        for number, (first, stop) in enumerate(pairwise([*firsts, len(frames)]))
    ]
    return {
        "fixed": _plain(end.panel.widget.fixed),
        "off": {spec.name: spec.choices[0] for spec in FIELDS},
        "tick": TICK_SECONDS * 1000,
        "ticks": ticks,
        "first": ends,
        # from the end to the first frame, and from each frame to the next one
        "frames": [between(one, other) for one, other in pairwise([ends, *frames])],
        "pauses": [between(one["controls"], other) for one, other in zip(frames, pauses, strict=True)],
        "stretches": stretches,
        "end": answers.at_end(),
        "stands": {number: between(ends, state) for number, state in answers.stands.items()},
        "code": {label: _code(record, tick) for label, tick in zip(plans, (ticks[each] for each in firsts), strict=True)},
        "plans": plans,
    }  # fmt: skip


def _played(record: RunRecord) -> tuple[list[State], list[State], list[int], list[str]]:
    """Return the states while it plays, what controls show where it is paused there, when, and under which plan."""
    shown = Shown(record)
    frames, pauses, ticks, labels = [], [], [], []
    shown.play_to(0)
    tick, step = 0, None
    while shown.activity is Activity.REPLAYING:
        if (now := shown.replay.moment().step) != step:
            step = now
            frames.append(shown.state())
            ticks.append(tick)
            labels.append(shown.label)
            shown.hand.press("pause")
            pauses.append(shown.controls())
            shown.hand.press("pause")
        shown.replay.advance(TICK_SECONDS)
        tick += 1
    shown.panel.close()
    return frames, pauses, [*ticks, tick], labels


class _Answers:
    """What becomes of each setting that is asked for, by where the replay stands."""

    def __init__(self, record: RunRecord, ticks: list[int]) -> None:
        self._record, self._ticks = record, ticks
        self._changes = [each.step for each in RunReplay(record).moment().changes]
        assert len(self._changes) == len(ticks) - 1
        self.stands: dict[int, State] = {}  # by stretch, at its end, where an answer leads there

    def playing(self, stretch: int) -> dict[str, Any]:
        """Answers while it plays."""
        return self._all(stretch, is_paused=False)

    def standing(self, stretch: int) -> dict[str, Any]:
        """Answers where it is paused."""
        return self._all(stretch, is_paused=True)

    def at_end(self) -> dict[str, Any]:
        """Answers where it is shown whole."""
        return self._all(None, is_paused=True)

    def _all(self, stretch: int | None, *, is_paused: bool) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        shown = self._placed(stretch, is_paused=is_paused)
        before = shown.hand.shown
        for key, ask in _asked(shown):
            place = shown.replay.moment().step, shown.activity
            ask(shown)
            answers[key] = self._answer(shown, before, place)
            if (shown.replay.moment().step, shown.activity) != place:
                shown.panel.close()
                shown = self._placed(stretch, is_paused=is_paused)
        shown.panel.close()
        return answers

    def _placed(self, stretch: int | None, *, is_paused: bool) -> Shown:
        shown = Shown(self._record)
        if stretch is not None:
            shown.play_to(self._ticks[stretch])
            if is_paused:
                shown.hand.press("pause")
        return shown

    def _answer(self, shown: Shown, before: State, place: tuple[int, Activity]) -> Any:
        """Return the number of a stretch to go to, "end", None where it stays, or what a refusal changes of what is shown."""
        after = shown.hand.shown
        if (shown.replay.moment().step, shown.activity) == place:
            rows = {
                number: row["said"]
                for number, row in enumerate(after["settings"])
                if row["said"] != before["settings"][number]["said"]
            }
            assert after["line"].startswith(before["line"])
            return (
                {"rows": rows, "line": after["line"].removeprefix(before["line"]), "said": after["said"]}
                if rows
                else None
            )
        if shown.activity is Activity.OVER:
            return "end"
        stretch = bisect_right(self._changes, shown.replay.moment().step)
        if shown.activity is Activity.PAUSED:
            self.stands[stretch] = shown.state()
        return stretch


def _asked(shown: Shown) -> Iterator[tuple[str, Callable[[Shown], None]]]:
    if shown.hand.can_press("find"):
        yield "find", lambda each: each.hand.press("find")
    for spec in FIELDS:
        for text in spec.choices:
            yield f"{spec.name}={text}", partial(_ask, field=spec.name, text=text)


def _ask(shown: Shown, field: str, text: str) -> None:
    shown.replay.ask(field, text)


def _code(record: RunRecord, tick: int) -> dict[str, list[str]]:
    """Return, by target, the code of the plan in force then, and the error where there is none."""
    shown = Shown(record)
    shown.play_to(tick)
    made = {}
    for target in (MAGIC, *TARGETS):
        before = shown.hand.shown["errors"]
        shown.hand.send("target", text=target)
        shown.hand.press("copy")
        errors = shown.hand.shown["errors"]
        failed = errors != before
        made[target] = ["" if failed else shown.hand.shown["code"], errors.splitlines()[-1] if failed else ""]
    shown.panel.close()
    return made


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: no tuples, no number that JSON lacks, and no more digits than are drawn."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def page(record: RunRecord) -> str:
    """Return the page, with all that it needs."""
    shown = Shown(record)
    widget = shown.panel.widget
    known = json.dumps(demo(record), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    code = f"{widget._esm}\n{(_HERE / 'demo.mjs').read_text(encoding='utf-8')}".replace("</script", "<\\/script")
    filled = {"TITLE": "memlab in the browser", "CSS": widget._css, "KNOWN": known, "CODE": code}
    made = (_HERE / "demo.html").read_text(encoding="utf-8")
    for name, text in filled.items():
        made = made.replace(f"[[{name}]]", text, 1)
    shown.panel.close()
    return made


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(RunRecord.load(RECORD)), encoding="utf-8")
