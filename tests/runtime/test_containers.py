"""Containers of state: what counts as a change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from memlab.runtime.containers import Array, ClassAttributes, Mapping
from memlab.runtime.model_state import State
from memlab.runtime.surroundings import Surroundings


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


class Feed:
    """What a thread of the loop's fills, and a mean that the model reads of it."""

    mean = 1.0
    batches: ClassVar[list[int]] = []
    made = 0


class Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * Feed.mean


@pytest.mark.parametrize("kind", [Surroundings, lambda model: State.of_model(model, torch.device("cpu"))])
def test_of_a_class_what_the_model_does_not_name_is_left_alone(kind: Callable[[nn.Module], Any]) -> None:
    seen = kind(Reads())
    classes = [container for container, _ in seen.contents if isinstance(container, ClassAttributes)]
    assert [container.read() for container in classes if container.held is Feed] == [{"mean": 1.0}]
    assert not any(container.held is Feed.batches for container, _ in seen.contents)
