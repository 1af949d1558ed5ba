"""`Shown`: records that `print` and notebooks show as `memlab.report` writes them, and not field by field."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class Shown:
    """A record with a way to be shown; which one, `memlab.report.showing` says.

    Example:
        >>> from memlab.records import Measurement
        >>> print(Measurement("as written", "cpu", 2**30, None, 0, {"parameters": 2**30}, (), (), 8, 0))
        as written · cpu
        parameters         1.00 GiB   100 %  ████████████████████████
        peak allocated     1.00 GiB
    """

    def __str__(self) -> str:
        return str(_showing().text_of(self))

    def _repr_html_(self) -> str | None:
        html: str | None = _showing().html_of(self)
        return html


def _showing() -> ModuleType:
    # records know nothing of reports; whoever looks at one brings them in
    return import_module("memlab.report.showing")
