"""Why memlab takes more, where it does: by pairing and measure, for the README and the page. Written by hand, after profiling."""

from __future__ import annotations

CAUSES: dict[tuple[str, str], str] = {}
