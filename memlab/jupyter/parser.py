"""Reads and checks the lines of `%%memfit` and `%memfit`, from the tables in `flags`."""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass

from memlab.errors import PlanError
from memlab.jupyter.flags import CELL_FLAGS, LAST_FLAG, PREDICT_FLAGS, WORDS, Flag
from memlab.plan import Plan, ScaleOut, unknown_flag
from memlab.plan.scale import Scale, take_engine
from memlab.plan.settings.scale import ENGINES
from memlab.rescue.fallback import pinned
from memlab.units import SIZE_UNITS, parse_bytes


@dataclass(frozen=True)
class CellOptions:
    """Arguments of a `%%memfit` line, as `flags` explains them; None, empty or False where they are not given."""

    plan: Plan | None = None
    models: tuple[str, ...] = ()
    optimizer: str | None = None
    budget_bytes: int | None = None
    lossless: bool = False
    capacity_bytes: int | None = None
    keep: frozenset[str] = frozenset()
    rescue: bool = True
    background: bool = False
    inference: bool = False
    nproc: int = 1
    scale: Scale | None = None
    quiet: bool = False
    help: bool = False


@dataclass(frozen=True)
class PredictOptions:
    """Arguments of a `%memfit predict`, `find`, `ablation`, `panel` or `snapshot` line, likewise; `words` are no flags."""

    words: tuple[str, ...] = ()
    plan: Plan | None = None
    plans: tuple[Plan, ...] = ()
    budget: str = ""
    device: str | None = None
    batch: tuple[str, ...] = ()
    loss_fn: str | None = None
    models: tuple[str, ...] = ()
    optimizer: str | None = None
    lossless: bool = False
    every: bool = False
    predicted: bool = False
    steps: int = 5
    nproc: int = 1
    scale: Scale | None = None


def predict_options(command: str, words: list[str]) -> PredictOptions:
    """Read the words after `%memfit predict`, `find`, `ablation`, `panel` or `snapshot`.

    Example:
        >>> options = predict_options("predict", ["--fp16", "--budget", "2GiB"])
        >>> options.plan.label, options.budget
        ('--fp16', '2GiB')
        >>> [plan.label for plan in predict_options("predict", ["--plans", "--fp16", "--accumulate 4"]).plans]
        ['--fp16', '--accumulate 4']
    """
    flags = PREDICT_FLAGS[command]
    last = LAST_FLAG.get(command)
    at = words.index(last) if last in words else len(words)
    quoted = words[at + 1 :]
    if at < len(words) and not quoted:
        raise PlanError(f'{last} needs plans, each in quotes, as in {last} "--accumulate 4" "--checkpoint"')
    engine, others = _engine_of_processes(words[:at])
    plan, rest = Plan.parse_known(others)
    given, loose = _read_flags(rest, flags)
    if command == "panel" and len(rest) < len(others):
        loose.append(str(plan))
    if loose and command not in ("snapshot", "worst"):
        raise PlanError(f"%memfit {command} {loose[0]}: unknown; see %memfit help")
    if command == "predict" and plan.scale is not ScaleOut.NONE:
        raise PlanError(
            f"--scale {plan.scale} needs --nproc: engines are predicted for ranks, as in --scale {plan.scale} --nproc 2"
        )
    if given.get("budget"):
        parse_bytes(given["budget"])
    return PredictOptions(
        words=tuple(loose),
        plan=plan if len(rest) < len(others) else None,
        plans=tuple(Plan.parse(text) for text in plans_in(quoted)),
        budget=given.get("budget", ""),
        device=given.get("device"),
        batch=tuple(name.strip() for name in given.get("batch", "").split(",") if name.strip()),
        loss_fn=given.get("loss_fn"),
        models=_models_in(given),
        optimizer=given.get("optimizer"),
        lossless="lossless" in given,
        every="all" in given,
        predicted="predicted" in given,
        steps=_count("--steps", given.get("steps", "5"), "steps", "3"),
        nproc=processes(given.get("nproc", "1")),
        scale=_predicted_scale(plan, engine, given, quoted),
    )


def _models_in(given: dict[str, str]) -> tuple[str, ...]:
    """The names after ``--model``; commas within brackets belong to a name."""
    names = tuple(name.strip() for name in re.split(r",(?![^\[]*\])", given.get("model", "")) if name.strip())
    if len(names) > 1 and "optimizer" in given:
        raise PlanError(
            f"--optimizer {given['optimizer']} with {len(names)} models: each is updated by the optimizers that hold its "
            "parameters; leave --optimizer out"
        )
    return names


def one_model(names: tuple[str, ...], what: str) -> str | None:
    """The one name of a model, where no more than one can be served; None without any."""
    if len(names) > 1:
        raise PlanError(f"--model {','.join(names)}: {what} has one model; name one")
    return names[0] if names else None


