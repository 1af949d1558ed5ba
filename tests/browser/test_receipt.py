"""The receipt as people see it: a notebook run by menu and keyboard in JupyterLab, in both themes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbformat")

from memlab.jupyter import panel_page  # noqa: E402
from memlab.records import Measurement  # noqa: E402
from memlab.records.ablation import Ablation, AblationRow  # noqa: E402
from memlab.records.comparison import Comparison  # noqa: E402
from memlab.report import ablation, html, tables  # noqa: E402
from memlab.units import GIB, MIB  # noqa: E402
from tests.browser.conftest import choose_theme, in_jupyterlab  # noqa: E402
from tests.jupyter.conftest import MAKE, TRAIN  # noqa: E402
from tests.report import samples  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.full]

CELLS = (
    "%load_ext memlab",
    MAKE,
    f"%%memfit\n{TRAIN}",
    f"%%memfit --accumulate 4\n{TRAIN}",
    "%memfit report",
)
_MILLISECONDS = 90_000
# how much lighter or darker text is than its page (WCAG 2, for text)
_LEAST_CONTRAST = 4.5
_COLOURS = """cell => {
    const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
    let page = cell, back = numbers(getComputedStyle(page).backgroundColor);
    while (back.length === 4 && back[3] === 0 && page.parentElement) {
        page = page.parentElement;
        back = numbers(getComputedStyle(page).backgroundColor);
    }
    return [numbers(getComputedStyle(cell).color), back];
}"""


def contrast(ink: list[float], page: list[float]) -> float:
    """Contrast of two colours, from 1 to 21, as WCAG 2 defines it."""
    lights = sorted((_luminance(ink) + 0.05, _luminance(page) + 0.05))
    return lights[1] / lights[0]


def _luminance(colour: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour[:3])]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def write_notebook(folder: Path, name: str) -> None:
    cells = [nbformat.v4.new_code_cell(source.strip(), id=f"cell-{number}") for number, source in enumerate(CELLS)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / name)


def open_notebook(page: Any, lab: str, name: str) -> None:
    page.goto(in_jupyterlab(lab, name))
    page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=_MILLISECONDS)
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=_MILLISECONDS)


def run_all_by_menu(page: Any) -> None:
    page.locator("#jp-MainMenu").get_by_text("Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()


@pytest.mark.full
@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_receipt_and_figure(browser: Any, lab: str, lab_folder: Path, tmp_path: Path, theme: str) -> None:
    choose_theme(lab_folder, theme)
    name = f"{theme.split()[1].lower()}.ipynb"
    write_notebook(lab_folder, name)
    page = browser.new_page(viewport={"width": 1400, "height": 1900})
    try:
        open_notebook(page, lab, name)
        run_all_by_menu(page)
        receipts = page.locator(".memlab-receipt table")
        page.locator(".jp-OutputArea img[src^='data:image/png']").first.wait_for(timeout=_MILLISECONDS)
        page.wait_for_function("document.querySelectorAll('.memlab-receipt table').length === 3", timeout=_MILLISECONDS)
        page.screenshot(path=str(tmp_path / "receipt.png"))
        rows = receipts.nth(1).locator("tbody tr:has(th)").all_inner_texts()
        assert rows[0].startswith("as written")
        assert rows[1].startswith("--accumulate 4")
        assert "memfit · Sequential" in receipts.nth(1).locator("caption").inner_text()
        for cell in receipts.nth(1).locator("caption, th, td").all():
            assert contrast(*cell.evaluate(_COLOURS)) >= _LEAST_CONTRAST
        save_by_keyboard(page)
    finally:
        page.close()
    saved = json.loads((lab_folder / name).read_text())
    assert "widgets" not in saved["metadata"]
    assert any("image/png" in output.get("data", {}) for output in saved["cells"][3]["outputs"])


def test_one_cell_by_keyboard(browser: Any, lab: str, lab_folder: Path) -> None:
    write_notebook(lab_folder, "keys.ipynb")
    page = browser.new_page()
    try:
        open_notebook(page, lab, "keys.ipynb")
        page.locator(".jp-Cell .cm-content").first.click()
        for _ in CELLS[:3]:
            page.keyboard.press("Shift+Enter")
        page.locator(".memlab-receipt table").wait_for(timeout=_MILLISECONDS)
        assert page.locator(".memlab-receipt tbody th[scope=row]").count() == 1
    finally:
        page.close()


def save_by_keyboard(page: Any) -> None:
    page.locator(".jp-Notebook").click(position={"x": 5, "y": 5})
    with page.expect_response(lambda r: r.request.method == "PUT" and "/api/contents/" in r.url, timeout=_MILLISECONDS):
        page.keyboard.press("Control+s")


@pytest.mark.parametrize("place", ["memlab-panel", "jp-OutputArea-output"])
def test_the_widest_rows_fit_beside_a_narrow_page(browser: Any, place: str) -> None:
    """At 1000 px, with JupyterLab's side bar open, a cell has 553 px: nothing in a panel's table or a receipt is scrolled or cut."""
    steps = {
        "uneven steps": (1e-4, 4e-4, 1e-2, 2e-3, 3e-2),
        "timed": (5e-4,),
        "16 %": (5e-4, 5.5e-4, 6e-4, 4.5e-4, 5e-4),
    }
    plans = ("as written", "--accumulate 4 --offload activations,optimizer,params", "--checkpoint selective --bf16")
    rows = [
        Measurement(plan, "H100 SXM", 123 * MIB, None, 104 * MIB, {"parameters": MIB}, (), seconds, 8, 4096)
        for plan, seconds in zip(plans, steps.values(), strict=True)
    ]
    unlike = [samples.prediction(plan, 0.1, 0.5) for plan in plans]
    table = html.table(
        tables.comparison(
            Comparison(
                "memfit · GPT2LMHeadModel 124.44M · AdamW · cuda · batch 8 × 1024 · H100 SXM · 1000 steps",
                tuple(rows),
                (),
                tuple(unlike),
            )
        )
    )
    assert all(words in table for words in ("uneven steps", "≠ ", "offloaded", "tokens/s"))
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_content(
        f"<style>{(Path(panel_page.__file__).parent / 'panel.css').read_text(encoding='utf-8')}</style>"
        f'<div class="{place}" style="width:553px;font-family:system-ui"><div class="memlab-table">{table}</div></div>'
    )
    wide = page.locator(".memlab-receipt").evaluate("each => [each.scrollWidth, each.clientWidth]")
    page.close()
    assert wide[0] <= wide[1] == 553


def test_words_without_a_space_are_broken_where_the_room_ends(browser: Any) -> None:
    """The name of a model in the title of a receipt, in its notes and in what a panel refuses."""
    name = "AVeryLongNamedConditionalGenerationModelForSequencesOfTextAndImages" * 2
    row = replace(samples.comparison().measurements[0], notes=(f"no parameter of {name} is large enough",))
    receipt = html.table(tables.comparison(Comparison(f"memfit · {name} 560 · AdamW", (row,))))
    css = (Path(panel_page.__file__).parent / "panel.css").read_text(encoding="utf-8")
    panel = (
        f'<div class="memlab-panel" style="width:340px"><div class="memlab-title"><b>memfit · {name}</b></div>'
        f'<div class="memlab-words"><span>tiling: no linear layer of {name} is large</span></div></div>'
    )
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_content(
        f'<style>{css}</style><div class="jp-OutputArea-output" style="width:553px">{receipt}{panel}</div>'
    )
    right = "place => Math.max(...Array.from(place.querySelectorAll('*'), each => each.getBoundingClientRect().right))"
    wide = [page.locator(place).evaluate(right) for place in (".memlab-receipt", ".memlab-panel")]
    page.close()
    assert [wide[0] <= 8 + 553, wide[1] <= 8 + 340] == [True, True], wide


def test_predictions_and_their_verdicts_fit_beside_the_side_bar_of_a_narrow_page(browser: Any) -> None:
    """As above, at the 533 px that a value of a cell has behind its number."""
    predicted = [replace(each, host_bytes=GIB // 2) for each in samples.plan_space()]
    measured = tuple(samples.comparison().measurements)
    table = html.table(tables.predictions(predicted, 8 * GIB, title="t", how_to_see_all="all", measurements=measured))
    assert all(words in table for words in ("to spare", "offloaded", "measured"))
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_content(f'<div style="width:533px;font-family:system-ui">{table}</div>')
    wide = page.locator(".memlab-receipt").evaluate("each => [each.scrollWidth, each.clientWidth]")
    page.close()
    assert wide[0] <= wide[1] == 533


def test_numbers_stay_in_one_line_beside_long_plans_where_there_is_room(browser: Any) -> None:
    plans = ("as written", "--accumulate 4 --checkpoint --bf16 --adam8bit --offload activations,optimizer")
    rows = tuple(
        Measurement(
            plan, "cpu", 24 * MIB, None, 104 * MIB, {"parameters": MIB}, (), (5e-4, 6e-4, 7e-4, 5e-4, 5e-4), 8, 4096
        )
        for plan in plans
    )
    table = html.table(tables.comparison(Comparison("t", rows, latest=plans[1:])))
    assert "± " in table
    assert "vs first" in table
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    high = """receipt => Array.from(receipt.querySelectorAll("thead th, tbody td:not([colspan])"))
        .map(cell => Array.from(cell.childNodes).filter(node => node.tagName !== "DIV"))
        .map(nodes => { const range = document.createRange(); range.setStartBefore(nodes[0]); range.setEndAfter(nodes.at(-1));
                        return new Set(Array.from(range.getClientRects(), box => Math.round(box.top / 10))).size; })"""
    for width, stay in ((988, True), (568, False)):
        page.set_content(f'<div style="width:{width}px;font-family:system-ui">{table}</div>')
        assert (max(page.locator(".memlab-receipt").evaluate(high)) == 1) is stay
    page.close()


def test_an_ablation_and_its_notes_fit_beside_the_side_bar(browser: Any) -> None:
    """At 1440 and at 1000 px, with JupyterLab's side bar open, a value of a cell has 973 and 533 px for a table with every column of an ablation."""
    first = samples.measurement("as written", 9.1, 1310.0)
    rows = [AblationRow("", "as written", "the loop as it is", first, samples.prediction("as written", 10.9, 4000.0))]
    for technique in ("--checkpoint selective", "--offload activations", "--accumulate 4"):
        measured = replace(
            samples.measurement(technique, 2.0, 980.0), host_bytes=GIB, notes=("a note of many words",) * 9
        )
        what = "Checkpointing: every block instead of selective; same gradient"
        rows.append(AblationRow(technique, technique, what, measured, samples.prediction(technique, 2.0, 4000.0)))
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    measure = """receipt => [receipt.scrollWidth, receipt.clientWidth, Math.max(...Array.from(
        receipt.querySelectorAll("td[colspan] div"), note => note.getBoundingClientRect().right))]"""
    for width in (973, 533):
        page.set_content(
            f'<div style="width:{width}px;font-family:system-ui">{html.table(ablation.table(Ablation("t", tuple(rows))))}</div>'
        )
        wide, room, note = page.locator(".memlab-receipt").evaluate(measure)
        assert wide <= room == width
        assert note <= 8 + width  # notes are read without scrolling in any case
    page.close()
