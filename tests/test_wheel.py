"""The wheel: all of the package is in it, and it runs where there is no repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_TRAIN = """
import memlab, torch
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "memlab")
shell.run_cell('''
import torch
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
''').raise_error()
shell.run_cell('''%%memfit --accumulate 2
for _ in range(3):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
''').raise_error()
shell.run_cell("%memfit panel").raise_error()
print(memlab.__file__)
"""


@pytest.mark.full
def test_it_holds_the_whole_package_and_runs_without_the_repository(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # a copy: a build writes beside the sources
    tracked = subprocess.run(
        ["git", "ls-files", "memlab"], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = set(tracked.split())
    for name in (*files, "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes((_ROOT / name).read_bytes())
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, tmp_path / "source"], check=True)
    (wheel,) = tmp_path.glob("memlab-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == files
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "installed", wheel], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", _TRAIN],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "--accumulate 2" in ran.stdout
    assert ran.stdout.splitlines()[-1] == str(tmp_path / "installed" / "memlab" / "__init__.py")
