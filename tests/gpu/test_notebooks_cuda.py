"""The notebooks on a GPU, at the sizes they have on a CPU: they run to their end, and receipts say what they ran on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.environment import with_path
from tests.helpers.needs import needs
from tests.helpers.notebooks import NOTEBOOKS, build

nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient")

pytestmark = [needs(gpu=1), pytest.mark.timeout(2400)]

_ROOT = Path(__file__).parents[2]
_SMALL = (
    "from memlab.workshop import material; material._SIZES = dict.fromkeys(material._SIZES, material._SIZES['cpu'])"
)
# sizes in a notebook's own text
_OWN_SIZES = re.compile(r'("cpu": (\(.+?\)), "small GPU": )\(.+?\)(, "large GPU": )\(.+?\)')
# each thread's 8 MiB would be a large part of what models of that size need
_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
_NAMES = sorted(path.stem for path in NOTEBOOKS.glob("source/*.md"))
_OF_TWO = "09_beyond_one_gpu"
# where there are more, `transformers.Trainer` copies a model onto all of them
_ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(gpu=1 + (name == _OF_TWO))) for name in _NAMES])
def test_it_runs_to_its_end(name: str) -> None:
    builder = build()
    text = (NOTEBOOKS / "source" / f"{name}.md").read_text(encoding="utf-8")
    notebook = builder.notebook_of(_OWN_SIZES.sub(r"\1\2\3\2", text))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_SMALL))
    client = nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3")
    visible = {} if name == _OF_TWO else _ONE_GPU
    client.execute(env={**with_path(_ROOT), **builder.ENVIRONMENT, **_WORKSPACES, **visible})
    receipts = [
        output.data["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.startswith("%%memfit")
        for output in cell.outputs
        if "text/plain" in output.get("data", {})
    ]
    said = "\n".join(receipts)
    assert torch.cuda.get_device_name() in said
    assert "reserved" in said
    assert "CPU" not in said, said
