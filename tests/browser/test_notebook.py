"""The panel in Jupyter Notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("notebook", reason="needs Notebook")

from tests.browser.conftest import opened_notebook
from tests.browser.test_panel import ENDLESS, MAKE, PANEL, box, button, until_applied, until_says

pytestmark = [pytest.mark.browser, pytest.mark.full]


def test_flip_while_a_cell_trains(browser: Any, lab: str, lab_folder: Path) -> None:
    cells = (MAKE, PANEL, ENDLESS)
    with opened_notebook(browser, lab, lab_folder, "notebook.ipynb", cells, "notebooks") as opened:
        assert "/notebooks/" in opened.page.url
        for number in range(len(cells)):
            opened.run(number)
        panel = opened.panel(1)
        until_says(panel, "training, step")
        box(panel, "Checkpointing").check()
        assert until_applied(panel, "Checkpointing") > 1
        button(panel, "Cancel").click()
        opened.until_over(2)
        receipt = opened.cell(2).locator(".memlab-receipt").last
        receipt.wait_for()
        assert "--checkpoint" in receipt.inner_text()
