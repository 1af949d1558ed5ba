"""Everything that runs on the emulated GPU, file after file, and the page of what came out: `python -m tests.emulated_gpu --all`.

All results are of one commit and the same versions. A run that was broken off goes on where it was; one that is complete
begins anew, as does one after a change of anything that runs.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.emulated_gpu.errors import EmulationError

HERE = Path(__file__).parent
PAGE = HERE / "last_run.md"
KEPT = HERE / "last_run.json"
_TESTS = HERE.parent
_MEMORY: tuple[str, ...] = ()
_VALUES = ("--values",)
_LATE = ("--values", "--late")
_MINUTES = "120"  # the notebooks take about an hour
_PYTEST = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", "-rfE")
_PACKAGES = ("torch", "transformers", "bitsandbytes", "deepspeed", "accelerate")
# files of `tests/gpu` that need more than one GPU, or another one
_OF_TWO = (
    "test_another_device.py",
    "test_two_devices.py",
    "test_export_ranks_cuda.py",
    "test_notebooks_cuda.py",
    "test_scaleout_cuda.py",
)
_OPTIONS = dict.fromkeys(_OF_TWO, ("--devices", "2"))

# what runs, and what is written by it
_SOURCES = ("memlab", "tests", "notebooks", "pyproject.toml", "constraints.txt")
_WRITTEN = (":!tests/emulated_gpu/last_run.*",)
_NOTEBOOKS = "test_notebooks_cuda.py"

_OUTCOMES = ("passed", "failed", "skipped")

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Part:
    """One file, run in one way.

    Args:
        file: of tests.
        way: options of the emulated GPU.
        test: the one test to run; empty for all.
    """

    file: Path
    way: tuple[str, ...]
    test: str = ""


def parts() -> Iterator[Part]:
    """All there is: the emulation's own tests, then those of the CUDA lines, with values and without."""
    yield Part(HERE / "test_emulated.py", (*_LATE, "--devices", "2"))
    yield Part(HERE / "test_emulated.py", (*_VALUES, "--gpu", "H100 SXM"))
    for file in sorted((_TESTS / "gpu").glob("test_*.py")):
        text, more = file.read_text(), _OPTIONS.get(file.name, ())
        if "mark.memory" in text:
            yield Part(file, (*_MEMORY, *more))
        if file.name != _NOTEBOOKS:
            yield Part(file, (*_LATE, *more))  # a card is never early
            continue
        for source in sorted((_TESTS.parent / "notebooks" / "source").glob("*.md")):  # some minutes each
            yield Part(file, (*_VALUES, *more), f"test_it_runs_to_its_end[{source.stem}]")


