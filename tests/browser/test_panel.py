"""The panel as people use it: a real JupyterLab, a mouse and a keyboard, while cells train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright's Python package").expect

from tests.browser.conftest import OpenNotebook, choose_theme, opened_notebook, show_notebook, without_subshells  # noqa: E402
from tests.browser.test_receipt import contrast, save_by_keyboard  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.full]

_MILLISECONDS = 90_000
_LEAST_CONTRAST = 4.5

MAKE = """
%load_ext memlab
import torch

class Blocks(torch.nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, 8 * width), torch.nn.GELU(), torch.nn.Linear(8 * width, width))
            for _ in range(6)
        )

    def forward(self, inputs, target):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return {"loss": torch.nn.functional.mse_loss(inputs, target)}

torch.manual_seed(0)
model = Blocks()
optimizer = torch.optim.AdamW(model.parameters())
inputs, target = torch.randn(2, 1024, 48)
"""

TRAIN = """
%%memfit {flags}
for _ in range({steps}):
    loss = model(inputs, target)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENDLESS = TRAIN.format(flags="", steps=1_000_000)
PANEL = "%memfit panel"
CHECKSUM = """
import hashlib
tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest(), model.training)
"""
LIVE_PANELS = """
from ipywidgets.widgets.widget import _instances
print(sum(type(widget).__name__ == "PanelWidget" for widget in _instances.values()), "live")
"""

# what has become of a setting, every time the page shows something else
_WATCH = """panel => {
    window.seen = [];
    new MutationObserver(() => {
        const state = panel.innerText.match(/pending|applied at step \\d+/)?.[0];
        if (state && state !== window.seen.at(-1)) window.seen.push(state);
    }).observe(panel.querySelector(".memlab-controls"), {childList: true, subtree: true, characterData: true});
}"""
_MEASURED_PEAKS = """panel => Array.from(
    panel.querySelector(".js-plotly-plot").data.find(trace => trace.name === "measured peak").y)"""
_BARS = """panel => panel.querySelector(".js-plotly-plot").data
    .filter(trace => trace.xaxis === "x3").flatMap(trace => Array.from(trace.text ?? []))"""
_HAS_BAR = f"panel => ({_BARS})(panel).some(words => words.includes('--checkpoint'))"
# the colour of every piece of text with the opacity of what it stands in, and the colour of the page behind it
_INKS = """panel => {
    const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
    const found = [];
    for (const element of panel.querySelectorAll("*")) {
        const text = Array.from(element.childNodes).filter(n => n.nodeType === 3).map(n => n.textContent).join("").trim();
        const isDisabled = element.closest(":disabled") || element.closest(".memlab-spoken");
        if (!/[\\p{L}\\p{N}]/u.test(text) || isDisabled || !element.checkVisibility()) continue;
        const style = getComputedStyle(element);
        if (style.fontSize === "0px") continue; // words of bars, for pages without styles
        const ink = numbers(element instanceof SVGElement ? style.fill : style.color);
        const mark = /^\\d+$/.test(text) && element.closest(".trace")?.querySelector("path.point");
        let share = ink[3] ?? 1, page = element, back = mark ? numbers(getComputedStyle(mark).fill) : null;
        for (; page && !back; page = page.parentElement) {
            const behind = numbers(getComputedStyle(page).backgroundColor);
            if (behind[3] !== 0) back = behind;
            else share *= Number(getComputedStyle(page).opacity);
        }
        found.push([text, [0, 1, 2].map(i => share * ink[i] + (1 - share) * back[i]), back]);
    }
    return found;
}"""
_FOCUSED = """() => {
    const element = document.activeElement, style = getComputedStyle(element);
    return {
        name: element.getAttribute("aria-label") ?? element.closest("label")?.innerText ?? element.innerText ?? "",
        tag: element.tagName, panel: !!element.closest(".memlab-panel"),
        visible: element.matches(":focus-visible") && (style.outlineStyle !== "none" || style.boxShadow !== "none"),
    };
}"""


def box(panel: Any, name: str) -> Any:
    return panel.get_by_label(name, exact=True)


