"""Which way imports point, and that importing memlab changes nothing."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "memlab"

# each part may import what stands before it
CORE = (
    "errors",
    "units",
    "extras",
    "plan",
    "records",
    "hardware",
    "allocator",
    "runtime",
    "techniques",
    "rescue",
    "session",
    "measuring",
    "trace",
    "predicting",
    "search",
    "report",
    "live",
)
# these serve one subject each, and nothing of the core imports them
GUESTS = ("building", "inferring", "scaleout", "workshop")
FRONT = ("exporting", "jupyter", "support", "__main__")  # these may import everything
STANDARD_LIBRARY_ONLY = {"errors", "units", "extras", "plan", "records", "hardware", "allocator"}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Top-level names a file imports when it runs; imports for annotations only do not count."""
    tree = ast.parse(path.read_text())
    annotations_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in annotations_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", *FRONT):
        return
    allowed = CORE[: CORE.index(part)] if part in CORE else CORE
    of_memlab = {name.split(".")[1] for name in imports_of(path) if name.startswith("memlab.")}
    assert of_memlab - {part} <= set(allowed)


def test_every_part_has_its_place() -> None:
    parts = {part_of(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert parts == {*CORE, *GUESTS, *FRONT}


@pytest.mark.parametrize("part", sorted(STANDARD_LIBRARY_ONLY))
def test_the_core_needs_only_the_standard_library(part: str) -> None:
    files = [ROOT / f"{part}.py"] if (ROOT / f"{part}.py").exists() else (ROOT / part).rglob("*.py")
    packages = {name.split(".")[0] for file in files for name in imports_of(file)} - {"memlab"}
    assert packages <= set(sys.stdlib_module_names)


# tests of the core that take a minute: of what needs no torch, of live runs, and between them a session, a search and a cell
OF_THE_CORE = (
    "tests/plan",
    "tests/records",
    "tests/allocator",
    "tests/report",
    "--ignore=tests/report/test_ranks.py",  # ranks are a guest's
    "tests/live",
    "tests/session/test_trial.py",
    "tests/search/test_finding.py::test_choosing_says_what_goes_on",
    "tests/jupyter/test_which_model.py",
)


@pytest.mark.full
def test_the_core_stands_without_its_guests(tmp_path: Path) -> None:
    bare = shutil.ignore_patterns("__pycache__", *GUESTS)
    shutil.copytree(ROOT, tmp_path / "memlab", ignore=bare)
    shutil.copytree(ROOT.parent / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT.parent / "pyproject.toml", tmp_path)
    # an editable installation would bring the folders back
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = f"import importlib.util as u; assert not any(u.find_spec('memlab.' + name) for name in {GUESTS})"
    subprocess.run([sys.executable, "-c", asked], cwd=tmp_path, env=environment, check=True)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *OF_THE_CORE],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 0, result.stdout[-3000:]


CHECK = """
import sys, os, warnings, threading
import torch
def state():
    return (dict(os.environ), torch.is_grad_enabled(), torch.get_default_dtype(), torch.cuda.is_initialized(),
            id(torch.nn.Module.__call__), id(torch.optim.Optimizer.step), list(warnings.filters), sys.excepthook,
            torch.get_float32_matmul_precision(), threading.active_count())
before = state()
import memlab
for name, place in memlab._PLACES.items():
    if place.split(".")[1] not in {others}:
        getattr(memlab, name)
{spoil}
assert state() == before
for name in ("IPython", "ipywidgets", "plotly", "matplotlib", "bitsandbytes", "transformers", "safetensors"):
    assert name not in sys.modules, name
"""


def run(spoil: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHECK.format(spoil=spoil, others=(*GUESTS, "jupyter"))],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
    )


def test_importing_memlab_has_no_side_effect() -> None:
    result = run()
    assert result.returncode == 0, result.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "spoil",
    [
        "os.environ['X'] = '1'",
        "torch.set_default_dtype(torch.float64)",
        "warnings.simplefilter('ignore')",
        "import plotly",
    ],
)
def test_the_check_itself_can_fail(spoil: str) -> None:
    assert run(spoil).returncode != 0


