"""`Conditions`: values beside tensors by which a forward may choose what it does, so that a call under others is judged again.

Numbered rules:

1. Looked at are plain values, functions and tensors of one number on the CPU: arguments of the call, and what the model's code
   reaches (attributes, configurations, globals and closures that it names). Of everything else the type counts; reading one
   number of a GPU would have the host wait for it.
2. Places to which the forward writes are left out: what they hold is accounted for by name.
3. So is a place that has held many values, such as the number of a step or an annealed weight: else every call would be
   judged. Of such calls the first, second, fourth, eighth, ... are. It is the same once there were many conditions, as
   where a dictionary of the loop's gets a key in every step.
"""

from __future__ import annotations

import enum
import functools
import numbers
import types
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from memlab.runtime.containers import PLAIN, Container, Items
from memlab.runtime.reach import MOST_ITEMS

# so many values of a place are told apart: numbers are seldom modes, and often count
_MOST_NUMBERS, _MOST_VALUES = 4, 8
_MOST_CONDITIONS = 64
_PLAIN_TYPES = frozenset(PLAIN) - {slice}  # cannot be hashed


class Conditions:
    """Values beside tensors that calls of one model depend on."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._varying: set[str] = set()
        self._seen: defaultdict[str, set[Hashable]] = defaultdict(set)  # by place
        # of the last call
        self._tokens: list[tuple[Hashable, ...]] = []
        self._places: dict[str, Hashable] = {}
        self._key = 0
        self._known: set[int] = set()  # keys of the conditions that are told apart
        self._variations = 0  # calls in which a place that holds many values held another one than before

    def leave_out(self, places: Collection[str]) -> None:
        """Look no more at places to which the forward writes."""
        self._written.update(places)
        self._key = self._key_of_places()

    def key(self, arguments: Mapping[str, Any], contents: Iterable[tuple[Container, Items]]) -> int:
        """Return a number that is the same for calls with the same arguments and contents of what the model reaches."""
        contents = [*contents]
        tokens = [_tokens(arguments.values()), *(_tokens(items.values()) for _, items in contents)]
        if tokens == self._tokens:
            return self._key
        before = self._tokens if len(tokens) == len(self._tokens) else [None] * len(tokens)
        if before is not self._tokens:
            self._places = {}
        changed: dict[str, Hashable] = {}
        for place, (now, last) in enumerate(zip(tokens, before, strict=True)):
            if now != last:
                changed.update(
                    zip(arguments, now, strict=False) if place == 0 else _by_place(*contents[place - 1], now)
                )
        self._tokens = tokens
        self._note(changed)
        return self._key

    def _note(self, changed: Mapping[str, Hashable]) -> None:
        others = {name: token for name, token in changed.items() if self._places.get(name, changed) != token}
        self._places.update(changed)
        for name, token in others.items():
            if name in self._written or name in self._varying:
                continue
            seen = self._seen[name]
            seen.add(token)
            if len(seen) > (_MOST_NUMBERS if isinstance(token, (int, float)) else _MOST_VALUES):
                self._varying.add(name)
                del self._seen[name]
        self._variations += any(name in self._varying and name not in self._written for name in others)
        self._key = self._key_of_places()

    def _key_of_places(self) -> int:
        left_out = self._written | self._varying
        places = tuple((name, token) for name, token in self._places.items() if name not in left_out)
        key = hash((places, self._variations.bit_length()))
        if key not in self._known and len(self._known) >= _MOST_CONDITIONS:
            self._variations += 1
            return hash(self._variations.bit_length())
        self._known.add(key)
        return key


def _by_place(container: Container, items: Items, tokens: tuple[Hashable, ...]) -> Iterable[tuple[str, Hashable]]:
    names = [container.name(key) for key in items] if len(tokens) == len(items) else []
    # lists are one place
    return zip(names, tokens, strict=True) if len({*names}) == len(tokens) else [(container.name(None), tokens)]


def _tokens(values: Collection[Any]) -> tuple[Hashable, ...]:
    if len(values) > MOST_ITEMS:  # what it holds was not looked into
        return (len(values),)
    return tuple([value if type(value) in _PLAIN_TYPES else _token(value) for value in values])


def _token(value: Any) -> Any:
    """Return what is compared of a value; nothing that would keep tensors alive."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if isinstance(value, torch.Tensor):
        return _number_in(value)
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, types.MethodType):
        return _token(value.__func__)
    if isinstance(value, functools.partial):
        return _token(value.func), _tokens(value.args), _tokens(value.keywords.values())
    if isinstance(value, tuple):
        return kind, _tokens(value)
    if isinstance(value, (enum.Enum, type, types.BuiltinFunctionType, numbers.Number)):
        return value
    return kind


def _number_in(tensor: torch.Tensor) -> Any:
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.requires_grad or tensor.numel() != 1:
        return torch.Tensor
    with suppress(RuntimeError):  # within transforms of functions a tensor may have no value
        number = tensor.item()
        return number if number == number else "nan"
    return torch.Tensor