def button(panel: Any, name: str) -> Any:
    return panel.get_by_role("button", name=name, exact=True)


def until_applied(panel: Any, name: str) -> int:
    """Wait until a setting is in force; the first step under it."""
    row = panel.locator(".memlab-setting").filter(has_text=name)
    state = row.get_by_text(re.compile(r"applied at step \d+"))
    state.wait_for(timeout=_MILLISECONDS)
    return int(re.search(r"applied at step (\d+)", state.inner_text())[1])


def until_says(panel: Any, words: str) -> None:
    """Wait for words in the line below the figure."""
    expect(panel.locator(".memlab-line")).to_contain_text(words, timeout=_MILLISECONDS)


def evaluate(panel: Any, script: str) -> Any:
    return panel.evaluate(script)


def until(opened: OpenNotebook, panel: Any, condition: str) -> None:
    """Wait for a condition on the panel's element."""
    opened.page.wait_for_function(condition, arg=panel.element_handle(), timeout=_MILLISECONDS)


def test_flip_cancel_and_run_again(browser: Any, lab: str, lab_folder: Path) -> None:
    cells = (MAKE, PANEL, ENDLESS, LIVE_PANELS, PANEL)
    with opened_notebook(browser, lab, lab_folder, "flip.ipynb", cells) as opened:
        for number in (0, 1, 2):
            opened.run(number)
        panel = opened.panel(1)
        until_says(panel, "training, step")
        _flip_while_it_trains(opened, panel)
        _cancel(opened, panel)
        assert opened.result(3) == "1 live"
        _train_again(opened, panel)
        _open_again(opened)
        _two_panels_are_one(opened)


def _flip_while_it_trains(opened: OpenNotebook, panel: Any) -> None:
    panel.locator("tbody tr").first.wait_for(timeout=_MILLISECONDS)
    assert opened.is_running(2)
    panel.evaluate(_WATCH)
    box(panel, "Checkpointing").click()
    step = until_applied(panel, "Checkpointing")
    assert opened.is_running(2)
    expect(box(panel, "Checkpointing")).to_be_checked()
    seen = opened.page.evaluate("window.seen")
    assert seen in (["pending", f"applied at step {step}"], [f"applied at step {step}"])
    until(opened, panel, _HAS_BAR)
    until(
        opened, panel, f"panel => {{ const y = ({_MEASURED_PEAKS})(panel); return y.at(-1) < 0.7 * Math.max(...y); }}"
    )
    expect(panel.locator("tbody th[scope=row]")).to_have_count(2, timeout=_MILLISECONDS)
    spoken = panel.locator(".memlab-spoken[aria-live=polite]")
    expect(spoken).to_contain_text(f"checkpointing applied at step {step}", timeout=_MILLISECONDS)
    assert opened.is_running(2)


def _cancel(opened: OpenNotebook, panel: Any) -> None:
    button(panel, "Cancel").click()
    opened.until_over(2)
    output = opened.cell(2).locator(".jp-OutputArea")
    expect(output.get_by_text(re.compile(r"cancelled from the panel after step \d+"))).to_have_count(1)
    assert "Traceback" not in output.inner_text()
    assert output.locator(".memlab-receipt tbody th[scope=row]").count() == 2
    until_says(panel, "idle")


def _train_again(opened: OpenNotebook, panel: Any) -> None:
    opened.run(2)
    until_says(panel, "training, step")
    button(panel, "Cancel").click()
    opened.until_over(2)


def _open_again(opened: OpenNotebook) -> None:
    opened.run(1)
    opened.until_over(1)
    opened.panel(1)
    assert opened.page.locator(".memlab-panel").count() == 1
    assert opened.result(3) == "1 live"


def _two_panels_are_one(opened: OpenNotebook) -> None:
    opened.run(4)
    first, second = opened.panel(1), opened.panel(4)
    expect(box(second, "Checkpointing")).to_be_checked()
    box(second, "Checkpointing").click()
    expect(box(first, "Checkpointing")).not_to_be_checked(timeout=_MILLISECONDS)
    box(first, "Gradient accumulation").click()
    expect(box(second, "Gradient accumulation")).to_be_checked(timeout=_MILLISECONDS)
    assert opened.result(3) == "2 live"


