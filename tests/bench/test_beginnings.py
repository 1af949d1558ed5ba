"""What is measured of a beginning: the command, the environment, the memory of notebooks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.first_plot import first_commands, fresh_environment, size_bytes
from tests.docs.front import binder, first_plot
from tests.docs.notebook_table import table_of

WHERE = {"machine": "a CPU with 2 cores", "date": "2026-11-22"}


def test_the_commands_are_those_of_the_readme() -> None:
    lines = first_commands().replace("\n\n", "\n").splitlines()
    assert len(lines) == 4
    assert lines[0] == "python3 -m venv .venv"
    assert lines[-1] == ".venv/bin/jupyter lab notebooks/00_make_it_fit.ipynb"


def test_a_fresh_shell_knows_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    found = fresh_environment()
    assert "PYTHONPATH" not in found
    assert found["PIP_INDEX_URL"] == "https://example.org/simple"
    assert found["PIP_NO_CACHE_DIR"] == "1"


def test_the_size_of_a_folder_counts_links_once(tmp_path: Path) -> None:
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "file").write_bytes(b"x" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "within" / "file")
    assert size_bytes(tmp_path) == 1000


def test_memory_of_processes_below_this_one_is_seen() -> None:
    pytest.importorskip("psutil", reason="needs psutil")
    from tests.bench.notebooks import ResidentPeak

    peak = ResidentPeak()
    with peak.watching():
        waiting = "held = bytearray(200 * 2**20)\nfor at in range(0, len(held), 4096): held[at] = 1\nprint(flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        deadline = time.monotonic() + 20
        while peak.mib < 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        child.communicate(b"\n")
    assert 200 <= peak.mib < 200 + 2000


def test_what_is_said_of_the_figures() -> None:
    seconds = {"whole_seconds": 311, "install_and_start_seconds": 59.6, "environment_mib": 1533}
    assert first_plot({**WHERE, **seconds}).startswith(
        "From `git clone` to the first live plot: 5 min 11 s, of which installing (1,533 MiB, no package "
        "from a cache) and the start of JupyterLab take 1 min 0 s. On a CPU with 2 cores"
    )
    steps = {"install_seconds": 61, "post_build_seconds": 20, "start_seconds": 3, "environment_mib": 1500}
    assert "1 min 1 s for the packages, 20 s for `postBuild`, 1,500 MiB on the disk" in binder({**WHERE, **steps})
    ran = {
        "01_one": {"seconds": 40.2, "peak_resident_mib": 1010},
        "02_two": {"seconds": 50.0, "peak_resident_mib": 900},
    }
    written = table_of({**WHERE, "notebooks": ran})
    assert "| [01_one](../notebooks/01_one.ipynb) | 40 s | 1,010 MiB |" in written
    assert "they take 1.5 minutes" in written
