"""How long each notebook of the course runs here, and how much memory it needs at its peak.

python -m tests.bench.notebooks               run all, write results/notebooks.json and the table of docs/instructors_guide.md
python -m tests.bench.notebooks 03_checkpointing …     run some; the others keep what was measured before

Notebooks run one after another, as their sources are: on a machine that does nothing else the seconds are worth something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from tests.bench.machine import here
from tests.docs import pages
from tests.docs.__main__ import main as write_pages
from tests.helpers.notebooks import NOTEBOOKS, build

_SECONDS_BETWEEN_LOOKS = 0.1
_MIB = 2**20


class ResidentPeak:
    """Watches what the processes below this one have in memory together; what they share counts for each.

    Attributes:
        mib: the most that was seen.
    """

    def __init__(self) -> None:
        self.mib = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look ten times a second."""
        over = threading.Event()
        thread = threading.Thread(target=self._look_until, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look_until(self, over: threading.Event) -> None:
        while not over.wait(_SECONDS_BETWEEN_LOOKS):
            self.mib = max(self.mib, resident_bytes() / _MIB)


def resident_bytes() -> int:
    """Of all processes below this one."""
    found = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += process.memory_info().rss
    return found


def measured(name: str) -> dict[str, float]:
    """Run a notebook from top to bottom; its seconds and its peak.

    Args:
        name: of the source, without ending.
    """
    program = build()
    notebook = program.notebook_of((NOTEBOOKS / "source" / f"{name}.md").read_text("utf-8"))
    peak = ResidentPeak()
    began = time.monotonic()
    with peak.watching():
        program.run(notebook)
    return {"seconds": round(time.monotonic() - began, 1), "peak_resident_mib": round(peak.mib)}


def main() -> None:
    """Run, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.notebooks", description=__doc__)
    parser.add_argument("names", nargs="*", help="sources without ending; by default all")
    every = sorted(path.stem for path in (NOTEBOOKS / "source").glob("*.md"))
    found: dict[str, Any] = {"notebooks": {}}
    if pages.NOTEBOOK_RESULTS.exists():
        found = json.loads(pages.NOTEBOOK_RESULTS.read_text("utf-8"))
    for name in parser.parse_args().names or every:
        found["notebooks"][name] = measured(name)
        print(name, found["notebooks"][name], flush=True)
        # after each, so that a run that is ended keeps what it has
        kept = {name: each for name, each in sorted(found["notebooks"].items()) if name in every}
        written = {**here(), "notebooks": kept}
        pages.NOTEBOOK_RESULTS.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    write_pages()


if __name__ == "__main__":
    main()