def test_keyboard_alone(browser: Any, lab: str, lab_folder: Path) -> None:
    with opened_notebook(browser, lab, lab_folder, "keyboard.ipynb", (MAKE, PANEL, ENDLESS)) as opened:
        keyboard = opened.page.keyboard
        opened.cell(0).locator(".cm-content").focus()
        for _ in range(3):
            keyboard.press("Shift+Enter")
        panel = opened.panel(1)
        until_says(panel, "training, step")
        keyboard.press("Escape")
        for _ in range(2):
            keyboard.press("ArrowUp")
        _tab_to(opened, "Checkpointing")
        keyboard.press("Space")
        until_applied(panel, "Checkpointing")
        _tab_to(opened, "Checkpointing, which")
        keyboard.press("ArrowDown")
        panel.get_by_text("--checkpoint every:2").first.wait_for(timeout=_MILLISECONDS)
        _tab_to(opened, "Cancel")
        keyboard.press("Enter")
        opened.until_over(2)
        assert "cancelled from the panel" in opened.cell(2).inner_text()


def _tab_to(opened: OpenNotebook, name: str) -> None:
    """Press Tab until a control of the panel has the focus, visibly."""
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        focused = opened.page.evaluate(_FOCUSED)
        if focused["panel"] and focused["name"].strip() == name:
            assert focused["visible"], focused
            return
    pytest.fail(f"Tab does not reach {name}")


@pytest.fixture(scope="module")
def trained(browser: Any, lab: str, lab_folder: Path) -> Iterator[OpenNotebook]:
    """A model that a cell has trained, and a panel on it."""
    plain = "plain = torch.nn.Sequential(torch.nn.Linear(8, 8))\nits_optimizer = torch.optim.AdamW(plain.parameters())"
    cells = (
        MAKE,
        TRAIN.format(flags="", steps=5),
        PANEL,
        CHECKSUM,
        plain,
        f"{PANEL} --model plain",
        BREAK,
        MEND,
        DELETE,
    )
    with opened_notebook(browser, lab, lab_folder, "trained.ipynb", cells) as opened:
        for number in (0, 1, 2):
            opened.run(number)
        opened.until_over(2)
        opened.panel(2)
        yield opened


BREAK = """
from memlab.live.control import Control
whole = Control.ask
def ask(self, field, text):
    raise RuntimeError("no such luck")
Control.ask = ask
"""
MEND = "Control.ask = whole"
DELETE = """
import gc
del model, optimizer, loss
tensors = None
print(gc.collect() >= 0)
"""


def test_own_run_leaves_no_trace(trained: OpenNotebook) -> None:
    panel = trained.panel(2)
    before = trained.result(3)
    box(panel, "steps").fill("5")
    button(panel, "Run").click()
    until_says(panel, "idle, step 10")
    assert trained.result(3) == before
    box(panel, "steps").fill("")  # until Cancel
    button(panel, "Run").click()
    until_says(panel, "measuring, step")
    button(panel, "Pause").click()
    until_says(panel, "paused")
    stands_at = panel.locator(".memlab-line").inner_text()
    button(panel, "Resume").click()
    until_says(panel, "measuring, step")
    expect(panel.locator(".memlab-line")).not_to_have_text(
        stands_at.replace("paused", "measuring"), timeout=_MILLISECONDS
    )
    button(panel, "Cancel").click()
    until_says(panel, "idle")
    expect(button(panel, "Run")).to_be_enabled(timeout=_MILLISECONDS)
    assert trained.result(3) == before


