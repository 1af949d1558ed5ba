"""The page "Why did nothing change?" is run: every cell, and what it says must stand in its output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("transformers", reason="needs transformers")

from tests.helpers.kernel import run_in_kernel

PAGE = Path(__file__).parents[2] / "docs" / "why_did_nothing_change.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A cell of the page.

    Args:
        source: its code.
        says: what must stand in its output; "" where the page does not show any.
    """

    source: str
    says: str


def cells_of(page: str) -> list[Cell]:
    """The cells of a page, each with the text block that follows it."""
    found: list[Cell] = []
    for kind, text in _BLOCK.findall(page):
        if kind == "python":
            found.append(Cell(text.strip("\n"), ""))
        else:
            found[-1] = Cell(found[-1].source, text.strip("\n"))
    return found


def shown(cell: object) -> str:
    """Everything a cell shows, in one line."""
    parts = []
    for output in cell.outputs:
        error = f"{output['ename']}: {output['evalue']}" if output.output_type == "error" else ""
        parts.append(output.get("text", "") or output.get("data", {}).get("text/plain", "") or error)
    return " ".join(" ".join(parts).replace("↳", " ").split())


def is_said(cell: Cell, output: str) -> bool:
    """Whether a cell has shown what the page says; a cell without such a text must not fail."""
    return cell.says in output if cell.says else "Error" not in output


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_cell_of_the_page_says_what_stands_under_it() -> None:
    cells = cells_of(PAGE.read_text(encoding="utf-8"))
    assert sum(bool(cell.says) for cell in cells) >= 12
    ran = run_in_kernel({f"cell_{number}": cell.source for number, cell in enumerate(cells)})
    said = [shown(output) for output in ran.values()]
    wrong = [(cell, output) for cell, output in zip(cells, said, strict=True) if not is_said(cell, output)]
    assert not wrong, "\n\n".join(f"{cell.source}\nis to say: {cell.says}\nsaid: {output}" for cell, output in wrong)


def test_cells_are_read_with_what_they_say() -> None:
    page = "```python\n1\n```\n```text\none\n```\nwords\n```python\n2\n```\n"
    assert cells_of(page) == [Cell("1", "one"), Cell("2", "")]
