"""Which tests run by default, and which only in the full tier (`pytest -m full`).

A test is of the full tier when it is marked `full`. One that is marked `few` runs a covering array of its parameters by
default, so that every value of every parameter occurs, and its other cases in the full tier; `few(n)` runs n cases, and
`few(n, full=m)` no more than m in the full tier. With `MEMLAB_LONG=1` that runs all others, also of `few(0, full=0)`.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Values = Mapping[str, Hashable]


def mark_full(items: list[pytest.Item]) -> None:
    """Mark the cases of `few` tests that do not run by default, and take out those that run in no tier."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") is not None and item.get_closest_marker("full") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for same in cases.values():
        marker = same[0].get_closest_marker("few")
        assert marker is not None
        values = [_values(item) for item in same]
        kept = set(covering(values, *marker.args))
        most = len(same) if os.environ.get("MEMLAB_LONG") else marker.kwargs.get("full", len(same))
        # of one parameter some from its beginning to its end
        spread = [number * len(same) // most for number in range(most)]
        in_full = {*kept, *(spread if len(values[0]) == 1 else covering(values, most))}
        for number, item in enumerate(same):
            if number not in kept:
                item.add_marker(pytest.mark.full)
            if number not in in_full:
                left_out.add(item)
    items[:] = [item for item in items if item not in left_out]


def covering(cases: Sequence[Values], count: int | None = None) -> list[int]:
    """Numbers of the cases in which every value of every parameter occurs, and as many pairs of values as will.

    Args:
        cases: values by parameter.
        count: how many to take; None for as few as cover all values.

    Example:
        >>> cases = [{"model": m, "plan": p, "steps": s} for m in "abc" for p in "xyz" for s in (1, 2)]
        >>> covering(cases)
        [0, 9, 16]
        >>> len(covering(cases, 9)), covering(cases, 1)
        (9, [0])
    """
    left = list(range(len(cases)))
    seen: set[tuple[tuple[str, Hashable], ...]] = set()
    taken: list[int] = []
    values = {(value,) for case in cases for value in case.items()}
    while left and (len(taken) < count if count is not None else not values <= seen):
        best = max(left, key=lambda number: (_new(cases[number], 1, seen), _new(cases[number], 2, seen), -number))
        left.remove(best)
        taken.append(best)
        for size in (1, 2):
            seen.update(itertools.combinations(sorted(cases[best].items()), size))
    return sorted(taken)


def _new(case: Values, size: int, seen: set[tuple[tuple[str, Hashable], ...]]) -> int:
    """How many values, or pairs of them, have not been seen."""
    return sum(each not in seen for each in itertools.combinations(sorted(case.items()), size))


def _values(item: pytest.Item) -> Values:
    """What a case is made of; values that are no plain ones are the same where they are the same object."""
    spec = getattr(item, "callspec", None)
    values = spec.params.items() if spec is not None else ()
    return {name: value if isinstance(value, str | int | float) else id(value) for name, value in values}


def mostly_full(values: Iterable[Any], *default: Any) -> list[Any]:
    """Values of a parameter, of which only some run by default."""
    return [pytest.param(value, marks=() if value in default else pytest.mark.full) for value in values]
