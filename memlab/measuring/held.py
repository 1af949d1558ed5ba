"""`Walk`: the tensors that variables hold, by the places they are held in.

A place is what one writes to come to it (``trainer.history``); items of a container have one place together. Nothing of the user's runs:
attributes, items and variables of functions are read past methods of their classes.
"""

from __future__ import annotations

import functools
import gc
import heapq
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from traceback import walk_tb
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from memlab.runtime.accelerator import is_accelerator
from memlab.runtime.callers import is_installed
from memlab.runtime.containers import PLAIN, content_of
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.loop_reading import variables_of
from memlab.runtime.reach import MODULE_HOOKS
from memlab.runtime.tree import tensors_in

_MOST_LOOKED_AT = 30_000
_MOST_ITEMS = 1_000  # of a container; of a longer one its newest stand for all
_NEWEST = 200
_DEEPEST = 12
_MOST_FUNCTIONS = 40_000
_FOLLOWED = 8  # tensors of a place that are to be there still at the next look
WITHIN = "[…]"  # an item of a container
_SKIPPED = frozenset(
    {"memlab", "IPython", "ipykernel", "traitlets", "tornado", "zmq", "asyncio", "threading", "logging"}
)
_SERIES: tuple[type[Any], ...] = (list, tuple, set, frozenset, deque)
_LEAVES = (*PLAIN, ModuleType, type, BuiltinFunctionType, CodeType, torch.Generator)
_OF_MODULES = frozenset(vars(nn.Module()))
_CACHE = type(functools.cache(print))


@dataclass
class Held:
    """What lies beneath a place."""

    tensors: float = 0
    size_bytes: float = 0
    graphs: float = 0  # tensors that have one
    length: int = 0  # functions in the largest graph of a tensor that is in no container
    oldest: int = 0  # number of the oldest one of these
    first: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # some of the tensors


