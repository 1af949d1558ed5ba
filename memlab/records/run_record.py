"""`RunRecord`: a run as one JSON file, to be shared and shown again on a machine without a GPU.

Formats, so far:

- 1: without a number; settings tried, steps, versions, and later predictions.
- 2: what a panel shows as well: points, plan changes, rescues, events, budget and device.

Fields that are added do not change the number: what a reader does not know it passes over. The number changes when an older
memlab would misread a file. Numbers that JSON has not (infinities, no number at all) are written as text.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from memlab.errors import MemlabError
from memlab.records import Prediction, Rescue, StepRecord
from memlab.records.comparison import Comparison
from memlab.records.live_state import Change, LivePoint

FORMAT = 2
_MOST_STEPS = 2000
_WHAT_TO_DO = "expected a file that %memfit record or RunRecord.save wrote"
_LARGEST = 2**63
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True)
class RunRecord:
    """A run as one JSON file.

    Args:
        comparison: the settings tried, with the timeline of a step of each.
        steps: steps of the loop, in order; the newest 2,000 are kept.
        versions: package versions of the machine it ran on.
        predictions: every plan that was predicted, whether it was run or not.
        title: what was trained with what, on what; empty for the title of the comparison.
        device: name of the device; empty for the device of the first measurement.
        capacity_bytes: size of the device, or None where it is not limited.
        budget_bytes: the budget line, or None.
        points: the steps as a panel drew them, see `memlab.live.feed`.
        changes: plan changes, oldest first.
        rescues: rescues of the loop, oldest first.
        events: what happened on the way, in words; empty for the events of the comparison.
        recorded_at: when, in words, as in "2026-11-21 15:11 UTC"; empty when unknown.

    Example:
        >>> from memlab.records import Measurement
        >>> m = Measurement("as written", "NVIDIA H200", 2**30, None, 0, {}, (), (0.5,), 8, 0)
        >>> record = RunRecord(Comparison("gpt2 124M", (m,)))
        >>> RunRecord.from_json(record.to_json()) == record
        True
    """

    comparison: Comparison
    steps: tuple[StepRecord, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    predictions: tuple[Prediction, ...] = ()
    title: str = ""
    device: str = ""
    capacity_bytes: int | None = None
    budget_bytes: int | None = None
    points: tuple[LivePoint, ...] = ()
    changes: tuple[Change, ...] = ()
    rescues: tuple[Rescue, ...] = ()
    events: tuple[str, ...] = ()
    recorded_at: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps)[-_MOST_STEPS:])

    def to_json(self) -> str:
        """The run as JSON, of the newest format."""
        return json.dumps({"format": FORMAT, **_plain(self)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read what `to_json` wrote, in this version of memlab or an older one.

        Plans are read as the labels they are, so that a plan of a memlab with more techniques is no error.

        Raises:
            MemlabError: no run record, a damaged one, or one of a newer format; in one line.
        """
        try:
            loaded = json.loads(text)
            if not isinstance(loaded, dict):
                raise ValueError("no JSON object")
            number = loaded.get("format", 1)
            if isinstance(number, int) and number > FORMAT:
                raise MemlabError(
                    f"run record: written by memlab with format {number}; this one reads up to {FORMAT}: upgrade memlab"
                )
            found: RunRecord = _read(cls, loaded, "run")
        except (ValueError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise MemlabError(f"not a run record of memlab, or a damaged one ({reason}): {_WHAT_TO_DO}") from None
        return found

    def save(self, file: Path) -> None:
        """Write the run into a file.

        Raises:
            MemlabError: the file cannot be written.
        """
        try:
            file.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise MemlabError(f"{file}: {error.strerror}") from None

    @classmethod
    def load(cls, file: Path) -> RunRecord:
        """Read a run from a file.

        Raises:
            MemlabError: no such file, or it holds no run record; in one line.
        """
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise MemlabError(f"{file}: {error.strerror}") from None
        except (UnicodeDecodeError, MemlabError) as error:
            raise MemlabError(f"{file}: {error}") from None


def _plain(value: Any) -> Any:
    """A record as what JSON has."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def _read(expected: Any, value: Any, where: str) -> Any:
    """Return what was written of a value, as the type that is expected; `where` is its place in the file.

    Raises:
        ValueError: it is of another type, or something is missing in it.
    """
    origin, parts = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (part for part in parts if part is not type(None))
        return None if value is None else _read(kind, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(_read(kind, each, f"{where}[{number}]") for number, (kind, each) in pairs)
    if isinstance(value, dict) and is_dataclass(expected):
        return _record(expected, value, where)
    if isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: _read(parts[1], each, f"{where}.{name}") for name, each in value.items()}
    if expected is float and value in _NO_NUMBERS:
        return float(value)
    if origin is None and _fits(expected, value):
        return expected(value)
    raise ValueError(f"{where} is {json.dumps(value)[:60]}")


def _fits(expected: type, value: Any) -> bool:
    """Return whether a value of JSON is one of a plain type."""
    if expected in (int, float):
        is_number = isinstance(value, (int, expected)) and not isinstance(value, bool)
        return is_number and not _LARGEST < abs(value) < math.inf
    return isinstance(value, str if issubclass(expected, Enum) else expected)


def _record(expected: Any, loaded: Mapping[str, Any], where: str) -> Any:
    known = {each.name: each for each in fields(expected)}
    needed = [each.name for each in known.values() if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in needed if name not in loaded]:
        raise ValueError(f"{where} has no {missing[0]}")
    kinds = _types_of(expected)
    return expected(**{name: _read(kinds[name], loaded[name], f"{where}.{name}") for name in known if name in loaded})


@cache
def _types_of(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)
