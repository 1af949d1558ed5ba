"""The magics in a real kernel: its event loop runs, and outputs are messages."""

from __future__ import annotations

import os
from base64 import b64decode
from html import escape
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")

from tests.helpers.kernel import frames_of_memlab, run_in_kernel, text_of  # noqa: E402
from tests.jupyter.conftest import MAKE, TRAIN  # noqa: E402

_ROOT = Path(__file__).parents[2]

SLOW = TRAIN.replace("range(4)", "range(12)") + "    time.sleep(0.25)\n"

CELLS = {
    "load": "%load_ext memlab\n%config MemLab.predict = False",
    "make": f"import asyncio, time\n{MAKE}",
    "train": f"%%memfit\n{TRAIN}",
    "await": f"%%memfit --accumulate 4\nasync def batches():\n    await asyncio.sleep(0.01)\n    return inputs\n"
    f"inputs = await batches()\n{TRAIN}asyncio.get_running_loop().time() > 0",
    "loop": "asyncio.get_running_loop().is_running(), type(await asyncio.sleep(0))",
    "raise": "%%memfit\n\ndef fail():\n    raise KeyError('gone')\nfail()",
    "raise_async": "%%memfit\nawait asyncio.sleep(0)\n{}['later']",
    "raise_in_model": f"%%memfit\nhandle = model.register_forward_hook(lambda *_: {{}}['model'])\n{TRAIN}",
    "unhook": "handle.remove()",
    "syntax": "%%memfit\nx = = 1",
    "flag": "%%memfit --accumulte 4\n1",
    "slow": f"%%memfit\n{SLOW}",
    "report": "%memfit report",
    "last": "%%memfit\n40 + 2",
}


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """Every cell, run in one kernel, by name."""
    return run_in_kernel(CELLS)


def receipts(cell: Any) -> list[Any]:
    return [o.data for o in cell.outputs if "memlab-receipt" in o.get("data", {}).get("text/html", "")]


def errors(cell: Any) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == "error"]


def test_a_receipt_is_one_output_in_every_format(ran: dict[str, Any]) -> None:
    (receipt,) = receipts(ran["train"])
    assert set(receipt) == {"text/plain", "text/html"}  # one row: there is nothing to compare in a picture
    assert set(receipts(ran["await"])[0]) == {"text/plain", "text/html", "image/png"}
    assert receipt["text/plain"].startswith(
        "memfit · Sequential 1.73k · AdamW · cpu · batch 12 × 16 · CPU ledger · 4 steps"
    )
    assert "widgets" not in ran["train"].metadata


def test_top_level_await_has_an_event_loop(ran: dict[str, Any]) -> None:
    assert not errors(ran["await"])
    assert "--accumulate 4" in receipts(ran["await"])[0]["text/plain"]
    assert any(
        output.output_type == "execute_result" and output.data["text/plain"] == "True"
        for output in ran["await"].outputs
    )


def test_the_kernels_own_loop_goes_on(ran: dict[str, Any]) -> None:
    assert ran["loop"].outputs[0].data["text/plain"] == "(True, NoneType)"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [("raise", "'gone'", "line 5"), ("raise_async", "'later'", "line 3"), ("raise_in_model", "'model'", "line 2")],
)
def test_an_error_is_one_message_with_the_users_lines(ran: dict[str, Any], name: str, value: str, line: str) -> None:
    (error,) = errors(ran[name])
    assert (error.ename, error.evalue) == ("KeyError", value)
    shown = "\n".join(error.traceback)
    assert f"In[{ran[name].execution_count}]" in shown.replace("\x1b[39m", "").replace("\x1b[32m", "")
    assert line in shown
    assert not frames_of_memlab(shown)
    assert "run_cell_magic" not in shown


def test_a_syntax_error_is_one_message(ran: dict[str, Any]) -> None:
    (error,) = errors(ran["syntax"])
    assert error.ename == "SyntaxError"


def test_a_usage_error_is_a_line_and_fails_the_cell(ran: dict[str, Any]) -> None:
    assert text_of(ran["flag"]).startswith("UsageError: unknown flag --accumulte; did you mean --accumulate?")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(CELLS["load"]), nbformat.v4.new_code_cell(CELLS["flag"])]
    )
    client = nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="UsageError"):
        client.execute(env={**os.environ, "PYTHONPATH": str(_ROOT)})


def test_progress_is_one_display_that_ends_empty(ran: dict[str, Any]) -> None:
    progress = [
        o for o in ran["slow"].outputs if o.output_type == "display_data" and o.data not in receipts(ran["slow"])
    ]
    assert [dict(output.data) for output in progress] == [{"text/plain": "", "text/html": ""}]
    assert len(receipts(ran["slow"])) == 1


def test_a_report_adds_its_picture(ran: dict[str, Any]) -> None:
    pictures = [o.data for o in ran["report"].outputs if o.get("data", {}).get("text/html", "").startswith("<img ")]
    assert len(pictures) == 1
    assert b64decode(pictures[0]["image/png"])[1:4] == b"PNG"
    assert len(pictures[0]["image/png"]) < 100_000
    shown = next(o for o in ran["report"].outputs if o.get("data") == pictures[0])
    assert shown.metadata["image/png"]["alt"] == pictures[0]["text/plain"]
    assert f'alt="{escape(pictures[0]["text/plain"])}"' in pictures[0]["text/html"]
    assert pictures[0]["text/plain"].startswith("2 settings measured: as written peaks at ")
    assert len(receipts(ran["report"])) == 1


def test_the_last_value_is_an_execute_result(ran: dict[str, Any]) -> None:
    values = [o for o in ran["last"].outputs if o.output_type == "execute_result"]
    assert values[0].data["text/plain"] == "42"
    assert values[0].execution_count == ran["last"].execution_count
