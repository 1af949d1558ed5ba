"""Lists of names in messages."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are.

    Example:
        >>> listed(["a", "b"])
        'a, b'
        >>> listed([str(number) for number in range(10)])
        '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
