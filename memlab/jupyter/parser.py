"""The flags of `%%memfit` and the words of `%memfit`: one table each, read, checked and explained from it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
    Flag("budget", "--budget", "SIZE", "choose the fastest plan predicted to fit; flags of techniques are kept in it"),
    Flag("lossless", "--lossless", "", "with --budget: only techniques that leave the gradient as it is"),
    Flag("capacity", "--capacity", "SIZE", "size the device is to behave as in this cell, as in 4GiB"),
    Flag("quiet", "--quiet", "", "show no progress while the cell runs"),
    Flag("help", "--help", "", "show this and run nothing", also="-h"),
)

_BUDGET = Flag("budget", "--budget", "SIZE", "what the plans are to fit into, as in 8GiB")
_WORKLOAD_FLAGS = (
    Flag(
        "batch",
        "--batch",
        "NAME[,NAME…]",
        "variables that make a batch; by default the batch of the last %%memfit cell",
    ),
    Flag("loss_fn", "--loss-fn", "NAME", "variable called with output and target; the batch is then inputs,target"),
    Flag("model", "--model", "NAME", "variable that holds the model, where there are several"),
    Flag("optimizer", "--optimizer", "NAME", "variable that holds the optimizer, where there are several"),
)
_LOSSLESS = Flag("lossless", "--lossless", "", "only techniques that leave the gradient as it is")
_GPU = Flag(
    "device", "--device", "GPU", "a GPU of the catalogue to predict for, as in T4; by default the model's device"
)
# flags of the subcommands that foretell; those of a plan come on top
FORESIGHT_FLAGS: dict[str, tuple[Flag, ...]] = {
    "predict": (
        _BUDGET,
        _GPU,
        Flag("all", "--all", "", "show every plan, not the best ones only"),
        Flag("plans", "--plans", '"FLAGS" …', "predict these plans; the last flag of the line"),
        _LOSSLESS,
        *_WORKLOAD_FLAGS,
    ),
    "find": (_BUDGET, _LOSSLESS, *_WORKLOAD_FLAGS),
    "snapshot": (
        Flag(
            "predicted",
            "--predicted",
            "",
            "foretell the snapshot; without it a real step is recorded, which needs CUDA",
        ),
        _GPU,
        *_WORKLOAD_FLAGS,
    ),
}

WORDS = (
    Word(
        "predict", "[FLAGS] [--budget SIZE] [--device GPU] [--all]", "foretell memory and speed of all plans, or of one"
    ),
    Word(
        "find",
        "--budget SIZE [FLAGS]",
        "search the fastest plan that fits, and prove it by running it; returns the FoundPlan",
    ),
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
    Word("snapshot", "FILE [--predicted] [FLAGS]", "save a memory snapshot of a step for pytorch.org/memory_viz"),
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

    %%memfit --budget 8GiB                       # the fastest plan predicted to fit into 8 GiB
    train()

    %%memfit --budget 8GiB --bf16 --lossless     # bf16 for certain; the rest is chosen, gradients stay exact
    train()
"""

_LINE_EXAMPLES = """\
Examples:
    %memfit                                      # what is in force, what it needs
    %memfit --accumulate 8                       # another plan, now
    %memfit predict --budget 8GiB                # which plans fit, before any is applied
    %memfit predict --accumulate 4 --device T4   # one plan, on another GPU
    p = %memfit predict --plans "--fp16" "--bf16 --checkpoint"
    found = %memfit find --budget 8GiB           # the fastest plan that fits, run and measured
    c = %memfit compare "--accumulate 4" "--checkpoint"
    %memfit snapshot step.pickle --predicted --accumulate 4
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
        budget_bytes: what the chosen plan is to fit into, or None when not given.
        lossless: choose among exact techniques only.
        capacity_bytes: size the device is to behave as, or None when not given.
        quiet: show no progress.
        help: show help and run nothing.
    """

    plan: Plan | None = None
    model: str | None = None
    optimizer: str | None = None
    budget_bytes: int | None = None
    lossless: bool = False
    capacity_bytes: int | None = None
    quiet: bool = False
    help: bool = False


@dataclass(frozen=True)
class ForesightOptions:
    """What the line of `%memfit predict`, `find` or `snapshot` says.

    Args:
        words: what is no flag.
        plan: the plan its flags make, or None when it gives none.
        plans: plans to predict, as given after `--plans`.
        budget: what the plans are to fit into, as it was typed; empty when not given.
        device: name of a GPU to predict for, or None for the model's own device.
        batch: names of the variables that make a batch.
        loss_fn: name of the variable to use as the loss function.
        model: name of the variable to use as the model.
        optimizer: name of the variable to use as the optimizer.
        lossless: exact techniques only.
        every: show every row.
        predicted: foretell instead of recording.
    """

    words: tuple[str, ...] = ()
    plan: Plan | None = None
    plans: tuple[Plan, ...] = ()
    budget: str = ""
    device: str | None = None
    batch: tuple[str, ...] = ()
    loss_fn: str | None = None
    model: str | None = None
    optimizer: str | None = None
    lossless: bool = False
    every: bool = False
    predicted: bool = False


