"""Which pages there are, and what writes each."""

from __future__ import annotations

import json
from pathlib import Path

from memlab.records.run_record import RunRecord
from tests.bench import published
from tests.bench.readme import MEASURED, README, with_section
from tests.docs import api, cheat_sheet, demo, flags, front, gallery, notebook_table
from tests.docs import guide as guides

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "tests" / "bench" / "results"
NOTEBOOK_RESULTS = RESULTS / "notebooks.json"
GUIDE = DOCS / "instructors_guide.md"


def written() -> dict[Path, str]:
    """Every page that is made from the code, whole or in part, as it should be."""
    guide = with_section(_text(GUIDE), "notebooks", notebook_table.table_of(json.loads(_text(NOTEBOOK_RESULTS))))
    guide = with_section(guide, "binder", front.binder(json.loads(_text(RESULTS / "binder.json"))))
    guide = with_section(guide, "guesses", guides.guesses(ROOT / "notebooks"))
    guide = with_section(guide, "answers", guides.answers())
    readme = with_section(_text(README), "published", front.published(_text(ROOT / "pyproject.toml")))
    readme = with_section(readme, "techniques", front.techniques())
    first_plot = front.first_plot(json.loads(_text(RESULTS / "first_plot.json")))
    measured = with_section(_text(MEASURED), "first plot", first_plot)
    return {
        DOCS / "flags.md": flags.page(),
        DOCS / "api.md": api.page(),
        DOCS / "cheatsheet.md": cheat_sheet.page(),
        DOCS / "gallery.md": gallery.page(RunRecord.load(demo.RECORD)),
        GUIDE: guide,
        README: readme,
        MEASURED: with_section(measured, "published", published.page(json.loads(_text(published.PATH)))),
    }


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