class Walk:
    """Counts the tensors beneath names, each once, for all places on the way to it."""

    def __init__(self, device: torch.device) -> None:
        self.held: dict[str, Held] = {}
        self.files: list[str] = []  # of the user's functions that were met
        self._device = device
        self._seen: set[int] = set()
        self._storages: set[int] = set()
        self._functions = 0  # of graphs, that were looked at
        # what is looked at stays alive for as long, so that no other object takes its number
        self._kept: list[Any] = []

    def run(self, roots: Iterable[tuple[str, Any]]) -> None:
        # an object, the places on the way to it, and how many it stands for; the shortest way to each comes first
        waiting: deque[tuple[Any, tuple[str, ...], float]] = deque((value, (name,), 1.0) for name, value in roots)
        while waiting and len(self._seen) < _MOST_LOOKED_AT:
            value, way, share = waiting.popleft()
            kind = type(value)
            if issubclass(kind, torch.Tensor):
                self._count(value, way, share)
            elif not issubclass(kind, _LEAVES) and id(value) not in self._seen and len(way) < _DEEPEST:
                self._seen.add(id(value))
                self._kept.append(value)
                names = _names(value)
                for place, inner, scale in self._within(value, way[-1]):
                    further = way if place == way[-1] else (place,) if place in names else (*way, place)
                    waiting.append((inner, further, share * scale))
        self._kept.clear()

    def _count(self, tensor: torch.Tensor, way: tuple[str, ...], share: float) -> None:
        if isinstance(tensor, LazyTensor):  # to look at it would compute it
            for inner in tensor.holds:
                self._count(inner, way, share)
            return
        if tensor.device != self._device and tensor.device.type == self._device.type and is_accelerator(tensor.device):
            return
        if tensor.device.type != self._device.type:
            return
        try:
            storage = tensor.untyped_storage()
            key, size_bytes = storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):  # none, or one without memory
            key, size_bytes = id(tensor), 0
            self._kept.append(tensor)
        size_bytes *= key not in self._storages
        self._storages.add(key)
        node = tensor.grad_fn
        length, oldest = (0, 0) if node is None or WITHIN in way[-1] else self._extent(node)
        for place in way:
            held = self.held.setdefault(place, Held())
            held.tensors += share
            held.size_bytes += share * size_bytes
            held.graphs += share * (node is not None)
            if length > held.length:
                held.length, held.oldest = length, oldest
            if len(held.first) < _FOLLOWED:
                held.first.append(weakref.ref(tensor))

    def _extent(self, node: Any) -> tuple[int, int]:
        """Return how many functions a graph has, and the number of the oldest one; the oldest are looked at first."""
        found, waiting = {node}, [(node._sequence_nr(), 0, node)]
        oldest = waiting[0][0]
        while waiting and self._functions < _MOST_FUNCTIONS:
            number, _, each = heapq.heappop(waiting)
            self._functions += 1
            oldest = min(oldest, number)
            for inner, _ in each.next_functions:
                if inner is not None and inner not in found:
                    found.add(inner)
                    heapq.heappush(waiting, (inner._sequence_nr(), len(found), inner))
        return len(found), oldest

    def _within(self, value: Any, place: str) -> Iterator[tuple[str, Any, float]]:
        """Yield what an object holds: the place of each, and how many it stands for."""
        kind = type(value)
        if str(kind.__module__).partition(".")[0] in _SKIPPED or issubclass(kind, torch.optim.Optimizer):
            return
        if issubclass(kind, nn.Module):
            yield from self._within_module(value, place)
        elif issubclass(kind, dict):
            items = list(dict.items(value))
            named = len(items) <= _MOST_ITEMS // 10
            for key, inner in _newest(items):
                yield (f"{place}[{key!r}]" if named and type(key) is str else place + WITHIN), inner, _scale(items)
            yield from _attributes(value, place)
        elif issubclass(kind, _SERIES):
            # past an `__iter__` of the user's
            items = list(next(base for base in _SERIES if issubclass(kind, base)).__iter__(value))
            if issubclass(kind, deque) and value.maxlen is not None:
                return
            yield from ((place + WITHIN, inner, _scale(items)) for inner in _newest(items))
        elif issubclass(kind, (FunctionType, MethodType, functools.partial)):
            yield from self._within_function(value, place)
        elif issubclass(kind, BaseException):
            for name, each in (("__context__", value.__context__), ("__cause__", value.__cause__)):
                yield f"{place}.{name}", each, 1
            for frame, _ in walk_tb(value.__traceback__):
                if not is_installed(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
                    yield f"{place}.__traceback__", tuple(variables_of(frame).values()), 1
            yield from _attributes(value, place)
        elif issubclass(kind, GeneratorType):
            if value.gi_frame is not None:
                yield place, tuple(variables_of(value.gi_frame).values()), 1
        elif kind.__dictoffset__ and not issubclass(kind, _CACHE):
            yield from _attributes(value, place)
        else:  # of C
            yield from ((place, inner, 1) for inner in gc.get_referents(value) if not issubclass(type(inner), _LEAVES))

    def _within_module(self, module: nn.Module, place: str) -> Iterator[tuple[str, Any, float]]:
        for name, inner in list(module._modules.items()):
            yield (f"{place}[{name}]" if name.isdigit() else f"{place}.{name}"), inner, 1
        for name, inner in list(vars(module).items()):
            if name not in _OF_MODULES:
                yield f"{place}.{name}", inner, 1
            elif name in MODULE_HOOKS and inner:
                yield f"{place}.{name}", list(inner.values()), 1
            elif name in ("_parameters", "_buffers"):
                yield from ((f"{place}.{key}", tensor, 1) for key, tensor in list(inner.items()))

    def _within_function(self, value: Any, place: str) -> Iterator[tuple[str, Any, float]]:
        if type(value) is MethodType:
            owner = value.__self__
            yield type(owner).__name__, owner, 1
            value = value.__func__
        if isinstance(value, functools.partial):
            yield place, (value.func, value.args, value.keywords), 1
        if type(value) is not FunctionType or is_installed(value.__code__.co_filename):
            return
        self.files.append(value.__code__.co_filename)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield name, content_of(cell), 1
        for name in value.__code__.co_names:
            if name in value.__globals__ and not name.startswith("_"):
                yield name, value.__globals__[name], 1
        yield place, (value.__defaults__, value.__kwdefaults__, vars(value)), 1


def _names(value: Any) -> tuple[str, ...]:
    """Return the names by which a function knows what it holds, which are no parts of its own."""
    owner: tuple[str, ...] = ()
    if type(value) is MethodType:
        owner, value = (type(value.__self__).__name__,), value.__func__
    code = value.__code__ if type(value) is FunctionType else None
    return owner if code is None else (*owner, *code.co_freevars, *code.co_names)


def _attributes(value: Any, place: str) -> Iterator[tuple[str, Any, float]]:
    if type(value).__dictoffset__:
        # past a `__getattribute__` of the user's
        attributes = list(object.__getattribute__(value, "__dict__").items())
        yield from ((f"{place}.{name}", inner, _scale(attributes)) for name, inner in _newest(attributes))


def _newest(items: list[Any]) -> list[Any]:
    return items if len(items) <= _MOST_ITEMS else items[-_NEWEST:]


def _scale(items: list[Any]) -> float:
    return 1 if len(items) <= _MOST_ITEMS else len(items) / _NEWEST


def bytes_in_graph(value: Any) -> int:
    """Return bytes that the graphs of tensors in a result keep for a backward pass, without those of parameters."""
    waiting = [each.grad_fn for each in tensors_in(value) if each.grad_fn is not None]
    sizes: dict[int, int] = {}
    parameters: set[int] = set()
    seen = set(waiting)
    while waiting and len(seen) < _MOST_FUNCTIONS:
        node = waiting.pop()
        for name in dir(node):
            saved = _saved(node, name) if name.startswith("_saved_") else None
            if isinstance(saved, torch.Tensor):
                storage = saved.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        if (variable := getattr(node, "variable", None)) is not None:
            parameters.add(variable.untyped_storage()._cdata)
        further = {inner for inner, _ in node.next_functions if inner is not None} - seen
        seen |= further
        waiting += further
    return sum(size_bytes for key, size_bytes in sizes.items() if key not in parameters)


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:  # the backward pass has freed it
        return None
