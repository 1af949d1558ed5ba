"""What Binder builds from: the tested set, a Python that memlab takes, and a page to begin with."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BINDER = ROOT / "binder"


def test_packages_come_from_the_tested_set_and_torch_without_cuda() -> None:
    lines = (BINDER / "requirements.txt").read_text().splitlines()
    assert "-c ../constraints.txt" in lines
    assert "-e .[lab,adapters]" in lines
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in lines
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    named = {line for line in lines if line and not line.startswith(("-", "#"))}
    assert named <= pinned


def test_python_is_one_that_memlab_takes() -> None:
    language, version = (BINDER / "runtime.txt").read_text().strip().split("-")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert language == "python"
    assert project["requires-python"] == f">={version}"


def test_the_page_it_begins_with_exists() -> None:
    pages = set(re.findall(r"/lab/tree/([\w/.]+)\"", (BINDER / "postBuild").read_text()))
    assert pages == {"notebooks/00_make_it_fit.ipynb"}
    assert all((ROOT / page).exists() for page in pages)


@pytest.mark.parametrize(("granted", "threads"), [("2.0", "2"), ("0.5", "1"), (None, "1")])
def test_as_many_threads_as_cores_are_granted(granted: str | None, threads: str) -> None:
    environment = {"PATH": os.environ["PATH"], **({"CPU_LIMIT": granted} if granted else {})}
    command = [str(BINDER / "start"), "bash", "-c", "echo $OMP_NUM_THREADS $OMP_WAIT_POLICY $HF_HUB_OFFLINE"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [threads, "passive", "1"]


def test_scripts_can_be_run() -> None:
    assert all(os.access(BINDER / name, os.X_OK) for name in ("postBuild", "start"))
