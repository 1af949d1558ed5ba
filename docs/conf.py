"""Settings of the website, which is built from the pages where they lie: `sphinx-build -W -c docs . build/site`."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

project = "memlab"
extensions = ["myst_nb"]
html_theme = "furo"
html_title = "memlab"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "notebooks/*.ipynb", "tests/emulated_gpu/*.md"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # committed outputs are shown
suppress_warnings = ["mystnb.unknown_mime_type"]  # a live figure: its static picture is shown

_MENU = """
```{{toctree}}
:hidden:
:caption: {caption}
:titlesonly:

{pages}
```
"""
_PAGES = {
    "Using memlab": (
        *("docs/usage", "docs/cheatsheet", "docs/why_did_nothing_change", "docs/limits", "docs/measured", "docs/compared"),
        *("docs/stacks", "docs/allocator_accuracy", "tests/emulated_gpu/README", "tests/emulated_gpu/last_run"),
    ),
    "Reference": ("docs/flags", "docs/api", "CHANGELOG"),
    "Course": (*sorted(f"notebooks/{path.stem}" for path in Path(__file__).parents[1].glob("notebooks/*.ipynb")), "docs/instructors_guide"),
    "Working on memlab": ("ARCHITECTURE", "CONTRIBUTING"),
}  # fmt: skip


def _add_menu(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add the menu to the first page, whose file stays plain Markdown for other readers."""
    if page == root_doc:
        source[0] += "".join(_MENU.format(caption=title, pages="\n".join(pages)) for title, pages in _PAGES.items())


def _copy_files(app: Sphinx, error: Exception | None) -> None:
    """Copy what pages show by plain HTML, and make the first page the one that servers look for."""
    site, docs = Path(app.outdir), Path(__file__).parent
    if error is None:
        (site / "docs").mkdir(exist_ok=True)
        for file in (*docs.glob("*.png"), *docs.glob("*.html")):
            shutil.copy(file, site / "docs")
        shutil.copy(site / f"{root_doc}.html", site / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the two."""
    app.connect("source-read", _add_menu)
    app.connect("build-finished", _copy_files)
