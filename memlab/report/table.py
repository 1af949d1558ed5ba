"""`Table`: the one form that records are reduced to before they are text (`text.table`) or HTML (`html.table`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

_R = TypeVar("_R")


class ColumnKind(Enum):
    """Kinds of columns: numbers are set flush right, plans are broken between flags, notes have room of their own."""

    NUMBER = "number"
    WORDS = "words"
    PLAN = "plan"
    NOTE = "note"


class BarLook(Enum):
    """Looks of bars: bytes that were measured or predicted, the size of a device that was too small, a speed."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    TOO_SMALL = "too small"
    SPEED = "speed"


@dataclass(frozen=True)
class Bar:
    """A bar below a figure, in HTML; all bars of a column have one scale."""

    parts: Mapping[str, float]
    look: BarLook = BarLook.MEASURED


@dataclass(frozen=True)
class Column(Generic[_R]):
    """One column of a table."""

    title: str
    cell: Callable[[_R], str]
    kind: ColumnKind = ColumnKind.NUMBER
    bar: Callable[[_R], Bar | None] = lambda _: None
    group: str = ""
    is_wanted: bool = True


@dataclass(frozen=True)
class TableRow:
    """One row of a table."""

    texts: tuple[str, ...]
    bars: tuple[Bar | None, ...]
    below: str = ""
    fits: bool = False
    is_new: bool = False
    is_left_out: bool = False


@dataclass(frozen=True)
class Table:
    """A table of ready texts."""

    title: str
    columns: tuple[Column[Any], ...] = ()
    rows: tuple[TableRow, ...] = ()
    foot: tuple[str, ...] = ()
    more: tuple[Table, ...] = ()


def row(columns: Iterable[Column[_R]], record: _R, **about: Any) -> TableRow:
    """Write one record under columns."""
    pairs = [(column.cell(record), column.bar(record)) for column in columns]
    return TableRow(tuple(text for text, _ in pairs), tuple(bar for _, bar in pairs), **about)


def wanted(*columns: Column[_R]) -> tuple[Column[_R], ...]:
    """Return the columns that say something."""
    return tuple(column for column in columns if column.is_wanted)
