"""`Shown`: records that `print` and notebooks show as a report writes them, and not field by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """A record with a way to be shown.

    Example:
        >>> from memlab.records import Measurement
        >>> print(Measurement("as written", "cpu", 2**30, None, 0, {"parameters": 2**30}, (), (), 8, 0))
        as written · cpu
        parameters         1.00 GiB   100 %  ████████████████████████
        peak allocated     1.00 GiB
    """

    # gives what writes records, with `text_of` and `html_of`; `memlab` sets it to `memlab.report.showing`
    reports: ClassVar[Callable[[], Any]]

    def __str__(self) -> str:
        return str(Shown.reports().text_of(self))

    def _repr_html_(self) -> str | None:
        html: str | None = Shown.reports().html_of(self)
        return html
