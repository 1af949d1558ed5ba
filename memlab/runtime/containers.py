"""Containers that hold state: each kind is read, compared and filled in one way, for whoever puts back what it held."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import gc
import io
import operator
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.runtime.stand_ins import StandIn

# stands for what is not there
ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "nothing"})()
_RAW = (
    bytearray,
    array.array,
    ctypes.c_int.__mro__[-2],
    io.StringIO,
    io.BytesIO,
)  # the third is the base of all of ctypes
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)

Items = dict[Any, Any]


def is_unreadable(value: Any) -> bool:
    """Return whether a value has state that cannot be put back: an iterator of C or of torch's, raw memory."""
    if isinstance(value, contextvars.ContextVar):
        try:
            value.get()
        except LookupError:
            return True  # nothing takes a value away again
    if isinstance(value, _RAW):
        return True
    # files are iterators as well, of whose lines a forward reads none
    is_iterator = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
    return is_iterator and (not hasattr(value, "__dict__") or type(value).__module__.partition(".")[0] == "torch")


@dataclass(frozen=True)
class Effect:
    """One thing a forward has changed."""

    name: str  # how one writes the place
    # "set" for a place that holds another value, "appended" for new items of a list, "written" for a tensor or array
    # that was changed in place
    kind: str
    before: Any  # what was there; None for new items
    value: Any  # what is there now: the new value, the list of new items, or a copy of the tensor
    write: Callable[[Any], None]  # puts a value there


class Container(ABC):
    """Something that holds values under keys."""

    def __init__(self, held: Any, name: Callable[[Any], str] = str) -> None:
        self.held = held  # the container itself
        self.name = name  # how one writes the place of a key

    @abstractmethod
    def read(self) -> Items:
        """Return what it holds now, by key."""

    @abstractmethod
    def write(self, key: Any, value: Any) -> None:
        """Put a value under a key; ABSENT takes away what is there."""

    def glance(self) -> Any:
        """Return what `is_as` compares with."""
        return None

    def is_as(self, glance: Any) -> bool:
        """Return whether it is seen at once that nothing has changed since; what is not seen so may still be the same."""
        return False

    def fill(self, items: Items) -> None:
        """Have it hold these and nothing else; nothing is written that is so already."""
        now = self.read()
        for key in [key for key in now if key not in items]:
            self.write(key, ABSENT)
        for key, value in items.items():
            if now.get(key, ABSENT) is not value:
                self.write(key, value)

    def effects(self, before: Items) -> Iterator[Effect]:
        """Yield what is another than before; equal numbers and texts are the same."""
        now = self.read()
        for key, value in now.items():
            was = before.get(key, ABSENT)
            if not _same(was, value):
                yield Effect(self.name(key), "set", was, value, functools.partial(self.write, key))
        for key in before.keys() - now.keys():
            yield Effect(self.name(key), "set", before[key], ABSENT, functools.partial(self.write, key))


