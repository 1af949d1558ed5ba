"""A real JupyterLab on this machine, and a headless Chromium to look at it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ports import free_port

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
MILLISECONDS = 90_000
_CLIPBOARD = ["clipboard-read", "clipboard-write"]
_CONNECTED = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext, kernel = session?.session?.kernel;
    return session?.isReady && kernel?.connectionStatus === "connected" && ["idle", "busy"].includes(kernel.status);
}"""

Page = Any
Locator = Any


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    pytest.importorskip("playwright.sync_api", reason="needs Playwright's Python package")
    if not _CHROMIUM.exists():
        pytest.skip(f"needs {_CHROMIUM}: apt-get install chromium")
    with chromium() as launched:
        yield launched


@contextmanager
def chromium() -> Iterator[Any]:
    """Run a Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
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
    with jupyterlab(lab_folder) as address:
        yield address


@contextmanager
def jupyterlab(lab_folder: Path) -> Iterator[str]:
    """Run a JupyterLab on the notebooks of a folder, which keeps its settings too."""
    port = free_port()
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
        *("--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True"),
    ]
    command = [sys.executable, "-m", "jupyterlab", *arguments]
    with served(command, f"http://127.0.0.1:{port}/api/status", lab_folder / ".log", environment):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def served(
    command: Sequence[str], address: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server, from the moment it answers at an address."""
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, cwd=_ROOT, stdout=out, stderr=out)
    try:
        _wait_for(address, server, log)
        yield
    finally:
        _stop(server)


class OpenNotebook:
    """A notebook in JupyterLab, and what people do with it.

    Attributes:
        page: Playwright's.
    """

    def __init__(self, page: Page) -> None:
        self.page = page

    def cell(self, number: int) -> Locator:
        """A cell, counted from 0."""
        return self.page.locator(".jp-NotebookPanel .jp-Cell").nth(number)

    def run(self, number: int) -> None:
        """Run a cell, without waiting for its end."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def is_running(self, number: int) -> bool:
        """Whether a cell waits or runs."""
        return "*" in str(self.cell(number).locator(".jp-InputPrompt").inner_text())

    def until_over(self, number: int) -> None:
        """Wait for the end of a cell."""
        prompt = self.cell(number).locator(".jp-InputPrompt")
        prompt.filter(has_text=re.compile(r"\[\d+\]")).wait_for(timeout=MILLISECONDS)

    def result(self, number: int) -> str:
        """Run a cell; what it has printed."""
        self.run(number)
        self.until_over(number)
        return str(self.cell(number).locator(".jp-OutputArea-output").inner_text()).strip()

    def panel(self, cell: int) -> Locator:
        """The panel below a cell, once it stands there with its figure."""
        panel = self.cell(cell).locator(".memlab-panel")
        panel.locator(".main-svg").first.wait_for(timeout=MILLISECONDS)
        return panel


@contextmanager
def opened_notebook(
    browser: Any, lab: str, folder: Path, name: str, cells: Sequence[str] = (), front_end: str = "lab"
) -> Iterator[OpenNotebook]:
    """A notebook with these cells in a page of its own; without cells, one that is there.

    The server has two front ends, JupyterLab at "lab" and Notebook at "notebooks".

    What the page shows when a test fails is kept beside the notebook, as a picture of the same name.
    """
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    if cells:
        made = [nbformat.v4.new_code_cell(source.strip(), id=f"cell-{number}") for number, source in enumerate(cells)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=kernel), folder / name)
    context = browser.new_context(viewport={"width": 1500, "height": 1900}, permissions=_CLIPBOARD)
    try:
        page = context.new_page()
        show_notebook(page, in_jupyterlab(lab, name) if front_end == "lab" else f"{lab}/{front_end}/{name}")
        yield OpenNotebook(page)
    except BaseException:
        page.screenshot(path=str(folder / f"{name}.png"))
        raise
    finally:
        context.close()


def in_jupyterlab(lab: str, name: str) -> str:
    """Address of a notebook, in a workspace of its own.

    Pages that share a workspace open each other's notebooks when they are loaded again, and the one shown may be another.
    """
    return f"{lab}/lab/workspaces/{Path(name).stem}/tree/{name}?reset"


def show_notebook(page: Page, address: str = "") -> None:
    """Go to a notebook, or load its page again, and wait until it can be used."""
    if address:
        page.goto(address)
    else:
        page.reload()
    page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=MILLISECONDS)
    # not the status that the page shows: Notebook shows an idle kernel before its page is connected with it, and a cell
    # that is run then is dropped
    page.wait_for_function(_CONNECTED, timeout=MILLISECONDS)


def choose_theme(folder: Path, name: str) -> None:
    """Let pages that are opened from now on have a theme."""
    _set(folder, "themes", {"theme": name})


@contextmanager
def without_subshells(folder: Path) -> Iterator[None]:
    """Let pages that are opened meanwhile send the messages of widgets to the main shell, as other front ends do."""
    _set(folder, "kernels-settings", {"commsOverSubshells": "disabled"})
    try:
        yield
    finally:
        _set(folder, "kernels-settings", {})


def _set(folder: Path, name: str, values: dict[str, Any]) -> None:
    file = folder / ".settings" / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        # a failed test has left a kernel that trains; kernels end with their server
        server.kill()
        server.wait()


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
        else:
            return
    pytest.fail(f"the server did not start:\n{log.read_text()[-2000:]}")
