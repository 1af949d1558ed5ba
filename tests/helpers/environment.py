"""Environment variables of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def with_path(*folders: Path | str) -> dict[str, str]:
    """This process's variables, with folders before all others that Python searches for modules."""
    found = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