def alone(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, in another folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_names_are_imported_when_they_are_first_asked_for(tmp_path: Path) -> None:
    result = alone(
        "import sys, memlab\nassert 'torch' not in sys.modules\nmemlab.fit\nassert 'torch' in sys.modules", tmp_path
    )
    assert result.returncode == 0, result.stderr


def test_names_are_imported_as_at_the_top_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("import torch\ntensor = torch.ones(1)\n")
    code = """
import sys, torch
from memlab.extras import imported
sys.path.insert(0, "")
with torch.inference_mode(), torch.device("meta"):
    made = imported("made")
assert not made.tensor.is_inference() and made.tensor.device.type == "cpu"
"""
    result = alone(code, tmp_path)
    assert result.returncode == 0, result.stderr


# as in a page without torch: nothing of it is found
WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import memlab; memlab.predict", "memlab.predict needs torch, which is not installed: pip install torch"),
        ("from memlab import Workload", "memlab.Workload needs torch, which is not installed: pip install torch"),
        (
            "import memlab; memlab.load_ipython_extension(None)",
            "%load_ext memlab needs torch, which is not installed: pip install torch",
        ),
        (
            "import memlab; memlab.export('--accumulate 2', to='torch')",
            "an export that makes an optimizer needs torch, which is not installed: pip install torch",
        ),
    ],
)
def test_where_torch_is_missing_one_line_says_so(code: str, said: str, tmp_path: Path) -> None:
    result = alone(WITHOUT_TORCH + code, tmp_path)
    assert result.stderr.splitlines()[-1] == f"memlab.errors.MissingExtraError: {said}"


def test_the_command_line_says_so_and_nothing_else(tmp_path: Path) -> None:
    result = alone(WITHOUT_TORCH + "import runpy\nrunpy.run_module('memlab', run_name='__main__')", tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "memlab doctor needs torch, which is not installed: pip install torch\n"


def test_a_part_that_a_torch_lacks_is_not_taken_for_torch(tmp_path: Path) -> None:
    code = (
        WITHOUT_TORCH.replace('name.partition(".")[0] == "torch"', 'name == "torch.utils.checkpoint"')
        + "import memlab; memlab.fit"
    )
    assert (
        alone(code, tmp_path).stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch.utils.checkpoint'"
    )


SHOWN_WITHOUT_TORCH = """
import memlab, memlab.allocator, memlab.hardware.gpus, memlab.hardware.roofline
from pathlib import Path
from memlab.jupyter.panel import Panel
from memlab.live.replaying import RunReplay
from memlab.records import Measurement, StepRecord
from memlab.records.comparison import Comparison
from memlab.records.run_record import RunRecord
from memlab.report import image, live_svg, pareto, pareto_image, tables, text

assert str(memlab.Plan.parse("--accumulate 4")) == "--accumulate 4"
rows = tuple(Measurement(plan, "cpu", peak, None, 0, {"activations": peak}, (), (0.5, 0.5), 8, 0)
             for plan, peak in (("as written", 2**30), ("--accumulate 4", 2**29)))
steps = tuple(StepRecord(number, row.plan, 0.5, 8, 0, row.peak_allocated_bytes) for row in rows
              for number in range(1 + 5 * rows.index(row), 6 + 5 * rows.index(row)))
RunRecord(Comparison("gpt2", rows), steps).save(Path("run.json"))

record = RunRecord.load(Path("run.json"))
assert "accumulate 4" in str(record.comparison) and "<table" in record.comparison._repr_html_()
assert image.png(record.comparison).startswith(b"\\x89PNG")
panel = Panel(RunReplay(record))
for message in ({"kind": "press", "button": "run"}, {"kind": "press", "button": "cancel"},
                {"kind": "flip", "field": "accumulation", "on": False}, {"kind": "press", "button": "copy"}):
    panel._heard(None, message, None)
assert panel.widget.controls["line"] == "replay paused, step 5 of 10 · as written", panel.widget.controls["line"]
assert panel.widget.controls["code"] == "%%memfit" and not panel.widget.controls["errors"]
assert panel.widget.figure["traces"] and "<table" in panel.widget.table
panel.close()
assert sys.modules.keys().isdisjoint({"torch", "memlab.session", "memlab.runtime"})
"""


def test_what_shows_and_replays_runs_needs_no_torch(tmp_path: Path) -> None:
    for package in ("anywidget", "matplotlib"):
        pytest.importorskip(package)
    result = alone(WITHOUT_TORCH + SHOWN_WITHOUT_TORCH, tmp_path)
    assert result.returncode == 0, result.stderr
