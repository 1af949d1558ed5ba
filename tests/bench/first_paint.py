"""How soon a panel stands in JupyterLab with its figure, and what travels to the page until then."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.bench.figures import Figure

_SECONDS = 1.0
_MEGABYTES = 1.5
_TIMES = 5


def first_paint() -> list[Figure]:
    """Open a panel several times, each in a kernel and a page of its own."""
    # here, as no other figure needs Playwright
    from tests.browser.conftest import MILLISECONDS, chromium, jupyterlab, opened_notebook
    from tests.browser.test_panel import MAKE, PANEL

    took: list[float] = []
    traveled: list[int] = []
    with tempfile.TemporaryDirectory() as work, chromium() as browser, jupyterlab(Path(work)) as lab:
        for number in range(_TIMES):
            with opened_notebook(browser, lab, Path(work), f"paint{number}.ipynb", (MAKE, PANEL)) as opened:
                received: list[int] = []
                opened.run(0)
                opened.until_over(0)
                session = opened.page.context.new_cdp_session(opened.page)
                session.send("Network.enable")
                session.on(
                    "Network.webSocketFrameReceived",
                    # binary, which the browser's protocol tells in base64
                    lambda event, to=received: to.append(len(event["response"]["payloadData"]) * 3 // 4),
                )
                began = time.perf_counter()
                opened.run(1)
                opened.cell(1).locator(".memlab-panel .main-svg").first.wait_for(timeout=MILLISECONDS)
                took.append(time.perf_counter() - began)
                traveled.append(sum(received))
    details = {"seconds": took, "bytes": traveled}
    return [
        Figure(
            "panel in JupyterLab from its cell's start to its figure (seconds, least)", min(took), _SECONDS, details
        ),
        Figure("what the kernel sends to the page until then (MB)", max(traveled) / 1e6, _MEGABYTES),
    ]
