"""A kernel with the packages of Colab's, years behind: cells, receipts, the panel, clicks and completion work in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import pytest

from tests.helpers.live_kernel import LiveKernel, live_kernel
from tests.jupyter.conftest import MAKE, STEP

pytest.importorskip("ipywidgets", reason="needs ipywidgets")
pytest.importorskip("jupyter_client", reason="needs jupyter_client")

pytestmark = pytest.mark.full

# what Colab's kernel has, and what IPython 7 needs that later ones do not
_PACKAGES = (
    "ipython==7.34.0", "ipykernel==6.17.1", "ipywidgets==7.7.1", "traitlets==5.7.1", "jupyter-client==6.1.12",
    "backcall", "pickleshare", "decorator", "ipython-genutils",
)  # fmt: skip
_VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    folder = tmp_path_factory.mktemp("hosted")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--target", folder, *_PACKAGES], check=True)
    with live_kernel(str(folder)) as made:
        made.run("%load_ext memlab\n" + MAKE)
        made.run(f"def train(steps):\n    for _ in range(steps):\n{indent(STEP.strip(), ' ' * 8)}")
        versions = "[__import__(name).__version__ for name in ('IPython', 'ipykernel', 'ipywidgets')]"
        assert made.value(versions) == ["7.34.0", "6.17.1", "7.7.1"]
        yield made


@pytest.fixture(scope="module")
def panel(kernel: LiveKernel) -> dict[str, Any]:
    """What the panel's cell shows, by format."""
    view, still = kernel.shown(kernel.run("panel = None\n%memfit panel"))
    return {**still, **view}


def test_a_cell_trains_and_shows_its_receipt(kernel: LiveKernel) -> None:
    cell = kernel.run("%%memfit --checkpoint\ntrain(6)")
    shown = next(each for each in kernel.shown(cell) if "--checkpoint" in each.get("text/html", ""))
    assert "--checkpoint" in shown["text/plain"]


def test_the_last_value_a_semicolon_and_await(kernel: LiveKernel) -> None:
    shown = kernel.shown(kernel.run("%%memfit --quiet\ntrain(1)\n6 * 7"))
    assert "42" in [each["text/plain"] for each in shown]
    shown = kernel.shown(kernel.run("%%memfit --quiet\ntrain(1)\n6 * 7;"))
    assert "42" not in [each["text/plain"] for each in shown]
    kernel.run("%%memfit --quiet\nimport asyncio\nawait asyncio.sleep(0)\ntrain(1)")


def test_an_error_is_shown_once_with_the_lines_of_the_cell(kernel: LiveKernel) -> None:
    cell = kernel.send("%%memfit\ntrain(1)\nraise KeyError('gone')")
    kernel.until_over(cell)
    assert kernel.errors(cell) == ["KeyError"]
    cell = kernel.send("%%memfit --accumulte 4\npass")
    kernel.until_over(cell)
    assert kernel.text(cell).startswith("UsageError: unknown flag --accumulte; did you mean --accumulate?")


def test_the_panel_is_a_widget_with_a_table_beside_it(kernel: LiveKernel, panel: dict[str, Any]) -> None:
    assert panel[_VIEW]["model_id"]
    assert "Gradient accumulation" in panel["text/html"]
    opened = [m for messages in kernel.messages.values() for m in messages if m["msg_type"] == "comm_open"]
    states = [m["content"]["data"].get("state", {}) for m in opened]
    assert [len(each["_esm"]) > 1_000_000 for each in states if "figure" in each] == [True]


def test_a_click_between_cells_is_in_force_in_the_next(kernel: LiveKernel, panel: dict[str, Any]) -> None:
    kernel.tell(panel[_VIEW]["model_id"], {"kind": "flip", "field": "gradients", "on": True})
    cell = kernel.run("%%memfit\ntrain(3)")
    assert any("--release-grads" in each.get("text/plain", "") for each in kernel.shown(cell))


def test_a_cell_in_the_background(kernel: LiveKernel) -> None:
    kernel.run("%%memfit --background --quiet\ntrain(3)\ncame_to_its_end = True")
    kernel.run("import memlab, time\nwhile 'came_to_its_end' not in globals(): time.sleep(0.05)")


def test_undo_and_completion(kernel: LiveKernel) -> None:
    kernel.run("%memfit undo")
    assert kernel.completed("%memfit pre") == ["predict"]
    assert kernel.completed("%%memfit --offload optimizer,act") == ["activations"]
    kernel.run("%unload_ext memlab")
    assert "predict" not in kernel.completed("%memfit pre")