def _predicted_scale(plan: Plan, engine: str | None, given: dict[str, str], plans: list[str]) -> Scale | None:
    scale = _scale(plan, engine, {name: given[name] for name in ("nproc",) if name in given})
    if scale is not None and (left := [name for name in ("budget", "lossless", "all") if name in given]):
        raise PlanError(f"--{left[0]} with --scale: ranks are predicted for one plan; leave it out")
    if scale is not None and plans:
        raise PlanError("--plans with --scale: ranks are predicted for one plan; give its flags")
    return scale


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
        >>> sorted(cell_options("--keep precision,checkpoint --keep optim").keep)
        ['checkpointing', 'optimizer', 'precision']
        >>> cell_options("").plan is None
        True
        >>> cell_options("--inference --bf16 --budget 8GiB").inference
        True
        >>> str(cell_options("--nproc 2 --scale zero3 --checkpoint").scale)
        '--scale zero3 --checkpoint'
    """
    words = split_words(line)
    engine, others = _engine_of_processes(words)
    plan, rest = Plan.parse_known(others)
    given, loose = _read_flags(rest, CELL_FLAGS)
    if loose:
        raise _loose_word(loose[0])
    capacity, budget = given.get("capacity"), given.get("budget")
    if "inference" in given:
        _check_inference(plan, given)
    if budget is not None and plan.scale is not ScaleOut.NONE:
        raise PlanError(
            f"--budget with --scale {plan.scale}: a plan is chosen for a budget by predictions, and engines have none; leave one out"
        )
    if "lossless" in given and budget is None:
        raise PlanError("--lossless says what --budget may choose; give a budget, as in --budget 8GiB --lossless")
    if "keep" in given and "no_rescue" in given:
        raise PlanError(
            "--keep says what a rescue may not change, and --no-rescue that there is none; drop one of the two"
        )
    return CellOptions(
        plan=plan if len(rest) < len(words) else None,
        models=_models_in(given),
        optimizer=given.get("optimizer"),
        budget_bytes=parse_bytes(budget) if budget else None,
        lossless="lossless" in given,
        capacity_bytes=parse_bytes(capacity) if capacity else None,
        keep=pinned(name for name in given["keep"].split(",") if name.strip()) if "keep" in given else frozenset(),
        rescue="no_rescue" not in given,
        background="background" in given,
        inference="inference" in given,
        nproc=processes(given.get("nproc", "1")),
        scale=_scale(plan, engine, given),
        quiet="quiet" in given,
        help="help" in given,
    )


def _engine_of_processes(words: list[str]) -> tuple[str | None, list[str]]:
    """The engine that several processes train under, and the other words; in this process it is part of the plan."""
    if not any(word.partition("=")[0] == "--nproc" for word in words):
        return None, words
    return take_engine(words)


def _scale(plan: Plan, engine: str | None, given: dict[str, str]) -> Scale | None:
    if "nproc" not in given:
        return None
    if engine is None:
        raise PlanError(f"--nproc {given['nproc']} needs --scale and one of {', '.join(ENGINES)}, as in --scale fsdp2")
    for flag in CELL_FLAGS:
        if flag.name in given and flag.in_ranks:
            raise PlanError(f"{flag.flag} with --nproc: {flag.in_ranks}; leave it out")
    return Scale(engine, plan)


def processes(number: str) -> int:
    """Return the number of processes a flag names."""
    return _count("--nproc", number, "processes", "2")


def _count(flag: str, number: str, of: str, example: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise PlanError(f"{flag} {number}: expected a whole number of {of}, 1 or more, as in '{flag} {example}'")
    return int(number)


def _check_inference(plan: Plan, given: dict[str, str]) -> None:
    from memlab.inferring.inference import precision_of

    precision_of(plan)
    for flag in CELL_FLAGS:
        if flag.name in given and flag.untrained:
            raise PlanError(f"{flag.flag} with --inference: {flag.untrained}; leave it out")


def split_words(line: str) -> list[str]:
    """Split a magic's line as a shell does.

    Raises:
        PlanError: a quotation is left open, or braces are left that IPython could not put a value in place of.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise PlanError(f"{line.strip()!r} cannot be read: {error}") from None
    if (left := re.search(r"\{[^{}]*\}", line)) is not None:
        raise PlanError(f"{left[0]}: there is no such variable, or what stands in the braces fails; give a value")
    return words


def _loose_word(word: str) -> PlanError:
    """The error for a word of a cell's line that is neither a flag nor its value."""
    if word == "off" or any(word == each.word for each in WORDS):
        way_out = "undo" if word == "off" else word
        return PlanError(f"%%memfit {word}: a cell takes flags only; did you mean the line %memfit {way_out}?")
    return unknown_flag(word, tuple(flag.flag for flag in CELL_FLAGS))


def unknown_of_line(word: str, flags: tuple[Flag, ...] = ()) -> PlanError:
    """The error for a flag that a line does not know, which may be one of a cell's."""
    of_cell = next((flag for flag in CELL_FLAGS if word in (flag.flag, flag.also)), None)
    if of_cell is not None:
        return PlanError(f"{word} is a flag of a cell, as in %%memfit {of_cell.usage}")
    return unknown_flag(word, tuple(flag.flag for flag in flags))


def unknown_word(word: str) -> PlanError:
    """The error for a word that is no subcommand of `%memfit`, naming the nearest one."""
    known = [each.word for each in WORDS]
    close = ["undo"] if word == "off" else difflib.get_close_matches(word, known, n=1)
    meant = f"; did you mean %memfit {close[0]}?" if close else ""
    return PlanError(f"%memfit {word}: unknown{meant}; allowed are {', '.join(known)}, or the flags of a plan")


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
            raise unknown_of_line(word, flags)
        if flag is None:
            loose.append(word + has_value + value)
            continue
        if flag.metavar and not has_value:
            if not waiting or (waiting[0].startswith("-") and not waiting[0][1:2].isdigit()):
                raise PlanError(f"{flag.flag} needs a value: {flag.usage}")
            value = waiting.pop(0)
            if flag.metavar == "SIZE" and waiting and waiting[0].lower() in SIZE_UNITS:
                value += waiting.pop(0)
        if flag.metavar and not value.strip(" ,"):
            raise PlanError(f"{flag.flag} needs a value: {flag.usage}")
        if flag.metavar and flag.name in given and not flag.repeats:
            raise PlanError(f"{flag.flag} is given twice ({given[flag.name]} and {value}); give one of them")
        given[flag.name] = f"{given[flag.name]},{value}" if flag.repeats and flag.name in given else value
    return given, loose
