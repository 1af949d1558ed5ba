"""What Binder does with this repository, step by step, in a folder of its own.

python -m tests.bench.binder        measure on this machine, write results/binder.json

Binder's program, repo2docker, takes the files under `binder/`: packages of `apt.txt`, a Python of `runtime.txt`,
`requirements.txt` with pip, `postBuild`, and at last `start` with JupyterLab. Here a virtual environment of the same
Python stands for its conda environment, and this machine for its image. A chapter is run there as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.bench.first_plot import FIRST_NOTEBOOK, fresh_environment, running, size_bytes
from tests.bench.machine import here

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "binder.json"
CHAPTER = "notebooks/01_where_the_memory_goes.ipynb"


def main() -> None:
    """Measure and write."""
    with tempfile.TemporaryDirectory() as folder:
        found = {**here(), **built(Path(folder))}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1), flush=True)  # the environment takes its time to go


def built(folder: Path) -> dict[str, float | str]:
    """Seconds of each of Binder's steps, and what the environment takes on the disk.

    Args:
        folder: empty; takes the place of the image.
    """
    home = copied(folder / "home")
    python = folder / "python"
    began = time.monotonic()
    wanted = (home / "binder" / "runtime.txt").read_text().strip().replace("-", "")
    subprocess.run([wanted, "-m", "venv", str(python)], check=True)
    step(home, python, "pip install -q --no-cache-dir -r binder/requirements.txt")
    installed = time.monotonic()
    step(home, python, "./binder/postBuild")
    ready = time.monotonic()
    with running("exec binder/start jupyter lab", home, folder / "settings", environment_of(home, python)) as address:
        served = time.monotonic()
        lands_on = urllib.request.urlopen(f"{address}/").geturl()
    assert lands_on.endswith(f"/lab/tree/{FIRST_NOTEBOOK}"), lands_on
    step(home, python, f"binder/start jupyter execute {CHAPTER}")
    return {
        "python": wanted,
        "install_seconds": round(installed - began, 1),
        "post_build_seconds": round(ready - installed, 1),
        "start_seconds": round(served - ready, 1),
        "chapter_01_seconds": round(time.monotonic() - served, 1),
        "environment_mib": round(size_bytes(python) / 2**20),
    }


def copied(folder: Path) -> Path:
    """The files of the repository as they are in the working tree, and nothing that lies beside them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def environment_of(home: Path, python: Path) -> dict[str, str]:
    """That of a container: the repository is the home, and the environment comes first."""
    fresh = fresh_environment()
    # an index that cannot be reached from here is passed over at once
    return {**fresh, "PIP_RETRIES": "0", "HOME": str(home), "PATH": f"{python / 'bin'}{os.pathsep}{fresh['PATH']}"}


def step(home: Path, python: Path, command: str) -> None:
    """Run a command in the root of the repository."""
    call = ["bash", "-euo", "pipefail", "-c", command]
    began = time.monotonic()
    done = subprocess.run(call, cwd=home, env=environment_of(home, python), check=False)
    print(f"{command}: {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        sys.exit(f"{command}: ended with {done.returncode}")


if __name__ == "__main__":
    main()
