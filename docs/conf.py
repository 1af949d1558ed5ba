"""Settings of the website, which is built from the pages where they lie: `sphinx-build -W -c docs . build/site`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

from memlab.records.run_record import RunRecord
from tests.docs import demo

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
        *("docs/demo", "docs/gallery", "docs/usage", "docs/cheatsheet", "docs/why_did_nothing_change", "docs/limits", "docs/measured", "docs/compared", "docs/versions"),
        *("docs/stacks", "docs/allocator_accuracy", "tests/emulated_gpu/README", "tests/emulated_gpu/last_run"),
    ),
    "Reference": ("docs/flags", "docs/api", "CHANGELOG"),
    "Course": (*sorted(f"notebooks/{path.stem}" for path in Path(__file__).parents[1].glob("notebooks/*.ipynb")), "docs/instructors_guide"),
    "Working on memlab": ("ARCHITECTURE", "CONTRIBUTING", "SUPPORT", "SECURITY"),
}  # fmt: skip


# as wide as the window, since a panel has its figure beside its settings
_DEMO = """
```{raw} html
<style>.content { width: auto; flex: 1; } .toc-drawer { display: none; } .main { justify-content: stretch; }</style>
<p><a href="demo_panel.html">In a window of its own</a></p>
<iframe src="demo_panel.html" title="the panel on a recorded run" style="width: 100%; height: 1500px; border: 0"></iframe>
```
"""


def _add_to(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add the menu to the first page and the demo to its own: their files stay plain Markdown for other readers."""
    if page == root_doc:
        source[0] += "".join(_MENU.format(caption=title, pages="\n".join(pages)) for title, pages in _PAGES.items())
    if page == "docs/demo":
        source[0] = source[0].partition("<!-- elsewhere -->")[0] + _DEMO


def _copy_files(app: Sphinx, error: Exception | None) -> None:
    """Copy what pages show by plain HTML, make the first page the one that servers look for, and write the demo."""
    site, docs = Path(app.outdir), Path(__file__).parent
    if error is None:
        (site / "docs").mkdir(exist_ok=True)
        for file in (*docs.glob("*.png"), *docs.glob("*.html")):
            shutil.copy(file, site / "docs")
        shutil.copy(site / f"{root_doc}.html", site / "index.html")
        (site / "docs" / "demo_panel.html").write_text(demo.page(RunRecord.load(demo.RECORD)), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect the two."""
    app.connect("source-read", _add_to)
    app.connect("build-finished", _copy_files)
