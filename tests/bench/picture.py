"""The README's picture: JupyterLab in Chromium with the panel on a model that trains, in a light and in a dark page.

python -m tests.bench.picture        write docs/lab_light.png and docs/lab_dark.png
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from tests.bench.first_plot import CHROMIUM, running
from tests.bench.readme import README

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
WIDTH, HEIGHT = 1280, 1010
_STEPS = 36
_MOST_TRIES = 4
_MILLISECONDS = 180_000
_CELLS = (
    """%load_ext memlab
import torch
from memlab import workshop
here = workshop.here()
model, batches = here.gpt2(), here.batches()
optimizer = torch.optim.AdamW(model.parameters())

def train(steps):
    for _ in range(steps):
        batch = next(batches)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()""",
    "%%memfit\ntrain(5)",
    "%memfit panel",
    "%%memfit\ntrain(300)",
)
_TO_PANEL = "panel => panel.closest('.jp-Cell').scrollIntoView({block: 'start'})"
_HAS_CURVES = """() => Array.from(document.querySelectorAll(".memlab-panel .js-plotly-plot"))
    .some(plot => plot.data.some(curve => curve.y && Array.from(curve.y).length > 9))"""


def main() -> None:
    """Take both."""
    for name, theme in THEMES.items():
        picture = README.parent / "docs" / f"lab_{name}.png"
        for _ in range(_MOST_TRIES):
            with tempfile.TemporaryDirectory() as folder:
                if take(picture, theme, Path(folder)):
                    break
            print(f"{name}: the page has drawn no curves; once more", flush=True)
        else:
            sys.exit(f"{name}: no curves in {_MOST_TRIES} tries")
        print(f"{picture.name}: {picture.stat().st_size / 1024:.0f} KiB")


def take(picture: Path, theme: str, folder: Path) -> bool:
    """One picture; whether its figure has curves. On a busy machine it was seen without.

    Args:
        picture: where to.
        theme: of JupyterLab.
        folder: empty; for the notebook and the settings.
    """
    work = folder / "work"
    work.mkdir()
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(_CELLS)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), work / "my_model.ipynb")
    settings = folder / "lab" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
    also = {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "lab"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "PYTHONPATH": str(README.parent),
        "OMP_NUM_THREADS": "1",
    }
    command = f"exec {sys.executable} -m jupyterlab --ServerApp.root_dir={work}"
    with running(command, work, folder / "jupyter", {**also, "PATH": os.environ["PATH"]}) as address:
        return _photograph(f"{address}/lab/tree/my_model.ipynb", picture)


def _photograph(address: str, picture: Path) -> bool:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=("--no-sandbox", "--disable-gpu"))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(_MILLISECONDS)
        page.goto(address)
        page.get_by_text(re.compile(r"Python 3 \(ipykernel\) \| (Idle|Busy)")).wait_for()
        page.keyboard.press("Control+b")
        page.locator(".jp-Cell .cm-content").first.click()
        for _ in _CELLS[:-1]:
            page.keyboard.press("Shift+Enter")
        panel = page.locator(".memlab-panel")
        # the last setting whose effect is predicted
        row = panel.locator(".memlab-setting").filter(has_text="Tiled layers")
        row.get_by_text(re.compile(r"speed|±|does not apply")).first.wait_for()
        page.keyboard.press("Shift+Enter")
        _until_step(page, 8)
        for name in ("Checkpointing", "Optimizer"):
            switch(panel, name)
            _until_step(page, steps_of(panel) + 8)
        panel.evaluate(_TO_PANEL)
        _until_step(page, max(_STEPS, steps_of(panel) + 2))
        has_curves = bool(page.evaluate(_HAS_CURVES))
        if has_curves:
            page.screenshot(path=str(picture))
        browser.close()
    return has_curves


def switch(panel: Any, name: str) -> None:
    """Flip a setting of the panel, and wait until it is in force."""
    panel.get_by_label(name, exact=True).click()
    row = panel.locator(".memlab-setting").filter(has_text=name)
    row.get_by_text(re.compile(r"applied at step \d+")).first.wait_for()


def steps_of(panel: Any) -> int:
    """Steps the cell has taken, as the line below the figure says."""
    said = re.search(r"step ([\d,]+)", panel.locator(".memlab-line").inner_text())
    return int(said[1].replace(",", "")) if said else 0


def _until_step(page: Any, step: int) -> None:
    condition = r"""step => {
        const said = document.querySelector(".memlab-line")?.innerText.match(/step ([\d,]+)/);
        return said && Number(said[1].replace(",", "")) >= step;
    }"""
    page.wait_for_function(condition, arg=step)


if __name__ == "__main__":
    main()
