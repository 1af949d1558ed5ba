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
_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
        loaded = _object_in(text)
        _require_known_format(loaded)
        found: RunRecord = _read(cls, loaded, "")
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
        except UnicodeDecodeError:
            raise MemlabError(f"{file}: not a run record of memlab: not text; {_WHAT_TO_DO}") from None
        except MemlabError as error:
            raise MemlabError(f"{file}: {error}") from None


# -- the file as a whole


def _object_in(text: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        raise _no_json(text, error) from None
    except (ValueError, RecursionError):  # digits without end, brackets without end
        raise MemlabError(f"not a run record of memlab: JSON that cannot be read; {_WHAT_TO_DO}") from None
    if not isinstance(loaded, dict):
        raise MemlabError(f"not a run record of memlab: JSON of {_kind(loaded)}; {_WHAT_TO_DO}")
    if "comparison" not in loaded and "format" not in loaded:
        names = ", ".join(_shown(name) for name in list(loaded)[:3])
        held = f"with {names}" if names else "without anything in it"
        raise MemlabError(f"not a run record of memlab: a JSON object {held}; {_WHAT_TO_DO}")
    return loaded


def _no_json(text: str, error: json.JSONDecodeError) -> MemlabError:
    where = f"line {error.lineno}, column {error.colno}"
    is_cut_off = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    if is_cut_off and text.lstrip().startswith("{"):
        return MemlabError(f"the run record breaks off at {where}: copy the whole file again, or record it again")
    return MemlabError(f"not a run record of memlab: no JSON ({error.msg} at {where}); {_WHAT_TO_DO}")


def _require_known_format(loaded: Mapping[str, Any]) -> None:
    number = loaded.get("format", 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MemlabError(f"run record: format: expected a whole number from 1 to {FORMAT}, got {_shown(number)}")
    if number > FORMAT:
        raise MemlabError(
            f"run record: written by memlab with format {number}; this one reads up to {FORMAT}: upgrade memlab"
        )


# -- values


def _plain(value: Any) -> Any:
    """A record as what JSON has."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, other in _NO_NUMBERS.items() if str(other) == str(value))
    return value


def _read(expected: Any, value: Any, where: str) -> Any:
    """Return what was written of a value, as the type that is expected; `where` is its place in the file."""
    origin, parts = typing.get_origin(expected), typing.get_args(expected)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in parts:
            return None
        (expected,) = (part for part in parts if part is not type(None))
        return _read(expected, value, where)
    if origin is tuple:
        return _tuple(parts, value, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: _read(parts[1], each, f"{where}[{_shown(name)}]") for name, each in _dict(value, where).items()}
    if is_dataclass(expected):
        return _record(expected, value, where)
    if issubclass(expected, Enum):
        return _choice(expected, value, where)
    if expected in (int, float):
        return _number(expected, value, where)
    if not isinstance(value, expected):
        raise _wrong(where, {str: "text", bool: "true or false"}[expected], value)
    return value


def _record(expected: Any, value: Any, where: str) -> Any:
    loaded = _dict(value, where)
    found = {}
    for each in fields(expected):
        place = f"{where}.{each.name}" if where else each.name
        if each.name in loaded:
            found[each.name] = _read(_types_of(expected)[each.name], loaded[each.name], place)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise MemlabError(f"run record: {place} is missing: {_DAMAGED}")
    try:
        return expected(**found)
    except MemlabError as error:
        raise MemlabError(f"run record: {where}: {error}") from None


@cache
def _types_of(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _tuple(parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    if parts[-1] is not Ellipsis and len(value) != len(parts):
        raise _wrong(where, f"a list of {len(parts)}", value)
    return tuple(_read(parts[0], each, f"{where}[{number}]") for number, each in enumerate(value))


def _dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    return value


def _choice(expected: type[Enum], value: Any, where: str) -> Enum:
    try:
        return expected(value)
    except ValueError:
        raise _wrong(where, "one of " + ", ".join(str(each) for each in expected), value) from None


def _number(expected: type[int | float], value: Any, where: str) -> float:
    if expected is float and isinstance(value, str) and value in _NO_NUMBERS:
        return _NO_NUMBERS[value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if expected is float:
        if not is_number or _LARGEST < abs(value) < math.inf:
            raise _wrong(where, "a number", value)
    elif not is_number or value != value // 1:
        raise _wrong(where, "a whole number", value)
    elif abs(value) > _LARGEST:
        raise _wrong(where, "a whole number of at most 64 bits", value)
    return expected(value)


# -- errors

_DAMAGED = "the file is damaged; copy it again, or record it again"


def _wrong(where: str, expected: str, value: Any) -> MemlabError:
    return MemlabError(f"run record: {where}: expected {expected}, got {_shown(value)}: {_DAMAGED}")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number")
