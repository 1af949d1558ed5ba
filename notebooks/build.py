"""Make the notebooks from their sources: run them, and keep outputs that need no kernel to be shown.

    python notebooks/build.py [NAME …]

A source is Markdown; each ```python block becomes a code cell. Committed notebooks hold the outputs of a run but no widget
state, so they show on any page and stay small.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

_HERE = Path(__file__).parent
_FENCE = re.compile(r"^```python\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)
_MOST_SECONDS_PER_CELL = 600
# threads that wait let others run: speeds stay meaningful on a machine that does something else as well.
# What is installed is what runs: nothing is looked up in a hub
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def notebook_of(source: str) -> nbformat.NotebookNode:
    r"""Cells of a source, without outputs.

    Example:
        >>> [cell.cell_type for cell in notebook_of("# Title\n\n```python\n1 + 1\n```\n").cells]
        ['markdown', 'code']
    """
    cells = []
    for number, part in enumerate(_FENCE.split(source)):
        text = part.strip("\n")
        if text.strip():
            kind = nbformat.v4.new_code_cell if number % 2 else nbformat.v4.new_markdown_cell
            cells.append(kind(text, id=f"cell-{len(cells):02}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def run(notebook: nbformat.NotebookNode) -> None:
    """Execute a notebook in place, as from the folder it lies in."""
    client = NotebookClient(notebook, timeout=_MOST_SECONDS_PER_CELL, kernel_name="python3")
    client.execute(cwd=str(_HERE), env={**os.environ, **ENVIRONMENT})


def strip(notebook: nbformat.NotebookNode) -> None:
    """Drop what changes from run to run, needs a kernel or is there twice: times, widget state, emptied progress lines, pictures."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            for output in cell.outputs:
                # needs a kernel; what the same output says in text stays
                data = output.get("data", {})
                data.pop("application/vnd.jupyter.widget-view+json", None)
                # its HTML has the same picture, with its alternative text
                if data.get("image/png", "").strip() in data.get("text/html", ""):
                    data.pop("image/png", None)
            cell.outputs = [output for output in cell.outputs if not _is_blank(output) and not _is_progress(output)]


def _is_blank(output: nbformat.NotebookNode) -> bool:
    return output.output_type == "display_data" and not any(output.data.values())


def _is_progress(output: nbformat.NotebookNode) -> bool:
    """Whether it says how far memlab was, and nothing else."""
    lines = output.text.splitlines() if output.output_type == "stream" and output.name == "stderr" else []
    return bool(lines) and all(line.startswith("memlab: ") for line in lines)


def main() -> None:
    """Build the named notebooks, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="sources without ending")
    names = parser.parse_args().names or sorted(path.stem for path in (_HERE / "source").glob("*.md"))
    for name in names:
        began = time.monotonic()
        notebook = notebook_of((_HERE / "source" / f"{name}.md").read_text(encoding="utf-8"))
        run(notebook)
        strip(notebook)
        target = _HERE / f"{name}.ipynb"
        nbformat.write(notebook, target)
        print(f"{target.name}: {time.monotonic() - began:.0f} s, {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
