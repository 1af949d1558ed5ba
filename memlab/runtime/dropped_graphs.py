"""`free_dropped_graphs`: frees graphs of model calls that only memlab holds, to run parts of them again.

A graph holds the `State` from which a part is run again; the state holds the lists, dicts and objects that the part was given; a
model may have collected in them what came later, with its graph. Where no backward pass frees the graph, this circle
leads through torch's C++, where Python's garbage collector does not see it. What is collected in objects that nothing else
refers to is taken out of them: nobody can miss it, and the state puts back what the part needs. Other objects in context
variables, which no code of the part reads, are not looked into.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memlab.runtime.containers import Container, Mapping, Sequence, SetMembers, Slots

# states that graphs hold, with other records of the same run and how many calls they have outlived
_held: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], list[int]]] = weakref.WeakKeyDictionary()


def held_by_graph(state: Any, *records: Any) -> None:
    """Note that a graph is about to hold a `State`, and lists and tuples of the same run that refer to objects of the loop."""
    _held[state] = records, [0]


def free_dropped_graphs() -> None:
    """Free graphs that only their own states hold."""
    if not _held:
        return
    # other threads may add to it meanwhile
    entries = [(s, _held[s]) for reference in _held.keyrefs() if (s := reference()) is not None and s in _held]
    collecting: list[Container] = []
    for state, (_, calls) in entries:
        calls[0] += 1
        # what a loop holds for long is looked at ever more rarely: after 1, 2, 4, 8 calls
        if not calls[0] & (calls[0] - 1):
            collecting += [each for each, _ in state.contents if _has_collected(each)]
    if not collecting:
        return
    records: list[Any] = []
    for state, (of_run, _) in entries:
        records += [*of_run, *itertools.chain.from_iterable(state.contents)]
    unreachable = _only_held_by(records, _referred_to_by(records))
    for container in collecting:
        if id(_object(container)) in unreachable:
            container.fill({key: _without(value) for key, value in container.read().items() if not _has_graph(value)})


def _object(container: Container) -> Any:
    """Return what a container belongs to; None where that is not to be told."""
    if type(container) in (Mapping, Sequence, SetMembers):
        return container.held.owner if isinstance(container.held, Slots) else container.held
    return None


def _referred_to_by(records: Iterable[Any]) -> list[Any]:
    found = {id(each): each for record in records for each in gc.get_referents(record) if gc.is_tracked(each)}
    slots = [each.owner for each in found.values() if isinstance(each, Slots)]
    found.update((id(each), each) for each in slots)
    return [each for each in found.values() if not isinstance(each, (torch.Tensor, nn.Module, type))]


def _only_held_by(records: list[Any], objects: list[Any]) -> set[int]:
    """Return the ids of the objects to which nothing refers but the records and each other; the way Python's own collector counts."""
    places = {id(each): place for place, each in enumerate(objects)}
    (least,) = [sys.getrefcount(each) for each in [object()]]
    counts = [sys.getrefcount(each) - least for each in objects]
    for each in (*records, *objects):
        for referent in gc.get_referents(each):
            if (place := places.get(id(referent))) is not None:
                counts[place] -= 1
    reached = {place for place, count in enumerate(counts) if count > 0}
    ahead = [*reached]
    while ahead:
        for referent in gc.get_referents(objects[ahead.pop()]):
            place = places.get(id(referent))
            if place is not None and place not in reached:
                reached.add(place)
                ahead.append(place)
    return {id(each) for place, each in enumerate(objects) if place not in reached}


def _has_collected(container: Container) -> bool:
    if _object(container) is None:
        return False
    return any(_has_graph(value) or _without(value) is not value for value in container.read().values())


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _without(value: Any) -> Any:
    """The members of a set or tuple without those that have a graph."""
    if type(value) in (tuple, frozenset) and any(map(_has_graph, value)):
        return type(value)(each for each in value if not _has_graph(each))
    return value