class Mapping(Container):
    """A dictionary, or attributes of a module or an object; keys that are `skipped` are left alone."""

    def __init__(
        self,
        held: MutableMapping[Any, Any],
        name: Callable[[Any], str] = str,
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(held, name)
        self._skipped = skipped

    def read(self) -> Items:
        # past the `__getitem__` of a class of the user's, or of an engine's
        held = self.held
        if self._skipped:
            # attributes of modules: most have the same names, and few of them are looked at
            return {
                key: value for key in _others(tuple(held), self._skipped) if not isinstance(value := held[key], StandIn)
            }
        return {key: value for key, value in held.items() if not isinstance(value, StandIn)}

    def glance(self) -> Any:
        return [*self.held], [*self.held.values()]

    def is_as(self, glance: Any) -> bool:
        keys, values = glance
        same = len(keys) == len(self.held) and all(map(operator.is_, self.held, keys))
        return same and all(map(operator.is_, self.held.values(), values))

    def write(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            self.held.pop(key, None)
        else:
            self.held[key] = value

    def fill(self, items: Items) -> None:
        if self._skipped:
            # a plan that has come or gone meanwhile sees to what stands in for methods
            super().fill({key: value for key, value in items.items() if not isinstance(self.held.get(key), StandIn)})
            return
        now = list(self.held.items())
        if len(now) != len(items) or any(
            key is not other or value is not wanted
            for (key, value), (other, wanted) in zip(now, items.items(), strict=True)
        ):
            # in the order in which they were
            self.held.clear()
            self.held.update(items)


class BesideParameters(Mapping):
    """State of a loop's optimizer, without that of parameters, which updates alone change."""

    def read(self) -> Items:
        return {key: value for key, value in self.held.items() if not isinstance(key, torch.Tensor)}

    def is_as(self, glance: Any) -> bool:
        return False

    def fill(self, items: Items) -> None:
        Container.fill(self, items)


class Variable(Container):
    """A context variable that has a value; a backward pass may come when it has none any more."""

    def read(self) -> Items:
        try:
            return {None: self.held.get()}
        except LookupError:
            return {}

    def write(self, key: Any, value: Any) -> None:
        if value is not ABSENT:
            token = self.held.set(value)
            self._unset = token if token.old_value is contextvars.Token.MISSING else None
        elif self._unset is not None:
            self.held.reset(self._unset)
            self._unset = None

    _unset: contextvars.Token[Any] | None = None  # takes the value away again


class ParameterGradients(Container):
    """Gradients of parameters that a forward trains by itself."""

    def read(self) -> Items:
        return {place: parameter.grad for place, parameter in enumerate(self.held)}

    def write(self, key: Any, value: Any) -> None:
        self.held[key].grad = None if value is ABSENT else value


@functools.lru_cache(maxsize=1024)
def _others(keys: tuple[str, ...], skipped: frozenset[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in skipped)


class _Compared(Container):
    """A container that holds little: what it held is compared."""

    def glance(self) -> Any:
        return self.read()

    def is_as(self, glance: Any) -> bool:
        now = self.read()
        return now.keys() == glance.keys() and all(now[key] is value for key, value in glance.items())


class _Tables(_Compared):
    """Dictionaries of several modules that mostly stay empty, as one: they are looked at for each call."""

    def write(self, key: Any, value: Any) -> None:
        *place, name = key
        table = self.table(*place)
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value

    @abstractmethod
    def table(self, *place: str) -> dict[str, Any]:
        """Return one of them."""


class ParameterAttributes(_Tables):
    """Attributes of parameters, as libraries keep them there: a gradient for each row, a count of calls.

    `held` has the parameters of each module, by its path.
    """

    def read(self) -> Items:
        return {
            (path, name, key): value
            for path, parameters in self.held.items()
            for name, parameter in parameters.items()
            if parameter is not None and (attributes := vars(parameter)) and "ds_id" not in attributes  # an engine's
            for key, value in attributes.items()
            # torch's compiler notes there what it has seen, and a plan how copies and pickles are made
            if not key.startswith(("_dynamo_", "__"))
        }

    def table(self, *place: str) -> dict[str, Any]:
        path, name = place
        attributes: dict[str, Any] = vars(self.held[path][name])
        return attributes


class NewBuffers(_Tables):
    """Buffers of modules that had none; `held` has the dictionary of each, by its path."""

    def read(self) -> Items:
        return {(path, key): value for path, table in self.held.items() if table for key, value in table.items()}

    def table(self, *place: str) -> dict[str, Any]:
        (path,) = place
        return self.held[path]  # type: ignore[no-any-return]


class FrozenValues(_Compared):
    """Values of a module's frozen parameters, where a forward may put integers: layers that quantise themselves in their first call do.

    Values of another floating-point dtype, or elsewhere, are none of a forward's doing, but of a plan's.
    """

    def __init__(self, held: MutableMapping[str, Any], name: Callable[[Any], str] = str) -> None:
        super().__init__(held, name)
        self._known: dict[str, torch.Tensor] = {}  # the same objects as long as nothing has changed

    def read(self) -> Items:
        for key, parameter in self.held.items():
            if parameter is None or parameter.requires_grad:
                continue
            known = self._known.get(key)
            if known is None or known.is_floating_point() != parameter.is_floating_point():
                self._known[key] = parameter.data
        return dict(self._known)

    def write(self, key: Any, value: Any) -> None:
        if value is not ABSENT:
            self.held[key].data = self._known[key] = value


class Names(Mapping):
    """Some of the globals of a file."""

    def __init__(self, held: dict[str, Any], names: Collection[str]) -> None:
        super().__init__(held)
        self._names = names

    def read(self) -> Items:
        return {name: self.held.get(name, ABSENT) for name in self._names}

    def glance(self) -> Any:
        return [*self.read().values()]

    def is_as(self, glance: Any) -> bool:
        return all(map(operator.is_, self.read().values(), glance))

    def fill(self, items: Items) -> None:
        Container.fill(self, items)


class ClassAttributes(Container):
    """Attributes of a class that code may set: some, or all but Python's own."""

    def __init__(self, held: type, names: Collection[str] | None = None) -> None:
        super().__init__(held, lambda name: f"{held.__name__}.{name}")
        self._names = names

    def read(self) -> Items:
        if self._names is not None:
            return {name: value for name in self._names if (value := vars(self.held).get(name, ABSENT)) is not ABSENT}
        return {name: value for name, value in vars(self.held).items() if not name.startswith("__")}

    def write(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            delattr(self.held, key)
        else:
            setattr(self.held, key, value)


class Cell(Container):
    """A variable of a closure."""

    def read(self) -> Items:
        return {0: content_of(self.held)}

    def write(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            del self.held.cell_contents
        else:
            self.held.cell_contents = value


class Sequence(Container):
    """A list, by place."""

    def read(self) -> Items:
        return dict(enumerate(self.held))

    def write(self, key: Any, value: Any) -> None:
        """Put all of a list there."""
        self.held.clear()
        self.held.extend(value)

    def fill(self, items: Items) -> None:
        if len(items) != len(self.held) or any(a is not b for a, b in zip(items.values(), self.held, strict=True)):
            self.write(None, items.values())

    def effects(self, before: Items) -> Iterator[Effect]:
        count = len(before)
        if len(self.held) < count or not all(map(_same, before.values(), self.held)):
            write = functools.partial(self.write, None)
            yield Effect(self.name(None), "set", [*before.values()], [*self.held], write)
        elif len(self.held) > count:
            yield Effect(self.name(None), "appended", None, [*self.held][count:], self.held.extend)


class _Whole(Container):
    """A container whose content is one value."""

    def fill(self, items: Items) -> None:
        if self._differs(items[0]):
            self.write(0, items[0])

    def effects(self, before: Items) -> Iterator[Effect]:
        if self._differs(before[0]):
            write = functools.partial(self.write, 0)
            yield Effect(self.name(0), self.kind, before[0], self.read()[0], write)

    kind: str

    @abstractmethod
    def _differs(self, content: Any) -> bool:
        """Return whether it holds something else."""


class SetMembers(_Whole):
    """Members of a set."""

    kind = "set"

    def read(self) -> Items:
        return {0: frozenset(self.held)}

    def write(self, key: Any, value: Any) -> None:
        self.held.clear()
        self.held.update(value)

    def _differs(self, content: Any) -> bool:
        return bool(self.held != content)


class Array(_Whole):
    """Values of an array of NumPy's; it has no version, so they are compared, by their bits: NaN is equal to itself."""

    kind = "written"

    def read(self) -> Items:
        return {0: self.held.copy()}

    def write(self, key: Any, value: Any) -> None:
        if self.held.flags.writeable:
            self.held[...] = value

    def _differs(self, content: Any) -> bool:
        return bool(self.held.tobytes() != content.tobytes())


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


def content_of(cell: types.CellType) -> Any:
    """Return what a cell holds; ABSENT before it holds anything."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class Slots(MutableMapping[str, Any]):
    """Attributes of an object that its classes list in `__slots__`, as a mapping that writes through."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._places = _slots_of(type(owner))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._places[name].__get__(self.owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._places[name].__set__(self.owner, value)

    def __delitem__(self, name: str) -> None:
        self._places[name].__delete__(self.owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._places if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._places)


def _slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    # by descriptors, past a `__setattr__` that forbids to write
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


def caches_of(function: Any) -> list[dict[Any, Any]]:
    """Return what a function under `functools.lru_cache` remembers, which has no other name.

    Example:
        >>> @functools.cache
        ... def square(number):
        ...     return number**2
        >>> square(3), caches_of(square)
        (9, [{3: 9}])
    """
    return [each for each in gc.get_referents(function) if type(each) is dict and each is not vars(function)]
