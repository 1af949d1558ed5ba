"""Measure the figures on this machine, write them as JSON and show them.

python -m tests.bench            measure and write tests/bench/results/<device>.json
python -m tests.bench --only handover     measure some figures anew and keep the others
python -m tests.bench --show     show what was measured last, on every device
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from memlab.records.comparison import Comparison
from memlab.records.run_record import RunRecord
from memlab.report import tables, text
from tests.bench import figures
from tests.bench.building import building
from tests.bench.figures import Figure
from tests.bench.first_paint import first_paint
from tests.bench.handover import handover
from tests.bench.live import live
from tests.bench.offloading import offloading
from tests.bench.plain_cell import plain_cell

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Parse the command line, then measure or show."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--show", action="store_true", help="show the results in the repository, measure nothing")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs behind each time ratio (default 20)")
    parser.add_argument(
        "--only", nargs="+", choices=list(runs(fastest(), 1)), help="measure these anew, keep the others"
    )
    options = parser.parse_args()
    if options.show:
        for path in sorted(RESULTS.glob("*.json")):
            measured = json.loads(path.read_text())
            if "techniques" in measured:  # what other programs measured lies there too
                show(measured)
        return
    measured = measure_again(options.only, options.pairs) if options.only else measure(options.pairs)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{slug(measured['device'])}.json"
    path.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n")
    show(measured)
    print(f"\nwritten to {path.relative_to(Path.cwd())}")


def runs(device: torch.device, pairs: int) -> dict[str, Callable[[], list[Figure]]]:
    """What measures figures, by name."""
    with_browser = {"first paint": first_paint} if find_spec("playwright") else {}
    return {
        "watching": lambda: figures.watching(device, pairs),
        "rescuing": lambda: figures.rescuing(device, pairs),
        "accumulation": lambda: figures.accumulation(device, pairs),
        "by hand": lambda: figures.by_hand(device, pairs),
        "arithmetic": lambda: figures.arithmetic(device),
        "plain cell": lambda: plain_cell(pairs),
        "live panel": live,
        **with_browser,
        "building": building,
        "offloading": lambda: offloading(device, pairs),
        "handover": handover,
    }


def figures_of(names: Iterable[str], device: torch.device, pairs: int) -> list[dict]:
    """Measure some."""
    found: list[Figure] = []
    for name in names:
        print(f"measuring {name} …", flush=True)
        gc.collect()  # models of other figures
        found += runs(device, pairs)[name]()
    return [{**asdict(figure), "holds": figure.holds} for figure in found]


def measure(pairs: int) -> dict:
    """Run every figure on the fastest device here."""
    device = fastest()
    found = figures_of(runs(device, pairs), device, pairs)
    print("measuring techniques …", flush=True)
    gc.collect()
    record = RunRecord(without_timelines(figures.techniques(device)), versions=versions())
    return {
        "device": name_of(device),
        "machine": platform.machine(),
        "figures": found,
        "techniques": json.loads(record.to_json()),
    }


def measure_again(names: Iterable[str], pairs: int) -> dict:
    """What was measured last on this device, with some figures measured anew."""
    device = fastest()
    last = json.loads((RESULTS / f"{slug(name_of(device))}.json").read_text())
    found = figures_of(names, device, pairs)
    kept = [figure for figure in last["figures"] if figure["name"] not in {each["name"] for each in found}]
    return {**last, "figures": kept + found}


def fastest() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def name_of(device: torch.device) -> str:
    """A device in words."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"cpu {torch.get_num_threads()} threads"


def without_timelines(comparison: Comparison) -> Comparison:
    """The comparison without the course of each step, which would be most of the file."""
    return replace(comparison, measurements=tuple(replace(m, timeline=()) for m in comparison.measurements))


def show(measured: dict) -> None:
    """Print one machine's figures and its table of techniques."""
    print(f"\n{measured['device']} · torch {measured['techniques']['versions']['torch']}")
    for line in figure_lines(measured["figures"]):
        print(line)
    print()
    print(text.table(tables.comparison(RunRecord.from_json(json.dumps(measured["techniques"])).comparison)))


def figure_lines(found: Iterable[dict]) -> list[str]:
    """One aligned line per figure."""
    lines = []
    for figure in found:
        bound = f"≤ {figure['bound']:.2f}" if figure["bound"] is not None else ""
        verdict = "holds" if figure["holds"] else "FALLS SHORT"
        lines.append(f"  {figure['name']:<72}{figure['value']:>8.3f}  {bound:<8}{verdict}")
    return lines


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {package: version(package) for package in ("torch", "transformers", "bitsandbytes")}


def slug(name: str) -> str:
    """A file name made of a device name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    main()
