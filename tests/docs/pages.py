"""Which pages there are, and what writes each."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.readme import with_section
from tests.docs import api, cheat_sheet, flags, notebook_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOK_RESULTS = ROOT / "tests" / "bench" / "results" / "notebooks.json"
GUIDE = DOCS / "instructors_guide.md"


def written() -> dict[Path, str]:
    """Every page that is made from the code, whole or in part, as it should be."""
    measured = json.loads(NOTEBOOK_RESULTS.read_text(encoding="utf-8"))
    guide = with_section(GUIDE.read_text(encoding="utf-8"), "notebooks", notebook_table.table_of(measured))
    return {
        DOCS / "flags.md": flags.page(),
        DOCS / "api.md": api.page(),
        DOCS / "cheatsheet.md": cheat_sheet.page(),
        GUIDE: guide,
    }