def foresight_options(command: str, words: list[str]) -> ForesightOptions:
    """Read the words after `%memfit predict`, `find` or `snapshot`.

    Raises:
        PlanError: as for `cell_options`.

    Example:
        >>> options = foresight_options("predict", ["--fp16", "--budget", "2GiB"])
        >>> options.plan.label, options.budget
        ('--fp16', '2GiB')
        >>> [plan.label for plan in foresight_options("predict", ["--plans", "--fp16", "--accumulate 4"]).plans]
        ['--fp16', '--accumulate 4']
    """
    flags = FORESIGHT_FLAGS[command]
    at = words.index("--plans") if "--plans" in words and command == "predict" else len(words)
    quoted = words[at + 1 :]
    if at < len(words) and not quoted:
        raise PlanError('--plans needs plans, each in quotes, as in --plans "--accumulate 4" "--checkpoint"')
    plan, rest = Plan.parse_known(words[:at])
    given, loose = _read_flags(rest, flags)
    if given.get("budget"):
        parse_bytes(given["budget"])
    return ForesightOptions(
        words=tuple(loose),
        plan=plan if len(rest) < at else None,
        plans=tuple(Plan.parse(text) for text in plans_in(quoted)),
        budget=given.get("budget", ""),
        device=given.get("device"),
        batch=tuple(name.strip() for name in given.get("batch", "").split(",") if name.strip()),
        loss_fn=given.get("loss_fn"),
        model=given.get("model"),
        optimizer=given.get("optimizer"),
        lossless="lossless" in given,
        every="all" in given,
        predicted="predicted" in given,
    )


def plans_in(words: list[str]) -> list[str]:
    """Plans as they were quoted; unquoted flags with values make one plan."""
    return words if all(word.startswith("-") or not word for word in words) else [" ".join(words)]


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
    given, loose = _read_flags(rest, CELL_FLAGS)
    if loose:
        raise unknown_flag(loose[0], tuple(flag.flag for flag in CELL_FLAGS))
    capacity, budget = given.get("capacity"), given.get("budget")
    if "lossless" in given and budget is None:
        raise PlanError("--lossless says what --budget may choose; give a budget, as in --budget 8GiB --lossless")
    return CellOptions(
        plan=plan if len(rest) < len(words) else None,
        model=given.get("model"),
        optimizer=given.get("optimizer"),
        budget_bytes=parse_bytes(budget) if budget else None,
        lossless="lossless" in given,
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
            "after the cell, until another one or %memfit undo. With --budget the plan is chosen at the cell's first",
            "training step: every plan is predicted, and the fastest that fits is applied. The receipt then says what",
            "was predicted and what was measured. The same from Python: memlab.fit, memlab.measure.",
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
            "Flags are those of %%memfit (see %%memfit?); %config MemLab holds defaults. predict, find and snapshot",
            "change nothing, and also know these flags:",
            "",
            *_table((flag.usage, flag.help) for flag in _foresight_flags()),
            "",
            _LINE_EXAMPLES,
        ]
    )


def _read_flags(words: list[str], flags: tuple[Flag, ...]) -> tuple[dict[str, str], list[str]]:
    """Values by the flags' names, and the words that belong to no flag."""
    by_flag = {spelled: flag for flag in flags for spelled in (flag.flag, flag.also) if spelled}
    given: dict[str, str] = {}
    loose: list[str] = []
    waiting = list(words)
    while waiting:
        word, has_value, value = waiting.pop(0).partition("=")
        flag = by_flag.get(word)
        if flag is None and word.startswith("-"):
            raise unknown_flag(word, tuple(flag.flag for flag in flags))
        if flag is None:
            loose.append(word + has_value + value)
            continue
        if flag.metavar and not has_value:
            if not waiting or waiting[0].startswith("-"):
                raise PlanError(f"{flag.flag} needs a value: {flag.usage}")
            value = waiting.pop(0)
        given[flag.name] = value
    return given, loose


def _foresight_flags() -> list[Flag]:
    """Every flag of the subcommands that foretell, once; which of them knows it, where not all do."""
    known: dict[str, Flag] = {}
    for flags in FORESIGHT_FLAGS.values():
        for flag in flags:
            of = [other for other, others in FORESIGHT_FLAGS.items() if any(flag.flag == one.flag for one in others)]
            where = "" if len(of) == len(FORESIGHT_FLAGS) else f"{', '.join(of)}: "
            known.setdefault(flag.flag, replace(flag, help=where + flag.help))
    return list(known.values())


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
