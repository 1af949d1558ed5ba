"""Runs `on_probe.py` in a process whose accelerator is the device `probe`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++") or not shutil.which("ninja"),
    reason="builds C++ with g++ and ninja",
)
def test_memlab_works_on_a_backend_that_it_does_not_know() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/accelerators/on_probe.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