def test_settings_that_exclude_each_other(trained: OpenNotebook) -> None:
    panel = trained.panel(2)
    box(panel, "Offload").click()
    until_applied(panel, "Offload")
    panel.get_by_label("Optimizer, which").select_option("paged 8-bit Adam")
    box(panel, "Optimizer").click()
    row = panel.locator(".memlab-setting").filter(has_text="Optimizer")
    row.get_by_text("exclude each other").wait_for(timeout=_MILLISECONDS)
    effect = row.get_by_text("does not apply")
    effect.hover(timeout=_MILLISECONDS)
    expect(effect).to_have_attribute("title", re.compile("exclude each other"))
    expect(box(panel, "Optimizer")).not_to_be_checked()
    expect(box(panel, "Offload")).to_be_checked()
    button(panel, "Undo all").click()
    expect(box(panel, "Offload")).not_to_be_checked(timeout=_MILLISECONDS)


def test_what_does_not_apply_is_refused(trained: OpenNotebook) -> None:
    trained.run(4)
    trained.run(5)
    panel = trained.panel(5)
    box(panel, "Checkpointing").click()
    row = panel.locator(".memlab-setting").filter(has_text="Checkpointing")
    row.get_by_text("refused: ").wait_for(timeout=_MILLISECONDS)
    assert "block" in row.inner_text()
    expect(box(panel, "Checkpointing")).not_to_be_checked(timeout=_MILLISECONDS)


def test_copy_as_code(trained: OpenNotebook) -> None:
    panel = trained.panel(2)
    box(panel, "Gradient accumulation").click()
    until_applied(panel, "Gradient accumulation")
    button(panel, "Copy as code").click()
    expect(panel.locator(".memlab-note")).to_contain_text("copied", timeout=_MILLISECONDS)
    assert trained.page.evaluate("navigator.clipboard.readText()") == "%%memfit --accumulate 4"
    assert panel.locator("textarea").input_value() == "%%memfit --accumulate 4"
    button(panel, "Undo all").click()
    expect(box(panel, "Gradient accumulation")).not_to_be_checked(timeout=_MILLISECONDS)


def test_error_of_a_callback_is_shown(trained: OpenNotebook) -> None:
    panel = trained.panel(2)
    trained.run(6)
    trained.until_over(6)
    box(panel, "Checkpointing").click()
    expect(panel.locator(".memlab-errors[role=alert]")).to_contain_text(
        "RuntimeError: no such luck", timeout=_MILLISECONDS
    )
    trained.run(7)
    trained.until_over(7)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_readable_and_named(trained: OpenNotebook, lab_folder: Path, theme: str) -> None:
    choose_theme(lab_folder, theme)
    save_by_keyboard(trained.page)
    try:
        show_notebook(trained.page)
    finally:
        choose_theme(lab_folder, "JupyterLab Light")
    panel = trained.panel(2)
    expect(panel.get_by_role("slider", name="Budget")).to_be_visible(timeout=_MILLISECONDS)
    expect(panel.get_by_label("Live figures")).to_be_visible()
    for control in re.findall(r"- (?:checkbox|combobox|button|slider|textbox)\b.*", panel.aria_snapshot()):
        assert re.search(r'"[^"]+"', control), f"no name: {control}"
    inks = panel.evaluate(_INKS)
    assert len(inks) > 30
    faint = {text: round(value, 2) for text, ink, page in inks if (value := contrast(ink, page)) < _LEAST_CONTRAST}
    assert not faint


def test_model_deleted(trained: OpenNotebook) -> None:
    panel = trained.panel(2)
    trained.run(8)
    trained.until_over(8)
    until_says(panel, "is deleted")
    expect(button(panel, "Run")).to_be_disabled()
    expect(box(panel, "Checkpointing")).to_be_disabled()


def test_page_loaded_again_and_kernel_restarted(browser: Any, lab: str, lab_folder: Path) -> None:
    slow = f"{TRAIN.format(flags='', steps=100)}    __import__('time').sleep(0.1)"
    with opened_notebook(browser, lab, lab_folder, "again.ipynb", (MAKE, PANEL, slow)) as opened:
        opened.run(0)
        opened.run(1)
        panel = opened.panel(1)
        still = opened.cell(1).locator("[class^=memlab-still]")
        box(panel, "Checkpointing").click()
        expect(still).to_contain_text("%memfit undo", timeout=_MILLISECONDS)  # what was clicked is in it
        _load_again_while_it_trains(opened)
        panel = opened.panel(1)
        expect(box(panel, "Checkpointing")).to_be_checked()
        box(panel, "Gradient accumulation").click()
        until_applied(panel, "Gradient accumulation")
        expect(still).to_have_count(1)
        expect(still).to_be_hidden()
        _restart(opened)
        stale = panel.locator(".memlab-stale[role=alert]")
        expect(stale).to_contain_text("no longer connected", timeout=_MILLISECONDS)
        assert panel.locator(".memlab-controls").evaluate("controls => controls.inert")
        assert panel.locator(".memlab-world").is_hidden()
        expect(still).to_be_visible()
        expect(still).to_contain_text("%memfit undo")


