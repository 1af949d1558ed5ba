"""Everything that runs on the emulated GPU, file after file, and the page of what came out: `python -m tests.emulated_gpu --all`.

Results are kept by file and way, so that a few files can be run again; those of other versions are dropped.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
_OF_TWO = ("test_export_ranks_cuda.py", "test_notebooks_cuda.py", "test_scaleout_cuda.py")
_OPTIONS = dict.fromkeys(_OF_TWO, ("--devices", "2"))

_OUTCOMES = ("passed", "failed", "skipped")

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Part:
    """One file, run in one way.

    Args:
        file: of tests.
        way: options of the emulated GPU.
    """

    file: Path
    way: tuple[str, ...]


def parts() -> Iterator[Part]:
    """All there is: the emulation's own tests, then those of the CUDA lines, with values and without."""
    yield Part(HERE / "test_emulated.py", (*_LATE, "--devices", "2"))
    yield Part(HERE / "test_emulated.py", (*_VALUES, "--gpu", "H100 SXM"))
    for file in sorted((_TESTS / "gpu").glob("test_*.py")):
        text, more = file.read_text(), _OPTIONS.get(file.name, ())
        if "mark.memory" in text:
            yield Part(file, (*_MEMORY, *more))
        yield Part(file, (*_VALUES, *more))
    for name in ("test_offload_cuda.py", "test_offload_params_cuda.py"):
        yield Part(_TESTS / "gpu" / name, _LATE)


def run_all(run: Run, wanted: Sequence[str]) -> int:
    """Run all parts and write the page.

    Args:
        run: what `python -m tests.emulated_gpu` does with arguments; returns the exit status.
        wanted: words of which the path of a file has one; none for all.

    Returns:
        0 if nothing failed, else 1.
    """
    versions = {"Python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    rows: dict[str, Any] = kept.get("rows", {}) if kept.get("versions") == versions else {}
    is_good, order = True, []
    for part in parts():
        order.append(_name(part))
        if wanted and not any(word in str(part.file) for word in wanted):
            continue
        rows[_name(part)] = row = _row(run, part)
        is_good &= row["status"] in (0, 5)  # 5: nothing of this file is run this way
        print(_line(_name(part), row), file=sys.stderr, flush=True)
        rows = {name: rows[name] for name in order if name in rows} | rows
        KEPT.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    rows = {name: rows[name] for name in order if name in rows}  # without those of files that are gone
    KEPT.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    PAGE.write_text(page(versions, rows))
    return 0 if is_good else 1


def _row(run: Run, part: Part) -> dict[str, Any]:
    """Run a part: tests by outcome, names of those that failed, seconds, exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        begin = time.monotonic()
        status = run([*part.way, "--minutes", _MINUTES, "--", *_PYTEST, f"--junitxml={report}", str(part.file)])
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


def page(versions: Mapping[str, str], rows: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    passed, failed, seconds = (sum(row[what] for row in rows.values()) for what in ("passed", "failed", "seconds"))
    lines = [
        "# The last run on the emulated GPU",
        "",
        "Written by `python -m tests.emulated_gpu --all`. Nothing here is from a card. A test that is skipped one way runs the other, needs a card, "
        "or says what it lacks.",
        "",
        f"{passed} passed, {failed} failed, in {seconds / 60:.0f} minutes; "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}.",
        "",
        "| file | how | passed | failed | skipped | seconds |",
        "|---|---|---:|---:|---:|---:|",
        *(_line(name, row) for name, row in rows.items()),
    ]
    missing = [name for name in map(_name, parts()) if name not in rows]
    for what, names in (
        ("Failed", [f"{name}: {test}" for name, row in rows.items() for test in row["names"]]),
        ("Not run with these versions, or not since it is there", missing),
    ):
        lines += ["", f"{what}:", "", *(f"- {name}" for name in names)] if names else []
    return "\n".join(lines) + "\n"


def _name(part: Part) -> str:
    return f"{part.file.relative_to(_TESTS.parent)} {' '.join(part.way) or 'memory alone'}"


def _line(name: str, row: Mapping[str, Any]) -> str:
    file, _, way = name.partition(" ")
    ended = "" if row["status"] in (0, 5) or row["failed"] else f" (status {row['status']})"
    return f"| {file} | {way}{ended} | {' | '.join(str(row[each]) for each in _OUTCOMES)} | {row['seconds']} |"