def run_all(run: Run, wanted: Sequence[str]) -> int:
    """Run the parts that have not run yet, and write the page.

    Args:
        run: what `python -m tests.emulated_gpu` does with arguments; returns the exit status.
        wanted: words of which the name of a part has one: these run, and nothing is written; none for all.

    Returns:
        0 if nothing failed, else 1.

    Raises:
        EmulationError: what runs is not a commit.
    """
    if wanted:
        chosen = [part for part in parts() if any(word in _name(part) for word in wanted)]
        return max([_is_bad(_told(run, part)) for part in chosen], default=0)
    versions = {"Python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    commit = commit_of(kept.get("commit", ""))
    names = [_name(part) for part in parts()]
    rows: dict[str, Any] = kept["rows"] if (kept.get("versions"), kept.get("commit")) == (versions, commit) else {}
    if all(name in rows for name in names):
        rows, commit = {}, commit_of("")
    for part in parts():
        if _name(part) not in rows:
            rows[_name(part)] = _told(run, part)
            rows = {name: rows[name] for name in names if name in rows}
            KEPT.write_text(json.dumps({"commit": commit, "versions": versions, "rows": rows}, indent=1) + "\n")
            PAGE.write_text(page(commit, versions, rows))
    return max(map(_is_bad, rows.values()))


def commit_of(before: str) -> str:
    """Return the commit that runs.

    Args:
        before: the one of earlier results, which it is as long as nothing that runs has changed since; empty for none.

    Raises:
        EmulationError: something that runs has changed since the last commit, or there is no commit.
    """
    if before and _is_unchanged_since(before):
        return before
    try:
        head = _git("rev-parse", "--short=12", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        raise EmulationError("--all: its record names a commit, and here is none; name the files to run") from None
    if not _is_unchanged_since(head):
        raise EmulationError(
            "--all: its record names a commit, and there are changes: commit them, or name the files to run"
        )
    return head


def _is_unchanged_since(commit: str) -> bool:
    paths = ("--", *_SOURCES, *_WRITTEN)
    try:
        changed = _git("diff", "--name-only", commit, *paths) + _git(
            "ls-files", "--others", "--exclude-standard", *paths
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return not changed.strip()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_TESTS.parent, check=True, capture_output=True, text=True)
    return done.stdout


def _told(run: Run, part: Part) -> dict[str, Any]:
    """Run a part and say what came out."""
    row = _row(run, part)
    print(_line(_name(part), row), file=sys.stderr, flush=True)
    return row


def _is_bad(row: Mapping[str, Any]) -> int:
    # 5: nothing of this file is run this way
    return int(row["status"] not in (0, 5) or (row["status"] == 0 and not any(row[each] for each in _OUTCOMES)))


def _failures(name: str, row: Mapping[str, Any]) -> list[str]:
    """What failed of a part: its tests; or the part itself, where its process ended otherwise than by one of them."""
    if _is_bad(row) and not row["names"]:
        return [f"{name}: ended with status {row['status']}"]
    return [f"{name}: {test}" for test in row["names"]]


def _row(run: Run, part: Part) -> dict[str, Any]:
    """Run a part: tests by outcome, names of those that failed, seconds, exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        begin = time.monotonic()
        chosen = f"{part.file}::{part.test}" if part.test else str(part.file)
        status = run([*part.way, "--minutes", _MINUTES, "--", *_PYTEST, f"--junitxml={report}", chosen])
        seconds = time.monotonic() - begin
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    outcomes = [(case.get("name", ""), _outcome(case)) for case in cases]
    counts = {each: sum(outcome == each for _, outcome in outcomes) for each in _OUTCOMES}
    failed = [name for name, outcome in outcomes if outcome == "failed"]
    return {**counts, "names": failed, "seconds": round(seconds), "status": status}


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def page(commit: str, versions: Mapping[str, str], rows: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    names = [_name(part) for part in parts()]
    ran = "All of it ran" if all(name in rows for name in names) else "What ran by now, ran"
    passed, seconds = (sum(row[what] for row in rows.values()) for what in ("passed", "seconds"))
    failures = [each for name, row in rows.items() for each in _failures(name, row)]
    lines = [
        "# The last run on the emulated GPU",
        "",
        "Written by `python -m tests.emulated_gpu --all`. Nothing here is from a card. A test that is skipped one way runs the other, needs a card, "
        "or says what it lacks.",
        "",
        f"{ran} at commit {commit}: {passed} passed, {len(failures)} failed, in {seconds / 60:.0f} minutes; "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}.",
        "",
        "| file | how | passed | failed | skipped | seconds |",
        "|---|---|---:|---:|---:|---:|",
        *(_line(name, row) for name, row in rows.items()),
    ]
    missing = [name for name in names if name not in rows]
    for what, named in (("Failed", failures), ("Not run yet", missing)):
        lines += ["", f"{what}:", "", *(f"- {name}" for name in named)] if named else []
    return "\n".join(lines) + "\n"


def _name(part: Part) -> str:
    way = " ".join(part.way) or "memory alone"
    return f"{part.file.relative_to(_TESTS.parent)} {way} {part.test}".rstrip()


def _line(name: str, row: Mapping[str, Any]) -> str:
    file, _, way = name.partition(" ")
    counts = {**row, "failed": len(_failures(name, row))}
    return f"| {file} | {way} | {' | '.join(str(counts[each]) for each in _OUTCOMES)} | {row['seconds']} |"
