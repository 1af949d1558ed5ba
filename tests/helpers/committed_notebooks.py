"""Check what is committed in notebooks: receipts yes, widget state no, and never more than 1 MB."""

from __future__ import annotations

import json
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MOST_BYTES = 2**20


def faults(path: Path) -> list[str]:
    """What is wrong with a committed notebook."""
    notebook = json.loads(path.read_text())
    found = []
    if "widgets" in notebook["metadata"]:
        found.append("holds widget state: clear metadata.widgets")
    if path.stat().st_size > MOST_BYTES:
        found.append(f"is {path.stat().st_size / MOST_BYTES:.1f} MiB: at most 1")
    for cell in notebook["cells"]:
        # a cell may show how another one fails, and go on; one that fails itself ends so
        last = cell.get("outputs", [])[-1:]
        errors = [output for output in last if output["output_type"] == "error"]
        found += [f"ends in {error['ename']}: {error['evalue'][:80]}" for error in errors]
    return found


def main() -> int:
    """Print every fault; the exit status is 1 when there is one."""
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    wrong = [f"{path.name} {fault}" for path in notebooks for fault in faults(path)]
    print("\n".join(wrong) or f"{len(notebooks)} notebooks are fit to be committed")
    return 1 if wrong or not notebooks else 0


if __name__ == "__main__":
    sys.exit(main())
