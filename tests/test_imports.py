"""Which way imports point, and that importing memlab changes nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "memlab"

# what each part may import of memlab, from the core outwards
STANDARD_LIBRARY_ONLY = {
    "errors",
    "units",
    "extras",
    "plan",
    "records",
    "rank_prediction",
    "comparison",
    "rungs",
    "shown",
    "run_record",
    "moment",
    "inference_record",
    "devices",
    "allocator",
    "roofline",
    "plan_space",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "extras": {"errors"},
    "plan": {"errors", "units"},
    "shown": set(),
    "records": {"errors", "plan", "shown"},
    "rank_prediction": {"records", "shown"},
    "comparison": {"errors", "plan", "records", "shown", "units"},
    "rungs": {"comparison", "errors", "plan_space", "plan", "records", "shown", "units"},
    "inference_record": {"records"},
    "run_record": {"comparison", "errors", "moment", "records"},
    "out_of_memory": {"units"},
    "dispatch": set(),
    "loop_mode": set(),
    "devices": {"errors", "units"},
    "allocator": {"errors", "units"},
    "building": {"errors", "extras", "units"},
    "workload": {"errors"},
    "layers": set(),
    "moment": {"plan", "records"},
    "live": {
        "comparison",
        "errors",
        "measuring",
        "moment",
        "observer",
        "plan",
        "predicting",
        "records",
        "rescue",
        "run_record",
        "search",
        "session",
        "out_of_memory",
        "snapshot",
        "units",
        "workload",
    },
    "stepping": {"layers", "uninterrupted"},
    "workshop": {"errors", "extras", "measuring", "plan", "records", "report", "units"},
    "techniques": {
        "dispatch",
        "errors",
        "extras",
        "layers",
        "loop_mode",
        "plan",
        "seams",
        "out_of_memory",
        "stepping",
        "uninterrupted",
        "units",
        "workload",
    },
    "seams": {"uninterrupted"},
    "observer": {"errors", "plan", "workload"},
    "uninterrupted": set(),
    "rollback": {"layers", "plan", "techniques"},
    "in_force": {
        "errors",
        "layers",
        "rollback",
        "plan",
        "seams",
        "out_of_memory",
        "techniques",
        "uninterrupted",
        "workload",
    },
    "scaleout": {
        "comparison",
        "errors",
        "extras",
        "in_force",
        "measuring",
        "plan",
        "records",
        "report",
        "run_record",
        "seams",
        "session",
        "out_of_memory",
        "snapshot",
        "stepping",
        "techniques",
        "uninterrupted",
        "units",
        "workload",
    },
    "rescue": {
        "allocator",
        "devices",
        "dispatch",
        "errors",
        "loop_mode",
        "observer",
        "plan",
        "records",
        "out_of_memory",
        "stepping",
        "techniques",
        "uninterrupted",
        "units",
    },
    "session": {
        "errors",
        "in_force",
        "layers",
        "observer",
        "plan",
        "rescue",
        "seams",
        "stepping",
        "techniques",
        "uninterrupted",
        "workload",
    },
    "snapshot": {"plan", "techniques", "workload"},
    "measuring": {
        "comparison",
        "dispatch",
        "errors",
        "extras",
        "observer",
        "plan",
        "records",
        "roofline",
        "session",
        "snapshot",
        "techniques",
        "uninterrupted",
        "units",
        "workload",
    },
    "inferring": {
        "errors",
        "inference_record",
        "measuring",
        "plan",
        "records",
        "seams",
        "session",
        "out_of_memory",
        "techniques",
        "trace",
        "uninterrupted",
        "units",
        "workload",
    },
    "exporting": {"errors", "plan", "scaleout", "units"},
    "roofline": {"devices"},
    "plan_space": {"errors", "plan"},
    "trace": {
        "devices",
        "dispatch",
        "errors",
        "measuring",
        "observer",
        "plan",
        "records",
        "roofline",
        "session",
        "techniques",
        "units",
        "workload",
    },
    "predicting": {
        "allocator",
        "devices",
        "errors",
        "plan_space",
        "measuring",
        "observer",
        "plan",
        "rank_prediction",
        "records",
        "roofline",
        "scaleout",
        "techniques",
        "trace",
        "units",
        "workload",
    },
    "search": {
        "comparison",
        "devices",
        "errors",
        "plan_space",
        "measuring",
        "plan",
        "predicting",
        "records",
        "rungs",
        "techniques",
        "units",
        "workload",
    },
    "report": {
        "comparison",
        "errors",
        "extras",
        "inference_record",
        "moment",
        "plan",
        "rank_prediction",
        "records",
        "rungs",
        "units",
    },
}


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
    if part in ("__init__", "jupyter"):
        return
    of_memlab = {name.split(".")[1] for name in imports_of(path) if name.startswith("memlab.")}
    assert of_memlab - {part} <= ALLOWED[part]


@pytest.mark.parametrize("part", sorted(STANDARD_LIBRARY_ONLY))
def test_the_core_needs_only_the_standard_library(part: str) -> None:
    files = [ROOT / f"{part}.py"] if (ROOT / f"{part}.py").exists() else (ROOT / part).rglob("*.py")
    packages = {name.split(".")[0] for file in files for name in imports_of(file)} - {"memlab"}
    assert packages <= set(sys.stdlib_module_names)


CHECK = """
import sys, os, warnings, threading
import torch
def state():
    return (dict(os.environ), torch.is_grad_enabled(), torch.get_default_dtype(), torch.cuda.is_initialized(),
            id(torch.nn.Module.__call__), id(torch.optim.Optimizer.step), list(warnings.filters), sys.excepthook,
            torch.get_float32_matmul_precision(), threading.active_count())
before = state()
import memlab
{spoil}
assert state() == before
for name in ("IPython", "ipywidgets", "plotly", "matplotlib", "bitsandbytes", "transformers", "safetensors"):
    assert name not in sys.modules, name
"""


def run(spoil: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHECK.format(spoil=spoil)], capture_output=True, text=True, cwd=ROOT.parent
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
