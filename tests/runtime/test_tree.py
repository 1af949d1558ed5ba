"""Values taken apart, lent and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from time import process_time
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from memlab.runtime.tree import Lent, flatten


def _lent(tensors: list[torch.Tensor]) -> None:
    with Lent(torch.Tensor.double, torch.Tensor.float) as lent:
        assert [lent.own(tensor) for tensor in lent.lend(tensors)] == tensors


def _put(tensors: list[torch.Tensor]) -> None:
    leaves, structure = flatten(tensors)
    assert structure.put(leaves) == tensors


@pytest.mark.parametrize("work", [_lent, _put])
def test_its_time_grows_as_the_number_of_tensors(work: Callable[[list[torch.Tensor]], None]) -> None:
    def seconds(count: int) -> float:
        tensors = [torch.ones(1) for _ in range(count)]
        began = process_time()
        work(tensors)
        return process_time() - began

    few, many = (min(seconds(count) for _ in range(3)) for count in (500, 4000))
    assert many < 24 * few


class Rows(MutableMapping[str, torch.Tensor]):
    """A mapping that is iterated by its rows, as a TensorDict is."""

    def __init__(self, **parts: torch.Tensor) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("iteration over what has no rows")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.parts[name]

    def __setitem__(self, name: str, part: torch.Tensor) -> None:
        self.parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self.parts[name]

    def __len__(self) -> int:
        return len(self.parts)


@pytest.mark.parametrize("names", [["['x']", "['y']"], ["[0]", "[1]"]])
def test_children_of_a_registered_kind_are_named_without_iterating_it(names: list[str]) -> None:
    keys = _pytree.MappingKey if "x" in names[0] else None
    _pytree.register_pytree_node(
        Rows,
        lambda rows: ([*rows.parts.values()], [*rows.parts]),
        lambda parts, names: Rows(**dict(zip(names, parts, strict=True))),
        flatten_with_keys_fn=keys
        and (lambda rows: ([(keys(name), part) for name, part in rows.parts.items()], [*rows.parts])),
    )
    try:
        leaves, structure = flatten(Rows(x=torch.ones(2), y=torch.zeros(3)))
        assert structure.names() == names
        assert structure.put(leaves).parts.keys() == {"x", "y"}
    finally:
        _pytree.SUPPORTED_NODES.pop(Rows)
