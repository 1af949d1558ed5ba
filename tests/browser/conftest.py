"""A real JupyterLab on this machine, and a headless Chromium to look at it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_CHROMIUM = Path("/usr/bin/chromium")
_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_PATIENCE_SECONDS = 60


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright's Python package")
    if not _CHROMIUM.exists():
        pytest.skip(f"needs {_CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=str(_CHROMIUM), args=_QUIET)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What JupyterLab shows, and where its settings are kept."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def lab(lab_folder: Path) -> Iterator[str]:
    """Address of a running JupyterLab; its settings and notebooks are this run's own."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab")
    port = _free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "OMP_NUM_THREADS": "1",
        "JUPYTER_CONFIG_DIR": str(lab_folder / ".config"),
        "JUPYTER_RUNTIME_DIR": str(lab_folder / ".runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(lab_folder / ".settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(lab_folder / ".workspaces"),
    }
    _set(lab_folder, "notification", {"fetchNews": "false", "checkForUpdates": False})
    arguments = [
        *(
            "--no-browser",
            "--allow-root",
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={port}",
            "--ServerApp.port_retries=0",
        ),
        *("--IdentityProvider.token=", f"--ServerApp.root_dir={lab_folder}", "--LabApp.extension_manager=readonly"),
    ]
    log = lab_folder / ".log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments], env=environment, stdout=out, stderr=out
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def choose_theme(folder: Path, name: str) -> None:
    """Let pages that are opened from now on have a theme."""
    _set(folder, "themes", {"theme": name})


def _set(folder: Path, name: str, values: dict[str, Any]) -> None:
    file = folder / ".settings" / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
        else:
            return
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
