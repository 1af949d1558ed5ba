"""Sections of pages that programs write, between lines such as ``<!-- ablation -->`` and ``<!-- /ablation -->``."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
COMPARED = README.parent / "docs" / "compared.md"
MEASURED = README.parent / "docs" / "measured.md"


def with_section(page: str, name: str, written: str) -> str:
    """Replace a section of a page.

    Args:
        page: its text.
        name: the section's name, as in its markers.
        written: the new text between the markers.

    Raises:
        ValueError: the page has no such markers.

    Example:
        >>> with_section("<!-- a -->\\nold\\n<!-- /a -->", "a", "new")
        '<!-- a -->\\nnew\\n<!-- /a -->'
    """
    begin, end = _markers(name)
    place = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    if not place.search(page):
        raise ValueError(f"found no lines {begin} and {end} to write the results between; put them back into the page")
    return place.sub(lambda _: f"{begin}\n{written}\n{end}", page)


def section_of(page: str, name: str) -> str:
    """Return the text between the markers of a section."""
    begin, end = _markers(name)
    return page.partition(f"{begin}\n")[2].partition(f"\n{end}")[0]


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- /{name} -->"
