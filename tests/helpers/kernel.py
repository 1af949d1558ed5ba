"""Cells in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.environment import with_path

_ROOT = Path(__file__).parents[2]


def run_in_kernel(sources: Mapping[str, str]) -> dict[str, Any]:
    """Run cells in one kernel, each whatever became of those before it; returns them by name."""
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(source, id=name.replace("_", "-")) for name, source in sources.items()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    environment = {**with_path(_ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True)
    client.execute(env=environment)
    for cell in notebook.cells:
        cell.outputs = as_shown(cell.outputs)
    return dict(zip(sources, notebook.cells, strict=True))


def as_shown(outputs: list[Any]) -> list[Any]:
    """Outputs as a page shows them: a kernel may send one line in two messages, which stand together.

    Example:
        >>> from nbformat.v4 import new_output
        >>> [output.text for output in as_shown([new_output("stream", text="freed"), new_output("stream", text=".")])]
        ['freed.']
    """
    shown: list[Any] = []
    for output in outputs:
        if shown and output.output_type == shown[-1].output_type == "stream" and output.name == shown[-1].name:
            shown[-1].text += output.text
        else:
            shown.append(output)
    return shown


def text_of(cell: Any) -> str:
    """Everything a cell printed."""
    return "".join(output.get("text", "") for output in cell.outputs)


def frames_of_memlab(text: str) -> list[str]:
    """Files of the package that a traceback names, wherever the package lies.

    Example:
        >>> frames_of_memlab("File ~/memlab/.venv/lib/IPython/core.py:3, in run"), frames_of_memlab("~/memlab/memlab/runtime/hooks.py:3")
        ([], ['memlab/runtime/hooks.py'])
    """
    return re.findall(
        r"\bmemlab/(?:\w+/)*\w+\.py", re.sub(r"\x1b\[[\d;]*m", "", text).replace("memlab/memlab/", "memlab/")
    )
