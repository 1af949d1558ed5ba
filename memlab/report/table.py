"""`Table`: the one form that records are reduced to before they are text (`text.table`) or HTML (`html.table`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

_R = TypeVar("_R")


class Kind(Enum):
    """Kinds of columns: numbers are set flush right, plans are broken between flags, notes have room of their own."""

    NUMBER = "number"
    WORDS = "words"
    PLAN = "plan"
    NOTE = "note"


class Look(Enum):
    """Looks of bars: bytes that were measured or predicted, the size of a device that was too small, a speed."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    TOO_SMALL = "too small"
    SPEED = "speed"


@dataclass(frozen=True)
class Bar:
    """A bar below a figure, in HTML; all bars of a column have one scale.

    Args:
        parts: lengths by name: bytes by category, or one length without a name.
        look: what it stands for.
    """

    parts: Mapping[str, float]
    look: Look = Look.MEASURED


@dataclass(frozen=True)
class Column(Generic[_R]):
    """One column of a table.

    Args:
        title: its heading.
        cell: a record's text.
        kind: how it is set.
        bar: a record's bar; None where it has none.
        group: heading over several columns.
    """

    title: str
    cell: Callable[[_R], str]
    kind: Kind = Kind.NUMBER
    bar: Callable[[_R], Bar | None] = lambda _: None
    group: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
        texts: one per column.
        bars: likewise; None where there is none.
        below: what stands below the first text.
        fits: whether it is the one that was looked for.
        is_left_out: whether it is set back, since it counts no further.
    """

    texts: tuple[str, ...]
    bars: tuple[Bar | None, ...]
    below: str = ""
    fits: bool = False
    is_left_out: bool = False


@dataclass(frozen=True)
class Table:
    """A table of ready texts.

    Args:
        title: what it shows, on what.
        columns: their headings and kinds; none where there is nothing but words.
        rows: their texts.
        foot: lines below the table.
        more: tables that stand between it and its foot.
    """

    title: str
    columns: tuple[Column[Any], ...] = ()
    rows: tuple[Row, ...] = ()
    foot: tuple[str, ...] = ()
    more: tuple[Table, ...] = ()


def row(columns: Iterable[Column[_R]], record: _R, **about: Any) -> Row:
    """Write one record under columns.

    Args:
        columns: the columns.
        record: what they write.
        about: further arguments of `Row`.
    """
    pairs = [(column.cell(record), column.bar(record)) for column in columns]
    return Row(tuple(text for text, _ in pairs), tuple(bar for _, bar in pairs), **about)


def wanted(*columns: tuple[Column[_R], bool]) -> tuple[Column[_R], ...]:
    """Return the columns that say something."""
    return tuple(column for column, says_something in columns if says_something)
