"""Containers of state: what counts as a change."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from memlab.runtime.containers import Array, Mapping


def test_an_array_is_compared_by_its_bits() -> None:
    values = np.array([np.nan, 1.0])
    container = Array(values, lambda _key: "values")
    before = container.read()
    assert list(container.effects(before)) == []
    values[1] = 2.0
    (effect,) = container.effects(before)
    assert (effect.name, effect.kind) == ("values", "written")
    container.fill(before)
    assert np.array_equal(values, [np.nan, 1.0], equal_nan=True)


class Guarded(OrderedDict[str, int]):
    """A table whose owner acts on whoever looks something up, as an engine's parameters do."""

    def __getitem__(self, key: str) -> int:
        raise IndexError(key)


def test_a_table_is_read_and_filled_past_its_own_lookup() -> None:
    table = Guarded(one=1, two=2)
    container = Mapping(table)
    before = container.read()
    table["one"] = 3
    del table["two"]
    assert {effect.name for effect in container.effects(before)} == {"one", "two"}
    container.fill(before)
    assert [*table.items()] == [("one", 1), ("two", 2)]
