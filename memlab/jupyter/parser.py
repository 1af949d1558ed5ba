"""The flags of `%%memfit` and the words of `%memfit`: one table each, read, checked and explained from it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from memlab.errors import PlanError
from memlab.plan import FIELDS, Plan, PlanField, unknown_flag
from memlab.units import parse_bytes


@dataclass(frozen=True)
class Flag:
    """A flag that is about the cell, not about the plan.

    Args:
        name: attribute of `CellOptions` it sets.
        flag: the flag.
        metavar: how its value reads in help; empty for a flag without one.
        help: one sentence.
        also: another spelling.
    """

    name: str
    flag: str
    metavar: str
    help: str
    also: str = ""

    @property
    def usage(self) -> str:
        """The flag as help shows it."""
        spelled = f"{self.also}, {self.flag}" if self.also else self.flag
        return f"{spelled} {self.metavar}".rstrip()


@dataclass(frozen=True)
class Word:
    """A subcommand of `%memfit`."""

    word: str
    arguments: str
    help: str

    @property
    def usage(self) -> str:
        """The subcommand as help shows it."""
        return f"{self.word} {self.arguments}".rstrip()


CELL_FLAGS = (
    Flag("model", "--model", "NAME", "variable that holds the model, where there are several"),
    Flag("optimizer", "--optimizer", "NAME", "variable that holds the optimizer, where there are several"),
    Flag("capacity", "--capacity", "SIZE", "size the device is to behave as in this cell, as in 4GiB"),
    Flag("quiet", "--quiet", "", "show no progress while the cell runs"),
    Flag("help", "--help", "", "show this and run nothing", also="-h"),
)

WORDS = (
    Word("report", "", "the settings measured so far, as a table and as figures; returns the Comparison"),
    Word(
        "compare",
        '"FLAGS" …',
        "measure plans from the same starting point, then put everything back; returns the Comparison",
    ),
    Word("switch", "FLAGS", "change the plan now; %memfit FLAGS does the same"),
    Word("undo", "[all]", "take the plan off the model of the last cell, or off all models"),
    Word("export", "[torch|trainer|accelerate|deepspeed] [FLAGS]", "the plan in force, or the one given, as code"),
    Word("device", "[--capacity SIZE|none]", "what memory is counted on, and the size it behaves as"),
    Word("record", "FILE", "save what was measured as JSON"),
    Word("replay", "FILE", "show a saved file, measured here or elsewhere; returns the Comparison"),
    Word("help", "", "show this"),
)

_CELL_EXAMPLES = """\
Examples:
    %%memfit
    train()                                      # changes nothing: measures

    %%memfit --accumulate 4 --checkpoint
    train()

    %%memfit --fp16 --adam8bit --capacity 8GiB
    trainer.train()
"""

_LINE_EXAMPLES = """\
Examples:
    %memfit                                      # what is in force, what it needs
    %memfit --accumulate 8                       # another plan, now
    c = %memfit compare "--accumulate 4" "--checkpoint"
    %memfit export trainer
    %memfit undo
"""


@dataclass(frozen=True)
class CellOptions:
    """What the line of `%%memfit` says.

    Args:
        plan: the plan its flags make, or None when it gives none.
        model: name of the variable to use as the model.
        optimizer: name of the variable to use as the optimizer.
        capacity_bytes: size the device is to behave as, or None when not given.
        quiet: show no progress.
        help: show help and run nothing.
    """

    plan: Plan | None = None
    model: str | None = None
    optimizer: str | None = None
    capacity_bytes: int | None = None
    quiet: bool = False
    help: bool = False


def cell_options(line: str) -> CellOptions:
    """Read the line of a `%%memfit` cell.

    Raises:
        PlanError: an unknown flag (with the nearest known one), a missing or impossible value, or
            techniques that exclude each other.

    Example:
        >>> options = cell_options("--accumulate 4 --capacity 2GiB")
        >>> options.plan.accumulation, options.capacity_bytes
        (4, 2147483648)
        >>> cell_options("").plan is None
        True
    """
    words = split_words(line)
    plan, rest = Plan.parse_known(words)
    given = _cell_flags(rest)
    capacity = given.get("capacity")
    return CellOptions(
        plan=plan if len(rest) < len(words) else None,
        model=given.get("model"),
        optimizer=given.get("optimizer"),
        capacity_bytes=parse_bytes(capacity) if capacity else None,
        quiet="quiet" in given,
        help="help" in given,
    )


def split_words(line: str) -> list[str]:
    """Split a magic's line as a shell does.

    Raises:
        PlanError: a quotation is left open.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise PlanError(f"{line.strip()!r} cannot be read: {error}") from None


def unknown_word(word: str) -> PlanError:
    """The error for a word that is no subcommand of `%memfit`, naming the nearest one."""
    known = [each.word for each in WORDS]
    close = difflib.get_close_matches(word, known, n=1)
    meant = f"; did you mean %memfit {close[0]}?" if close else ""
    return PlanError(f"%memfit {word}: unknown{meant}; allowed are {', '.join(known)}, or the flags of a plan")


def cell_help() -> str:
    """What `%%memfit?` and `%%memfit -h` show."""
    return "\n".join(
        [
            "%%memfit [flags]",
            "",
            "Run the cell with memory-saving techniques on its live model and optimizer, and measure memory and speed.",
            "The model is found in the notebook, or when the cell first trains it. Without flags of techniques nothing",
            "is changed: the plan in force stays, and the cell is measured. Flags set the whole plan; it stays applied",
            "after the cell, until another one or %memfit undo. The same from Python: memlab.fit, memlab.measure.",
            "",
            "Techniques:",
            *_table((_plan_usage(field), field.help) for field in FIELDS),
            "",
            "The cell:",
            *_table((flag.usage, flag.help) for flag in CELL_FLAGS),
            "",
            _CELL_EXAMPLES,
        ]
    )


def line_help() -> str:
    """What `%memfit?` and `%memfit help` show."""
    return "\n".join(
        [
            "%memfit [word | flags]",
            "",
            "The plan in force: alone it shows what is applied to which model and what that needs.",
            "",
            *_table((word.usage, word.help) for word in WORDS),
            "",
            "Flags are those of %%memfit (see %%memfit?); %config MemLab holds defaults.",
            "",
            _LINE_EXAMPLES,
        ]
    )


def _cell_flags(words: list[str]) -> dict[str, str]:
    by_flag = {spelled: flag for flag in CELL_FLAGS for spelled in (flag.flag, flag.also) if spelled}
    given: dict[str, str] = {}
    waiting = list(words)
    while waiting:
        word, has_value, value = waiting.pop(0).partition("=")
        flag = by_flag.get(word)
        if flag is None:
            raise unknown_flag(word, tuple(flag.flag for flag in CELL_FLAGS))
        if flag.metavar and not has_value:
            if not waiting or waiting[0].startswith("-"):
                raise PlanError(f"{flag.flag} needs a value: {flag.usage}")
            value = waiting.pop(0)
        given[flag.name] = value
    return given


def _plan_usage(field: PlanField) -> str:
    shorthands = "".join(f", {flag}" for flag in field.shorthands)
    return f"{field.flag} {field.metavar}{shorthands}"


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns; a left side that is too long gets a line of its own."""
    lines = []
    for left, right in rows:
        if len(left) > 34:
            lines += [f"  {left}", f"{'':38}{right}"]
        else:
            lines.append(f"  {left:<36}{right}")
    return lines
