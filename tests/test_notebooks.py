"""The notebooks run from top to bottom, without a network, and show what they say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.notebooks import NOTEBOOKS, build

nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")

_ROOT = Path(__file__).parents[1]
_MOST_BYTES = 2**20
_LEAST_WORDS = 20  # characters of an alternative text
_SINGLE = ("--accumulate 4", "--checkpoint", "--bf16", "--adam8bit", "--offload activations")
_TOGETHER = "--accumulate 4 --checkpoint --bf16 --adam8bit --offload activations,optimizer"
_LOSSES = "import json; print(json.dumps([expected, losses, kept_whole]))"
_PEAKS = "import json; print(json.dumps([half, [[m.plan, m.peak_allocated_bytes] for m in comparison.measurements]]))"


@pytest.mark.parametrize("source", sorted(NOTEBOOKS.glob("source/*.md")), ids=lambda path: path.stem)
class TestCommitted:
    """What lies in the repository is what the source says, small, and needs no kernel to be read."""

    def test_is_built_from_its_source(self, source: Path) -> None:
        committed = nbformat.read(NOTEBOOKS / f"{source.stem}.ipynb", as_version=4)
        wanted = build().notebook_of(source.read_text(encoding="utf-8"))
        assert [(c.cell_type, c.source) for c in committed.cells] == [(c.cell_type, c.source) for c in wanted.cells]

    def test_is_small_and_holds_receipts_but_no_widgets(self, source: Path) -> None:
        file = NOTEBOOKS / f"{source.stem}.ipynb"
        committed = nbformat.read(file, as_version=4)
        assert file.stat().st_size < _MOST_BYTES
        assert "widgets" not in committed.metadata
        bundles = [o.data for c in committed.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
        pictures = [data for data in bundles if "image/png" in data or "<img " in data.get("text/html", "")]
        assert len(pictures) >= 2
        assert all("text/plain" in data for data in pictures)
        assert any("text/html" in data for data in bundles)
        assert not any(kind.startswith("application/vnd.jupyter.widget") for data in bundles for kind in data)

    def test_every_picture_says_in_words_what_it_shows(self, source: Path) -> None:
        committed = nbformat.read(NOTEBOOKS / f"{source.stem}.ipynb", as_version=4)
        outputs = [o for c in committed.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
        for output in outputs:
            shown = output.data.get("text/html", "")
            for picture in re.findall(r"<img [^>]*>", shown):
                assert len(re.findall(r'alt="([^"]*)"', picture)[0]) >= _LEAST_WORDS, picture[:80]
            for kind in output.data:
                if kind.startswith("image/"):
                    assert len(output.metadata.get(kind, {}).get("alt", "")) >= _LEAST_WORDS, output.data["text/plain"]
            # what matplotlib shows by itself has none
            assert "<Figure size" not in output.data["text/plain"]
        # nor have pictures in text, unless it is given
        for cell in committed.cells:
            if cell.cell_type == "markdown":
                assert not re.search(r"!\[\s*\]\(|<img (?![^>]*alt=\"[^\"])", cell.source)

    def test_shows_no_path_of_the_machine_it_ran_on(self, source: Path) -> None:
        text = (NOTEBOOKS / f"{source.stem}.ipynb").read_text(encoding="utf-8")
        assert str(_ROOT) not in text
        assert str(Path.home()) + "/" not in text


# chapters of the course; the others have tests of their own below
_CHAPTERS = (
    "01_where_the_memory_goes", "02_gradient_accumulation", "03_checkpointing", "04_lower_precision", "05_8_bit_adam",
    "06_offload", "07_finding_the_plan",
    "10_inference", "11_your_own_model", "12_it_fits_and_fails_later",
    "13_adapters", "14_evaluating_and_saving",
)  # fmt: skip
_CHAPTER_RAM_KIB = 2**20
# not `ru_maxrss`: a child starts with its parent's, that is with what the tests before this one took
_RESIDENT = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def _executed(name: str, *cells: str, without: str = "") -> Any:
    """A chapter that was run to its end in little memory, with some cells behind it, and what a reader who types nothing is told."""
    builder, source = build(), (NOTEBOOKS / "source" / f"{name}.md").read_text(encoding="utf-8")
    assert without in source
    notebook = builder.notebook_of(source.replace(without, ""))
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in (_RESIDENT, *cells)]
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    # one thread each, as in the other kernels of these tests: two notebooks with two threads each share two cores badly
    client.execute(env={**os.environ, **builder.ENVIRONMENT, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"})
    resident = notebook.cells[-1 - len(cells)]
    assert int(resident.outputs[0].text) < _CHAPTER_RAM_KIB
    said = "".join(
        str(o.get("data", {}).get("text/plain", "")) for c in notebook.cells if "outputs" in c for o in c.outputs
    )
    # nothing is counted as wrong
    assert ": not attempted." in said
    assert "no guess was made yet" in said
    return notebook


@pytest.mark.few(0, full=2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _CHAPTERS)
def test_a_chapter_runs_to_its_end_in_little_memory(name: str) -> None:
    _executed(name)


# the first chapter's own test, which holds it to what the others are held to as well
@pytest.mark.full
@pytest.mark.timeout(900)
def test_make_it_fit_runs_and_memory_falls() -> None:
    notebook = _executed("00_make_it_fit", _PEAKS)
    half_bytes, measured = json.loads(notebook.cells[-1].outputs[0].text)
    peaks = dict(measured)
    first, chosen = next(iter(peaks)), list(peaks)[-1]
    assert first == "as written"
    assert {*_SINGLE, _TOGETHER} <= peaks.keys()
    # the budget is rounded to a MiB
    assert peaks[chosen] <= half_bytes + 2**19
    assert all(peaks[plan] < 0.98 * peaks[first] for plan in _SINGLE)
    assert peaks[_TOGETHER] < 0.4 * peaks[first]
    assert all(peaks[_TOGETHER] < peaks[plan] for plan in _SINGLE)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_keep_going_runs_to_the_end_where_memory_runs_out() -> None:
    notebook = _executed("08_keep_going", _LOSSES)
    expected, rescued, kept_whole = json.loads(notebook.cells[-1].outputs[0].text)
    assert len(expected) == 20
    assert rescued == pytest.approx(expected, rel=1e-5)
    assert kept_whole == pytest.approx(expected, rel=1e-5)
    printed = "".join(o.text for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "text" in o)
    assert "step 12: memory ran out in the " in printed
    assert "→ --accumulate " in printed
    assert "→ --checkpoint, same batch again" in printed
    assert "ran out of memory under every plan there is to try" in printed


_HANDED_OVER = """
import json
import psutil
peaks = {engine: each.peak_allocated_bytes for engine, each in ranks.items()}
left = len(psutil.Process().children(recursive=True))
peaks["handed over"] = launched.comparison.measurements[0].peak_allocated_bytes
print(json.dumps([difference, one.peak_allocated_bytes, peaks, left]))
"""


@pytest.mark.few(0, full=0)
@pytest.mark.timeout(900)
def test_beyond_one_gpu_hands_over_and_comes_home() -> None:
    # `tests/scaleout` trains under every engine, and the cell before uses one of DeepSpeed's: three launches fewer
    of_deepspeed = '"ddp", "zero1", "zero2", "zero3", "fsdp2") if HAS_DEEPSPEED else ('
    notebook = _executed("09_beyond_one_gpu", _HANDED_OVER, without=of_deepspeed)
    difference, one_bytes, peaks, left = json.loads(notebook.cells[-1].outputs[0].text)
    assert difference < 1e-4
    # DDP divides the batch alone, and its buckets for averaging are as large as the gradients
    assert peaks.pop("ddp") < one_bytes
    assert peaks.keys() == {"fsdp2", "handed over"}
    assert all(peak_bytes < 0.9 * one_bytes for peak_bytes in peaks.values()), (peaks, one_bytes)
    assert left == 0
    shown = [o.data["text/plain"] for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    assert any("one process" in text and "rank 1" in text for text in shown)
