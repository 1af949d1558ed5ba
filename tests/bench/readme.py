"""Sections of the README that are written by programs, between lines such as ``<!-- ladder -->`` and ``<!-- /ladder -->``."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def with_section(readme: str, name: str, written: str) -> str:
    """A README with a section replaced.

    Args:
        readme: its text.
        name: of the section, as in its markers.
        written: what is to stand between them.

    Raises:
        ValueError: it has no place for the section.

    Example:
        >>> with_section("<!-- a -->\\nold\\n<!-- /a -->", "a", "new")
        '<!-- a -->\\nnew\\n<!-- /a -->'
    """
    begin, end = _markers(name)
    place = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    if not place.search(readme):
        raise ValueError(f"README.md: found no lines {begin} and {end} to write the results between; put them back")
    return place.sub(lambda _: f"{begin}\n{written}\n{end}", readme)


def section_of(readme: str, name: str) -> str:
    """What stands between the markers of a section."""
    begin, end = _markers(name)
    return readme.partition(f"{begin}\n")[2].partition(f"\n{end}")[0]


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- /{name} -->"
