"""Patches: what turns one value of JSON into another, a few bytes where little differs.

- ``[0, value]``: another value
- ``[1, {name: patch}, [names]]``: of an object, what differs, and names that are gone
- ``[2, at, count, [items]]``: of a list, other items in the place of some
- ``[3, {number: patch}]``: of a list as long as before, the items that differ
- ``None``: the same
"""

from __future__ import annotations

import json
from typing import Any


def between(one: Any, other: Any) -> Any:
    """Return the patch that makes another value of one.

    Example:
        >>> between({"x": [1, 2], "name": "measured peak"}, {"x": [1, 2, 5], "name": "measured peak"})
        [1, {'x': [0, [1, 2, 5]]}, []]
        >>> between(["as written"] * 2, ["as written"] * 2 + ["--bf16"]), between([1], [1])
        ([2, 2, 0, ['--bf16']], None)
    """
    if _are_same(one, other):
        return None
    made: list[Any] = [0, other]
    if isinstance(one, dict) and isinstance(other, dict):
        differing = {name: each for name, each in other.items() if name not in one or not _are_same(one[name], each)}
        changed = {name: between(one[name], each) if name in one else [0, each] for name, each in differing.items()}
        made = [1, changed, [name for name in one if name not in other]]
    elif isinstance(one, list) and isinstance(other, list):
        made = _of_lists(one, other)
    return made if _size(made) < _size([0, other]) else [0, other]


def _of_lists(one: list[Any], other: list[Any]) -> list[Any]:
    if len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [3, {number: between(*pair) for number, pair in pairs if not _are_same(*pair)}]
    least = min(len(one), len(other))
    start = next((at for at in range(least) if not _are_same(one[at], other[at])), least)
    end = next((at for at in range(least - start) if not _are_same(one[-1 - at], other[-1 - at])), least - start)
    return [2, start, len(one) - start - end, other[start : len(other) - end]]


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON, where True is not 1."""
    return one == other and _size(one) == _size(other)


def _size(value: Any) -> int:
    return len(json.dumps(value))
