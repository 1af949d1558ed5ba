"""Tab completion on the lines of `%memfit` and `%%memfit`: words, flags and their values, from the tables they are read by.

Front ends ask the kernel, the kernel asks IPython, and IPython asks its *matchers*, of which one's answer may stand alone.
"""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.exporting import TARGETS
from memlab.hardware.gpus import gpus
from memlab.jupyter.flags import CELL_FLAGS, LAST_FLAG, PREDICT_FLAGS, WORDS, Flag
from memlab.plan import FIELDS, Offloaded, PlanField, Tier, plan_flags
from memlab.plan.settings.scale import ENGINES
from memlab.units import GIB

_START = r"\s*(?:[^=%#\n]+=\s*(?=%memfit\b))?"  # also what a line is assigned to
_LINE = re.compile(rf"^{_START}(%{{0,2}}memfit)\s(.*)$", re.DOTALL)
_WORDS = tuple(word.word for word in WORDS)
_WITH_PLAN = frozenset({"switch", "export", *PREDICT_FLAGS}) - {"panel"}
_OF_FILES = frozenset({"record", "replay", "snapshot"})
_SIZES = tuple(f"{size}GiB" for size in sorted({gpu.memory_bytes // GIB for gpu in gpus()}))
_EXPORT_FLAGS = (Flag("nproc", "--nproc", "N", ""),)
_DEVICE_FLAGS = (Flag("capacity", "--capacity", "SIZE|none", ""),)


def completions(text: str, variables: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return what the last word of a line may become.

    Returns:
        The piece of the line that is replaced, and what may take its place; nothing where the line is not memlab's.

    Example:
        >>> completions("%memfit pre", {})
        ('pre', ('predict',))
        >>> completions("%%memfit --accumulate 4 --offload optimizer:d", {})
        ('optimizer:d', ('optimizer:disk',))
        >>> completions("import torch", {})
        ('', ())
    """
    line = _LINE.match(text)
    if line is None:
        return "", ()
    *before, piece = _split(line[2])
    if line[1].startswith("%%"):
        found = _flags_and_values(before, piece, CELL_FLAGS, variables, has_plan=True)
    else:
        found = _in_line(before, piece, variables)
    if line[2].count('"') % 2:
        found = (each.strip('"') for each in found)
    fitting = (each for each in found if each.lstrip('"').lower().startswith(piece.lower()) and each != piece)
    # a word with a quote in its middle, or after it, is not what stands in the line
    return piece, tuple(dict.fromkeys(fitting)) if text.endswith(piece) else ()


def _split(text: str) -> list[str]:
    """Words of a line, quotes left out; the last one is what is being typed, and may be empty."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    words = []
    try:
        while (word := lexer.get_token()) is not None:
            words.append(word)
    except ValueError:
        # a plan in quotes that is still open: its flags are words of their own
        words += lexer.token.split(" ")
        return words
    return words if text and not text[-1].isspace() else [*words, ""]


def _in_line(before: list[str], piece: str, variables: Mapping[str, Any]) -> Iterator[str]:
    if not before:
        yield from _WORDS
        yield from _flags_and_values((), piece, (), variables, has_plan=piece.startswith("-"))
        return
    word, *rest = before
    if word.startswith("-"):
        word, rest = "switch", before
    if word in _OF_FILES and not rest and not piece.startswith("-"):
        yield from _files(piece)
    elif word == "export" and not rest:
        yield from TARGETS
    elif word == "undo" and not rest:
        yield "all"
    flags = PREDICT_FLAGS.get(word, {"export": _EXPORT_FLAGS, "device": _DEVICE_FLAGS}.get(word, ()))
    has_plan = word in _WITH_PLAN or word == "compare"
    if LAST_FLAG.get(word) in rest:
        rest = rest[rest.index(LAST_FLAG[word]) + 1 :]
        flags = ()
    yield from _flags_and_values(rest, piece, flags, variables, has_plan=has_plan)


def _flags_and_values(
    before: Iterable[str], piece: str, flags: tuple[Flag, ...], variables: Mapping[str, Any], *, has_plan: bool
) -> Iterator[str]:
    """Values of the flag that waits for one, or else flags that are not there yet."""
    given = list(before)
    is_of_ranks = any(word.partition("=")[0] == "--nproc" for word in given)

    def values_of(spelled: str, piece: str) -> Iterable[str] | None:
        """Return the values that a flag may have; None where it is no flag of this line that takes one."""
        for flag in flags:
            if flag.flag == spelled and flag.metavar:
                return _of_flag(flag, piece, variables)
        if is_of_ranks and spelled == "--scale":
            return ENGINES
        return next((_of_field(spec, piece) for spec in FIELDS if has_plan and spec.flag == spelled), None)

    spelled, is_joined, value = piece.partition("=")
    joined = values_of(spelled, value) if is_joined else None
    if joined is not None:
        yield from (f"{spelled}={value}" for value in joined)
        return
    waiting = given[-1] if given else ""
    values = values_of(waiting, piece)
    if values is not None:
        yield from values
        if not any(spec.flag == waiting and spec.bare is not None for spec in FIELDS):
            return  # it cannot stand without a value
    known = [flag.flag for flag in flags] + (list(plan_flags()) if has_plan else [])
    there = {word.partition("=")[0] for word in given}
    if piece.startswith("-") or not piece:
        yield from (flag for flag in known if flag not in there)


def _of_field(spec: PlanField, piece: str) -> Iterable[str]:
    if spec.name == "offload":
        return _offloads(piece)
    alternatives = spec.metavar.strip("[]").split("|")
    # "every:N" and "budget:SIZE" go on with what only the user knows
    openings = (each.partition(":")[0] + ":" for each in alternatives if ":" in each)
    return (*spec.choices, *openings)


def _offloads(piece: str) -> Iterator[str]:
    """Lists as in "optimizer:disk,activations": what is not named yet, and where it may go."""
    head, comma, last = piece.rpartition(",")
    named = {each.partition(":")[0] for each in head.split(",")}
    for what in Offloaded:
        if what not in named:
            yield head + comma + what
            if ":" in last or last == what:
                yield from (f"{head}{comma}{what}:{tier}" for tier in Tier if tier is not Tier.AUTO)


def _of_flag(flag: Flag, piece: str, variables: Mapping[str, Any]) -> Iterable[str]:
    kinds: dict[str, Callable[[Any], bool]] = {
        "model": lambda value: isinstance(value, nn.Module),
        "optimizer": lambda value: isinstance(value, torch.optim.Optimizer),
        "batch": lambda value: not callable(value) and isinstance(value, torch.Tensor | Mapping | tuple | list),
        "loss_fn": lambda value: callable(value) and not isinstance(value, type),
    }

    head, comma, _ = piece.rpartition(",")
    if flag.name in kinds:
        names = (name for name, value in variables.items() if not name.startswith("_") and kinds[flag.name](value))
        return [head + comma + name for name in names if name not in head.split(",")]
    if flag.name == "device":
        return [f'"{gpu.name}"' if " " in gpu.name else gpu.name for gpu in gpus()]
    if flag.name == "keep":
        return [head + comma + spec.name for spec in FIELDS if spec.name not in head.split(",")]
    if "SIZE" in flag.metavar:
        return (*_SIZES, *(each for each in flag.metavar.split("|") if each.islower()))
    if "|" in flag.metavar:
        return flag.metavar.split("|")
    return ("2", "4", "8") if flag.metavar == "N" else ()


def _files(piece: str) -> Iterator[str]:
    for path in sorted(glob.glob(glob.escape(piece) + "*")):  # noqa: PTH207 - text in, text out
        yield path + "/" * Path(path).is_dir()


def complete_lines(shell: Any, undo: ExitStack) -> None:
    """Have a shell complete the lines of the magics."""
    from IPython.core import completer

    if not hasattr(completer, "context_matcher"):  # IPython before 8.6
        _hook(shell, undo)
        return
    matchers, matcher = shell.Completer.custom_matchers, _matcher(shell)
    matchers.append(matcher)
    undo.callback(matchers.remove, matcher)


def _hook(shell: Any, undo: ExitStack) -> None:
    is_on = [True]  # IPython has no way to take a hook away

    def complete(shell: Any, event: Any) -> list[str]:
        piece, found = completions(event.text_until_cursor, shell.user_ns) if is_on else ("", ())
        # IPython replaces the last word, which may be shorter than what a completion begins with
        return [each[len(piece) - len(event.symbol) :] for each in found if piece.endswith(event.symbol)]

    shell.set_hook("complete_command", complete, re_key=rf"{_START}%%?memfit\b")
    undo.callback(is_on.clear)


def _matcher(shell: Any) -> Callable[[Any], dict[str, Any]]:
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="memlab.memfit")  # type: ignore[untyped-decorator]
    def memfit_matcher(context: Any) -> dict[str, Any]:
        piece, found = completions(context.text_until_cursor, shell.user_ns)
        return {
            "completions": [SimpleCompletion(text=each, type="magic") for each in found],
            "matched_fragment": piece,
            "suppress": bool(found),
            "ordered": True,
        }

    return memfit_matcher  # type: ignore[no-any-return]
