"""Links within the repository lead somewhere: files that exist, headings that stand in them, and chapters in their order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.markdown import anchor

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path for folder in ("", "docs", "notebooks/source") for path in (ROOT / folder).glob("*.md") if path.is_file()
)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()]*\))?)\)|(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_ELSEWHERE = re.compile(r"^(https?:|mailto:|data:)")
_NEXT = re.compile(r"^- Next here: \*\*(\d\d)", re.MULTILINE)


def links_of(page: str) -> list[str]:
    """Where a page's links lead, those in code apart."""
    text = _CODE.sub("``", _FENCE.sub("", page))
    return [inline or tag for inline, tag in _LINK.findall(text)]


def anchors_of(page: str) -> set[str]:
    """What links can point to in a page; a heading that stands there twice is counted on."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", page)):
        place = anchor(heading)
        found.add(f"{place}-{seen[place]}" if seen[place] else place)
        seen[place] += 1
    return found


def faults_of(path: Path) -> Iterator[str]:
    """Links of a page that lead nowhere."""
    # a source lies one folder below the notebook it becomes
    base = path.parent.parent if path.parent.name == "source" else path.parent
    for link in links_of(path.read_text(encoding="utf-8")):
        if _ELSEWHERE.match(link):
            continue
        file, _, place = unquote(link).partition("#")
        target = (base / file) if file else path
        if not target.exists():
            yield f"{link}: there is no {file}"
        elif place and target.suffix == ".md" and place not in anchors_of(target.read_text(encoding="utf-8")):
            yield f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert not list(faults_of(path))


def test_a_page_with_broken_links_is_found_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n## One thing\n[a](gone.md) [b](#one-thing) [c](#one-thing-1) [d](#two)\n"
        '<img src="gone.png"> `[e](code.md)` [f](https://example.org/x)\n```\n[g](fence.md)\n```\n'
    )
    assert list(faults_of(page)) == [
        "gone.md: there is no gone.md",
        "#two: page.md has no such heading",
        "gone.png: there is no gone.png",
    ]


def test_chapters_name_the_one_that_follows() -> None:
    sources = sorted((ROOT / "notebooks" / "source").glob("[0-9][0-9]_*.md"))
    said = {path.stem[:2]: _NEXT.findall(path.read_text(encoding="utf-8")) for path in sources}
    assert sum(bool(following) for following in said.values()) >= 5
    for number, following in said.items():
        assert following in ([], [f"{int(number) + 1:02}"]), f"{number} says {following}"


def test_the_readme_lists_every_notebook_in_order() -> None:
    listed = re.findall(
        r"^\| (\d\d) \| \[.+?\]\(notebooks/(.+?)\.ipynb\)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert [number for number, _ in listed] == sorted(name[:2] for _, name in listed)
    assert all(name.startswith(number) for number, name in listed)