def _load_again_while_it_trains(opened: OpenNotebook) -> None:
    still, output = opened.cell(1).locator("[class^=memlab-still]"), opened.cell(2).locator(".jp-OutputArea")
    opened.run(2)
    expect(output).to_contain_text(re.compile(r"step \d+"), timeout=_MILLISECONDS)
    save_by_keyboard(opened.page)
    opened.page.reload()
    expect(still).to_contain_text("as it was when this run began", timeout=_MILLISECONDS)
    silent = output.get_by_text("%memfit report shows its receipt")
    expect(silent).to_be_hidden()
    silent.evaluate("line => line.getAnimations().forEach(each => each.finish())")
    expect(silent).to_be_visible()
    expect(opened.panel(1).locator("tbody th[scope=row]").first).to_be_visible(timeout=_MILLISECONDS)
    until_says(opened.panel(1), "idle")
    expect(still).to_be_hidden()


def _restart(opened: OpenNotebook) -> None:
    opened.page.locator("#jp-MainMenu").get_by_text("Kernel", exact=True).click()
    opened.page.get_by_text(re.compile("^Restart Kernel…$")).click()
    opened.page.locator(".jp-Dialog .jp-mod-accept").click()


def test_without_subshells(browser: Any, lab: str, lab_folder: Path) -> None:
    cells = (MAKE, PANEL, TRAIN.format(flags="", steps=150), TRAIN.format(flags="--background", steps=1_000_000))
    with without_subshells(lab_folder), opened_notebook(browser, lab, lab_folder, "main_shell.ipynb", cells) as opened:
        for number in (0, 1):
            opened.run(number)
        panel = opened.panel(1)
        expect(panel.locator(".memlab-world")).to_contain_text("when the cell ends", timeout=_MILLISECONDS)
        opened.run(2)
        until_says(panel, "training, step")
        box(panel, "Checkpointing").click()
        opened.until_over(2)
        assert until_applied(panel, "Checkpointing") == 151
        opened.run(3)
        until_says(panel, "training, step")
        expect(panel.locator(".memlab-world")).to_contain_text("at the next step", timeout=_MILLISECONDS)
        box(panel, "Gradient accumulation").click()
        panel.get_by_text("--accumulate 4").first.wait_for(timeout=_MILLISECONDS)
        until_says(panel, "training, step")
        button(panel, "Cancel").click()
        until_says(panel, "idle")


_OUTLINE = """panel => {
    const at = element => (({left, top, right, bottom}) => ({left, top, right, bottom}))(element.getBoundingClientRect());
    const scrolls = element => {
        const style = getComputedStyle(element);
        const may = axis => ["auto", "scroll"].includes(style["overflow" + axis]);
        return may("Y") && element.scrollHeight > element.clientHeight || may("X") && element.scrollWidth > element.clientWidth;
    };
    const labels = Array.from(panel.querySelectorAll("label span, button"));
    return {
        controls: at(panel.querySelector(".memlab-controls")), figure: at(panel.querySelector(".js-plotly-plot")),
        page: at(panel.closest(".jp-WindowedPanel-outer") ?? panel.closest(".jp-Notebook")),
        scrolling: Array.from(panel.querySelectorAll("*")).filter(scrolls).map(element => element.className),
        cut: labels.filter(label => label.scrollWidth > label.clientWidth + 1).map(label => label.innerText),
    };
}"""


