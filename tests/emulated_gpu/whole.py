"""Everything that runs on the emulated GPU, file after file, and the page of what came out: `python -m tests.emulated_gpu --all`."""

from __future__ import annotations

import platform
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "last_run.md"
_TESTS = HERE.parent
_MEMORY: tuple[str, ...] = ()
_VALUES = ("--values",)
_LATE = ("--values", "--late")
_MINUTES = "30"
_PYTEST = (
    "python",
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-m",
    "",
    "--tb=short",
    "--show-capture=no",
    "-rfE",
)
_PACKAGES = ("torch", "transformers", "bitsandbytes", "deepspeed", "accelerate")
# files of `tests/gpu` that need more than one GPU, or another one
_OPTIONS = {"test_export_ranks_cuda.py": ("--devices", "2")}

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


@dataclass(frozen=True)
class Result:
    """What came out of a part.

    Args:
        part: which.
        counts: tests by outcome.
        failed: names of those that failed.
        seconds: it took.
        status: exit status of pytest.
    """

    part: Part
    counts: Counter[str]
    failed: tuple[str, ...]
    seconds: float
    status: int

    @property
    def is_good(self) -> bool:
        """Return whether nothing failed; a file in which nothing is to be run this way is good."""
        return self.status in (0, 5)


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
        wanted: words of which the path of a file has one; none for all, and for the page.

    Returns:
        0 if nothing failed, else 1.
    """
    results = []
    for part in parts():
        if wanted and not any(word in str(part.file) for word in wanted):
            continue
        results.append(_result(run, part))
        print(_line(results[-1]), file=sys.stderr, flush=True)
    if not wanted:
        PAGE.write_text(page(results))
    return 0 if all(result.is_good for result in results) else 1


def _result(run: Run, part: Part) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        begin = time.monotonic()
        status = run([*part.way, "--minutes", _MINUTES, "--", *_PYTEST, f"--junitxml={report}", str(part.file)])
        seconds = time.monotonic() - begin
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    outcomes = [(case.get("name", ""), _outcome(case)) for case in cases]
    failed = tuple(name for name, outcome in outcomes if outcome == "failed")
    return Result(part, Counter(outcome for _, outcome in outcomes), failed, seconds, status)


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def page(results: Sequence[Result]) -> str:
    """The results as Markdown."""
    total: Counter[str] = sum((result.counts for result in results), Counter())
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    lines = [
        "# The last run on the emulated GPU",
        "",
        "Written by `python -m tests.emulated_gpu --all`. Nothing here is from a card. A test that is skipped one way runs the other, needs a card, "
        "or says what it lacks.",
        "",
        f"{total['passed']} passed, {total['failed']} failed, in {sum(result.seconds for result in results) / 60:.0f} minutes of "
        f"{platform.machine()}; Python {platform.python_version()}, {versions}.",
        "",
        "| file | how | passed | failed | skipped | seconds |",
        "|---|---|---:|---:|---:|---:|",
        *map(_line, results),
    ]
    failed = [
        f"- {result.part.file.name} ({_way(result.part)}): {name}" for result in results for name in result.failed
    ]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def _line(result: Result) -> str:
    counts = " | ".join(str(result.counts[outcome]) for outcome in ("passed", "failed", "skipped"))
    ended = "" if result.is_good or result.failed else f" (status {result.status})"
    file = result.part.file.relative_to(_TESTS.parent)
    return f"| {file} | {_way(result.part)}{ended} | {counts} | {result.seconds:.0f} |"


def _way(part: Part) -> str:
    return " ".join(part.way) or "memory alone"
