"""The demo's page in Chromium: what it shows is what a panel with a kernel shows, click by click, and it asks nobody."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anywidget", reason="the panel needs anywidget")

from memlab.plan import FIELDS
from memlab.records.run_record import RunRecord
from tests.browser.conftest import served
from tests.docs import demo
from tests.helpers.ports import free_port

pytestmark = [pytest.mark.browser, pytest.mark.full]

_MOST_SECONDS = 10
_MILLISECONDS = 20_000
_STEP = re.compile(r"replaying, step (\d+) of 72")
_WORDS = """panel => Array.from(panel.querySelectorAll(".memlab-setting")).map(row => [
    row.querySelector("input").checked, row.querySelector("select").value,
    ...Array.from(row.querySelectorAll(".memlab-words span")).map(each => each.textContent)])"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the page is served, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "demo.html").write_text(demo.page(RunRecord.load(demo.RECORD)))
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(folder)]
    with served(command, f"http://127.0.0.1:{port}/demo.html", folder / ".log"):
        yield f"http://127.0.0.1:{port}/demo.html"


class Demo:
    """The page, and a panel with a kernel beside it that does the same."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.panel = page.locator(".memlab-panel")
        self.beside = demo.Shown(RunRecord.load(demo.RECORD))

    def line(self) -> str:
        return str(self.panel.locator(".memlab-line").inner_text())

    def errors(self) -> str:
        return str(self.panel.locator(".memlab-errors").text_content())

    def press(self, text: str) -> None:
        self.panel.get_by_role("button", name=text).click()

    def flip(self, field: str) -> None:
        self.row(field).locator("input").click()

    def choose(self, field: str, text: str) -> None:
        self.row(field).locator("select").select_option(text)

    def step(self) -> int:
        found = _STEP.match(self.line())
        return int(found[1]) if found else 0

    def until(self, words: str) -> None:
        self.panel.locator(".memlab-line").get_by_text(re.compile(words)).wait_for()

    def shows_the_same(self) -> None:
        shown = self.beside.hand.shown
        assert self.line() == shown["line"]
        settings = [[row[name] for name in ("on", "choice", "effect", "said")] for row in shown["settings"]]
        assert self.panel.evaluate(_WORDS) == settings
        table = self.page.evaluate(
            "html => { const at = document.createElement('div'); at.innerHTML = html; return at.textContent; }",
            self.beside.panel.widget.table,
        )
        assert self.panel.locator(".memlab-table").text_content() == table

    def row(self, field: str) -> Any:
        return self.panel.locator(".memlab-setting").nth([spec.name for spec in FIELDS].index(field))


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Demo]:
    requests: list[str] = []
    errors: list[str] = []
    context = browser.new_context(
        viewport={"width": 1280, "height": 1150}, permissions=["clipboard-read", "clipboard-write"]
    )
    page = context.new_page()
    page.set_default_timeout(_MILLISECONDS)
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    began = time.monotonic()
    page.goto(address)
    page.locator(".js-plotly-plot .xtick").first.wait_for()
    assert time.monotonic() - began <= _MOST_SECONDS
    yield Demo(page)
    context.close()
    assert errors == []
    # its icon is a data address
    assert [each for each in requests if not each.startswith("data:")] == [address]


def test_it_plays_pauses_goes_on_and_ends(opened: Demo) -> None:
    opened.shows_the_same()
    opened.press("Run")
    opened.until("step 1[3-9] of 72 · --offload activations")
    assert opened.row("offload").locator("input").is_checked()
    opened.press("Pause")
    opened.until("replay paused")
    paused = opened.line()
    opened.page.wait_for_timeout(1000)
    assert opened.line() == paused
    opened.press("Resume")
    opened.until(r"replaying, step \d+ of 72 · --accumulate 4")
    opened.press("Cancel")
    opened.beside.hand.press("run")
    while opened.beside.replay.advance(demo.TICK_SECONDS):
        pass
    opened.shows_the_same()
    opened.press("Run")
    opened.until("a recorded run, shown whole")  # by itself


def test_a_click_on_a_setting_is_answered_as_by_a_kernel(opened: Demo) -> None:
    hand = opened.beside.hand
    opened.flip("accumulation")
    hand.flip("accumulation")
    assert "gradient accumulation refused: not in this recording; predicted" in opened.line()
    opened.shows_the_same()

    opened.flip("optimizer")
    hand.flip("optimizer", on=False)
    assert opened.line() == "replay paused, step 60 of 72 · --checkpoint"
    opened.shows_the_same()

    opened.choose("accumulation", "2")  # what it would give, without asking for it
    hand.choose("accumulation", "2")
    opened.shows_the_same()
    opened.choose("checkpointing", "selective")
    hand.choose("checkpointing", "selective")
    assert "checkpointing refused" in opened.line()
    opened.shows_the_same()

    opened.choose("accumulation", "4")
    opened.flip("accumulation")
    hand.choose("accumulation", "4")
    hand.flip("accumulation")
    assert opened.line() == "replay paused, step 48 of 72 · --accumulate 4 --checkpoint"
    opened.shows_the_same()

    opened.press("Cancel")
    opened.press("Find a plan")
    hand.press("cancel")
    hand.press("find")
    opened.shows_the_same()


def test_a_click_while_it_plays(opened: Demo) -> None:
    opened.press("Run")
    opened.until("step [3-9] of 72")
    opened.flip("gradients")
    opened.until("replaying, step .* · as written · gradient release refused")
    opened.choose("offload", "activations")
    opened.flip("offload")
    opened.until("replaying, step 1[3-9] of 72 · --offload activations$")


def test_code_is_copied_and_what_a_recording_cannot_do_is_said(opened: Demo) -> None:
    opened.press("Copy as code")
    opened.panel.locator(".memlab-note").get_by_text("copied to the clipboard").wait_for()
    assert opened.page.evaluate("navigator.clipboard.readText()") == "%%memfit --checkpoint --adam8bit"
    opened.panel.get_by_label("Copy as code, for what").select_option("trainer")
    opened.press("Copy as code")
    assert "TrainingArguments" in opened.panel.locator(".memlab-code").input_value()

    opened.panel.get_by_role("slider").fill("30")
    opened.panel.get_by_role("slider").dispatch_event("change")
    assert opened.errors() == "this is a recording: its budget stays where it was"
    opened.panel.get_by_text("keep what it trains").click()
    assert opened.errors() == "this is a recording: what was asked for needs a run"
    assert not opened.panel.get_by_label("keep what it trains").is_checked()


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_it_reads_on_a_light_and_on_a_dark_page(browser: Any, address: str, scheme: str, is_dark: bool) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    page.locator(".js-plotly-plot .xtick").first.wait_for(timeout=_MILLISECONDS)
    told = "at => getComputedStyle(at).{}.match(/\\d+/g).map(Number).reduce((one, other) => one + other) / 3"
    assert (page.locator("body").evaluate(told.format("backgroundColor")) < 64) is is_dark
    assert (page.locator(".memlab-line").evaluate(told.format("color")) > 192) is is_dark
    assert (page.locator(".xtick text").first.evaluate(told.format("fill")) > 192) is is_dark
    context.close()
