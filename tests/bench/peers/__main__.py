"""memlab against the tools people use already, on the same work.

python -m tests.bench.peers                      run what has not been run yet, small on a CPU, full on a GPU
python -m tests.bench.peers --only 8bit finding  these contests only
python -m tests.bench.peers --minutes 9          end in time; the same command goes on where it stopped
python -m tests.bench.peers --show               show what is there, run nothing
python -m tests.bench.peers --page               write docs/compared.md's section and docs/peers.html anew, run nothing
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.bench.peers import page, runner
from tests.bench.peers.causes import CAUSES
from tests.bench.peers.contests import BY_NAME, CONTESTS
from tests.bench.peers.records import SCALES, Contest, Record, RecordFile
from tests.bench.readme import COMPARED, with_section

RESULTS = Path(__file__).parents[1] / "results" / "peers"
PAGE = runner.ROOT / "docs" / "peers.html"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="NAME", help=f"of {', '.join(BY_NAME)}")
    made.add_argument("--scale", choices=SCALES, help="size of the work (default: full on a GPU, else small)")
    made.add_argument("--fresh", action="store_true", help="forget earlier results of these contests and begin anew")
    made.add_argument("--minutes", type=float, help="end before so many minutes are over")
    made.add_argument("--show", action="store_true", help="show what has been measured; run nothing")
    made.add_argument(
        "--page", action="store_true", help="write docs/compared.md's section and docs/peers.html; run nothing"
    )
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, show or write."""
    options = parser().parse_args(arguments)
    if not options.show and not options.page:
        _run(options)
    found = page.sheets(CONTESTS, records_in(options.results), SCALES if options.scale == "tiny" else SCALES[1:])
    if options.page:
        write(found)
        return 0
    for sheet in found:
        print(f"\n{page.text(sheet)}")
    return 0


def _run(options: argparse.Namespace) -> None:
    where = runner.here(options.scale or ("full" if runner.has_gpu() else "small"))
    contests = chosen(options.only, where.scale)
    stored = RecordFile.read(options.results / f"{slug(where.device)}.jsonl")
    if options.fresh:
        stored.forget([each.name for each in contests], where.scale)
    remaining = runner.run_all(contests, where, stored, say, minutes=options.minutes)
    if not remaining:
        stored.tidy()
        say(f"complete: {stored.path}; --page writes {COMPARED.name}'s section and {PAGE.name}")


def chosen(names: Sequence[str] | None, scale: str) -> list[Contest]:
    """The contests that were named, or all that are part of a run at this scale."""
    return [BY_NAME[each] for each in names] if names else [each for each in CONTESTS if scale in each.scales]


def records_in(folder: Path) -> list[Record]:
    """All records, of all devices."""
    return [record for path in sorted(folder.glob("*.jsonl")) for record in RecordFile.read(path).records]


def write(found: Sequence[page.Sheet]) -> None:
    """Write the section of `docs/compared.md` and `docs/peers.html` from what was measured."""
    COMPARED.write_text(with_section(COMPARED.read_text(), "peers", page.section(found, CAUSES)))
    PAGE.write_text(page.html(found, CAUSES))
    print(f"written: {COMPARED.name}, {PAGE.name}")


def slug(name: str) -> str:
    """A file name made of a device name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
