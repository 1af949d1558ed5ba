"""A panel in marimo, which has no IPython and no magics: made from Python, steered while a thread trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import served
from tests.helpers.ports import free_port

pytest.importorskip("marimo", reason="needs marimo")
pytestmark = [pytest.mark.browser, pytest.mark.full]

_MILLISECONDS = 90_000
_APP = """
import marimo

app = marimo.App()


@app.cell
def _():
    import threading
    import time

    import torch
    from torch import nn

    import memlab

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(512, 64), torch.randn(512, 64)
    panel = memlab.panel(memlab.Workload(model, optimizer, batch, nn.functional.mse_loss))
    panel
    return batch, model, nn, optimizer, panel, threading, time


@app.cell
def _(batch, model, nn, optimizer, panel, threading, time):
    def train():
        until = time.monotonic() + 120
        with panel.training():
            while time.monotonic() < until:
                nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.05)

    threading.Thread(target=train, daemon=True).start()
    return


if __name__ == "__main__":
    app.run()
"""


def test_a_click_reaches_the_thread_that_trains(browser: Any, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(_APP)
    port = free_port()
    arguments = ["run", str(app), "--headless", "--no-token", "--host", "127.0.0.1", "--port", str(port)]
    with served(
        [sys.executable, "-m", "marimo", "-q", *arguments], f"http://127.0.0.1:{port}/health", tmp_path / "log"
    ):
        page = browser.new_page(viewport={"width": 1440, "height": 1100})
        try:
            page.goto(f"http://127.0.0.1:{port}")
            panel = page.locator(".memlab-panel")
            panel.locator(".main-svg").first.wait_for(timeout=_MILLISECONDS)
            panel.get_by_text("training, step").wait_for(timeout=_MILLISECONDS)
            panel.get_by_label("Checkpointing", exact=True).check()
            panel.get_by_text("applied at step").wait_for(timeout=_MILLISECONDS)
            panel.locator("table").get_by_text("--checkpoint", exact=True).wait_for(timeout=_MILLISECONDS)
            # nothing makes steps or predictions between marimo's cells
            assert panel.get_by_role("button", name="Run", exact=True).is_disabled()
            assert panel.get_by_text("Error").count() == 0
        finally:
            page.close()
