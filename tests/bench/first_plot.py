"""From `git clone` to the first live plot: the README's commands as they are written, on a machine that has nothing yet.

python -m tests.bench.first_plot        clone this repository's last commit, measure, write results/first_plot.json

Needs git, Chromium and Playwright's Python package. Packages are fetched anew: pip keeps none from run to run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.bench.machine import here
from tests.bench.readme import README, section_of
from tests.helpers.ports import free_port

RESULTS = Path(__file__).parent / "results" / "first_plot.json"
CHROMIUM = "/usr/bin/chromium"
FIRST_NOTEBOOK = "notebooks/00_make_it_fit.ipynb"
_MOST_SECONDS = 1800
_NO_QUESTIONS: dict[str, dict[str, object]] = {
    "ServerApp": {"open_browser": False, "allow_root": True, "ip": "127.0.0.1", "port_retries": 0},
    "IdentityProvider": {"token": ""},
    "LabApp": {"news_url": None},
}
# a point of a curve in the panel, or the small picture below a cell that trains
_LIVE_PLOT = """() => {
    const curves = Array.from(document.querySelectorAll(".memlab-panel .js-plotly-plot")).flatMap(plot => plot.data ?? []);
    const has_points = curves.some(curve => curve.y && Array.from(curve.y).length > 0);
    return has_points || !!document.querySelector(".memlab-live svg");
}"""


def main() -> None:
    """Measure and write."""
    with tempfile.TemporaryDirectory() as folder:
        found = {**here(), **measured(Path(folder))}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1), flush=True)  # the environment takes its time to go


def measured(folder: Path) -> dict[str, float]:
    """Seconds of each part, and what the environment takes on the disk.

    Args:
        folder: empty; what is cloned and installed goes there.
    """
    began = time.monotonic()
    clone = folder / "memlab"
    subprocess.run(["git", "clone", "-q", str(README.parent), str(clone)], check=True)
    cloned = time.monotonic()
    with running(first_commands(), clone, folder / "jupyter") as address:
        served = time.monotonic()
        # JupyterLab takes the folder of the file it is given as its root
        shown_after = seconds_to_the_plot(f"{address}/lab/tree/{Path(FIRST_NOTEBOOK).name}")
    return {
        "clone_seconds": round(cloned - began, 1),
        "install_and_start_seconds": round(served - cloned, 1),
        "open_and_run_seconds": round(shown_after, 1),
        "whole_seconds": round(served - began + shown_after, 1),
        "environment_mib": round(size_bytes(clone / ".venv") / 2**20),
    }


def first_commands() -> str:
    """Return the README's lines that install memlab and open the first notebook, as written there."""
    page = README.read_text(encoding="utf-8")
    blocks = (
        section_of(page, name).strip().removeprefix("```bash").removesuffix("```") for name in ("install", "open")
    )
    return "".join(blocks).strip()


@contextmanager
def running(command: str, folder: Path, settings: Path, also: Mapping[str, str] | None = None) -> Iterator[str]:
    """A command that ends in a JupyterLab; its address, once it answers.

    Args:
        command: for bash.
        folder: to run it in.
        settings: a new folder for JupyterLab's.
        also: environment variables beside those of a fresh shell.
    """
    settings.mkdir()
    port = free_port()
    answers = {**_NO_QUESTIONS, "ServerApp": {**_NO_QUESTIONS["ServerApp"], "port": port}}
    (settings / "jupyter_server_config.json").write_text(json.dumps(answers))
    address = f"http://127.0.0.1:{port}"
    environment = {**fresh_environment(), "JUPYTER_CONFIG_DIR": str(settings), **(also or {})}
    log = settings / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        _until_it_answers(address, process, log)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def fresh_environment() -> dict[str, str]:
    """Variables of a shell that has just been opened; pip keeps no packages."""
    kept = ("HOME", "PATH", "LANG", "TMPDIR")
    environment = {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
    return {**environment, "PIP_NO_CACHE_DIR": "1"}


def _until_it_answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the command ended, or did not serve within {_MOST_SECONDS} s:\n{log.read_text()[-2000:]}")


def seconds_to_the_plot(address: str) -> float:
    """Open a notebook in Chromium, run all cells; seconds until a plot shows what a cell that trains does."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=("--no-sandbox", "--disable-gpu"))
        page = browser.new_page(viewport={"width": 1280, "height": 3000})
        page.set_default_timeout(_MOST_SECONDS * 1000)
        began = time.monotonic()
        page.goto(address)
        page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for()
        page.get_by_text(re.compile(r"Python 3 \(ipykernel\) \| (Idle|Busy)")).wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_function(_LIVE_PLOT, polling=50)
        seconds = time.monotonic() - began
        browser.close()
    return seconds


def size_bytes(folder: Path) -> int:
    """What the files of a folder take."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
