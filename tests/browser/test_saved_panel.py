"""What is left of a panel in the saved notebook: small, and readable without a kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import opened_notebook
from tests.browser.test_panel import MAKE, PANEL, TRAIN
from tests.browser.test_receipt import save_by_keyboard

pytestmark = [pytest.mark.browser, pytest.mark.full]

_MOST_BYTES = 1_000_000


def test_saved_notebook_shows_receipt_without_kernel(browser: Any, lab: str, lab_folder: Path, tmp_path: Path) -> None:
    exporters = pytest.importorskip("nbconvert", reason="needs nbconvert")
    cells = (MAKE, PANEL, TRAIN.format(flags="", steps=30))
    with opened_notebook(browser, lab, lab_folder, "saved.ipynb", cells) as opened:
        for number in range(len(cells)):
            opened.run(number)
        opened.until_over(2)
        opened.panel(1)
        opened.cell(2).locator(".memlab-receipt").wait_for()
        save_by_keyboard(opened.page)
    saved = lab_folder / "saved.ipynb"
    notebook = json.loads(saved.read_text())
    assert saved.stat().st_size <= _MOST_BYTES
    assert "widgets" not in notebook["metadata"]
    _view, still = notebook["cells"][1]["outputs"]
    for kind in ("text/plain", "text/html"):
        text = "".join(still["data"][kind])
        assert "Checkpointing" in text
        assert "as written" in text  # what has been measured since the panel was opened

    page = tmp_path / "saved.html"
    page.write_text(exporters.HTMLExporter().from_filename(str(saved))[0])
    _shows_receipt(browser, page, tmp_path / "saved.png")


def _shows_receipt(browser: Any, file: Path, picture: Path) -> None:
    context = browser.new_context(viewport={"width": 1400, "height": 1200}, offline=True)
    try:
        page = context.new_page()
        page.goto(file.as_uri())
        page.screenshot(path=str(picture))
        assert page.locator("[class^=memlab-still] table").first.is_visible()
        receipt = page.locator(".memlab-receipt table").last
        assert receipt.is_visible()
        assert receipt.locator("tbody tr").first.inner_text().startswith("as written")
        assert "Checkpointing" in page.locator("body").inner_text()
    finally:
        context.close()
