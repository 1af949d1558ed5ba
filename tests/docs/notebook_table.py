"""The table of what each notebook of the course needs, from what `python -m tests.bench.notebooks` measured."""

from __future__ import annotations

from typing import Any

from tests.docs.markdown import table


def table_of(measured: dict[str, Any]) -> str:
    """A row per notebook, and a line on the machine."""
    rows = (
        (f"[{name}](../notebooks/{name}.ipynb)", f"{each['seconds']:.0f} s", f"{each['peak_resident_mib']:,.0f} MiB")
        for name, each in sorted(measured["notebooks"].items())
    )
    whole = sum(each["seconds"] for each in measured["notebooks"].values())
    said = (
        f"Measured on {measured['machine']}, {measured['date']}; one after another they take {whole / 60:.1f} minutes."
    )
    return table(("notebook", "runs in", "peak resident"), rows) + f"\n\n{said}"