# words that stand on other words; numbers alone are marks of the map, which lie where they were measured
_WORDS_ON_WORDS = """panel => {
    const boxes = [];
    const isSeen = element => element.getClientRects().length && getComputedStyle(element).visibility !== "hidden";
    for (const element of panel.querySelectorAll("*:not(option, style)")) {
        if (element.closest(".memlab-spoken") || !isSeen(element)) continue;
        for (const text of Array.from(element.childNodes).filter(node => node.nodeType === 3 && /[^\\d\\s]/.test(node.data))) {
            const range = document.createRange();
            range.selectNodeContents(text);
            for (const box of range.getClientRects()) boxes.push([text.data.trim(), box]);
        }
    }
    const areOnEachOther = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
    return boxes.flatMap(([name, box], place) =>
        boxes.slice(place + 1).filter(other => areOnEachOther(box, other[1])).map(other => [name, other[0]]));
}"""


_SETTLED = """panel => {
    const figure = panel.querySelector(".js-plotly-plot"), frames = window.quiet ??= {};
    const now = JSON.stringify([innerWidth, figure.clientWidth, figure._fullLayout.width, figure._fullLayout.height]);
    frames.count = frames.seen === now ? frames.count + 1 : 0;
    frames.seen = now;
    return frames.count > 20 && Math.abs(figure.clientWidth - figure._fullLayout.width) < 2;
}"""
_SCREENS = {"small laptop": (1440, 900), "narrow": (1000, 900), "twice as large": (720, 450)}


def test_settings_and_pictures_are_in_view_together(browser: Any, lab: str, lab_folder: Path) -> None:
    """With JupyterLab's side bar open, in both themes: what is flipped and what it does stand side by side; nothing is cut."""
    choose_theme(lab_folder, "JupyterLab Light")
    tried = ("--checkpoint", "--accumulate 4 --offload optimizer", "--checkpoint --bf16", "--offload optimizer", "")
    trained = (TRAIN.format(flags=flags, steps=6) for flags in tried)
    cells = (MAKE, PANEL, *trained)
    with opened_notebook(browser, lab, lab_folder, "layout.ipynb", cells) as notebook:
        notebook.page.set_viewport_size({"width": 1440, "height": 900})
        for number in range(len(cells)):
            notebook.run(number)
            notebook.until_over(number)
        until(notebook, notebook.panel(1), _HAS_BAR)
        _nothing_is_cut(notebook)
        choose_theme(lab_folder, "JupyterLab Dark")
        save_by_keyboard(notebook.page)
        try:
            show_notebook(notebook.page)
        finally:
            choose_theme(lab_folder, "JupyterLab Light")
        _nothing_is_cut(notebook)


def _nothing_is_cut(notebook: OpenNotebook) -> None:
    panel = notebook.panel(1)
    for screen, (width, height) in _SCREENS.items():
        notebook.page.set_viewport_size({"width": width, "height": height})
        notebook.cell(1).evaluate("cell => cell.scrollIntoView()")
        until(notebook, panel, _SETTLED)
        seen = panel.evaluate(_OUTLINE)
        assert seen["figure"]["right"] <= seen["page"]["right"], screen
        assert seen["cut"] == [], screen
        assert panel.evaluate(_WORDS_ON_WORDS) == [], screen
        if screen == "small laptop":
            assert seen["controls"]["right"] <= seen["figure"]["left"] + 1
            assert abs(seen["controls"]["top"] - seen["figure"]["top"]) < 40
            for part in ("controls", "figure"):
                assert seen["page"]["top"] <= seen[part]["top"] < seen[part]["bottom"] <= seen["page"]["bottom"]
        if screen == "narrow":
            assert seen["controls"]["bottom"] <= seen["figure"]["top"] + 1
        if screen != "twice as large":
            assert seen["scrolling"] == [], screen
            for number in range(2, 7):  # the receipts, by themselves: a page draws what is in sight
                receipt = notebook.cell(number).locator(".memlab-receipt").first
                receipt.scroll_into_view_if_needed()
                assert receipt.evaluate("each => each.scrollWidth - each.clientWidth") <= 0, (screen, number)
                assert receipt.evaluate(_WORDS_ON_WORDS) == [], (screen, number)
