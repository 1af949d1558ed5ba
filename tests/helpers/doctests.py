"""Examples in docstrings."""

from __future__ import annotations

import doctest
from types import ModuleType


def failures_in(module: ModuleType) -> int:
    """How many of a module's examples do not give what they say."""
    return doctest.testmod(module).failed
