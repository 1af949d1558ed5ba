"""Taking values apart into leaves, and putting them together again: whatever a model gets or returns.

Beside what torch's pytrees know (dicts, lists, tuples, named tuples, outputs of Transformers), these are opened: subclasses of
dicts, lists and tuples, dataclasses, other objects that hold tensors, packed sequences (as padded rows and lengths), and nested
tensors of torch's jagged layout (as lengths and values).
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

# how deep objects are opened; the caches of transformers within a model output need four
_DEPTH = 6


@dataclass(frozen=True)
class Structure:
    """Structure of a value without its leaves."""

    kind: type | None = None  # its type; None for a leaf
    keys: tuple[str, ...] = ()  # of the children, as text
    children: tuple[Structure, ...] = ()  # their structures
    # children to value
    build: Callable[[list[Any]], Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def children_by_name(self) -> dict[str, Structure]:
        """Structures of a dict's values, by its keys."""
        return {ast.literal_eval(key[1:-1]): child for key, child in zip(self.keys, self.children, strict=True)}

    def put(self, leaves: Sequence[Any]) -> Any:
        """The value with these leaves, in order."""
        rest = list(reversed(leaves))
        value = self._put(rest)
        assert not rest
        return value

    def _put(self, rest: list[Any]) -> Any:
        if self.build is None:
            return rest.pop()
        return self.build([child._put(rest) for child in self.children])

    def names(self) -> list[str]:
        """Return for each leaf how one writes its way down from the value.

        Example:
            >>> flatten({"a": [1, 2]})[1].names()
            ["['a'][0]", "['a'][1]"]
        """
        if self.build is None:
            return [""]
        return [key + rest for key, child in zip(self.keys, self.children, strict=True) for rest in child.names()]


LEAF = Structure()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in a nest of mappings, lists and tuples, in order."""
    found, waiting = [], [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            waiting += value[::-1]
        elif isinstance(value, (dict, Mapping)):  # a dict is told much faster than a mapping
            waiting += [*value.values()][::-1]
    return found


def own_attributes(value: Any) -> dict[str, Any]:
    """Return attributes that somebody has hung on a tensor.

    Left out is what torch's compiler and subclasses of torch's and memlab's hang there, and answers to Python's own protocols.

    Example:
        >>> tensor = torch.zeros(2)
        >>> tensor.mask = None
        >>> own_attributes(tensor)
        {'mask': None}
    """
    kind = type(value)
    is_plain = kind in (torch.Tensor, nn.Parameter) or not kind.__module__.startswith(("torch.", "memlab."))
    if not (is_plain and isinstance(value, torch.Tensor)):
        return {}
    return {name: hung for name, hung in vars(value).items() if not name.startswith(("_dynamo_", "__"))}


def in_leaves(change: Callable[[Any], Any], value: Any, *, of_tensors: bool = True) -> Any:
    """A value with other leaves; the value itself where none is another one, and so for each object within.

    Args:
        change: leaf to leaf; a tensor that is there several times is changed once.
        value: whatever a model returns.
        of_tensors: change what hangs on its tensors as well.
    """
    return _in_leaves(change, value, {}, of_tensors=of_tensors, depth=_DEPTH)


def _in_leaves(
    change: Callable[[Any], Any], value: Any, changed: dict[int, Any], *, of_tensors: bool, depth: int
) -> Any:
    parts = None if depth == 0 else _parts(value)
    if parts is None:
        if not isinstance(value, torch.Tensor):
            return change(value)
        if id(value) not in changed:
            made = changed[id(value)] = change(value)
            for name, hung in own_attributes(value).items() if of_tensors else ():
                setattr(made, name, in_leaves(change, hung, of_tensors=False))
        return changed[id(value)]
    _, children, build = parts
    made = [_in_leaves(change, child, changed, of_tensors=of_tensors, depth=depth - 1) for child in children]
    return build(made) if any(one is not other for one, other in zip(made, children, strict=True)) else value


class Lent:
    """Arguments of a call with other leaves, within a `with` block. What the call does to its arguments is done to the caller's in the end.

    Example:
        >>> def double(leaf):
        ...     return leaf.double() if isinstance(leaf, torch.Tensor) else leaf
        >>> seen = [torch.ones(1)]
        >>> with Lent(double, lambda leaf: leaf) as lent:
        ...     lent.lend(seen).append(torch.zeros(1))
        >>> [tensor.dtype for tensor in seen]
        [torch.float32, torch.float32]
    """

    def __init__(self, change: Callable[[Any], Any], back: Callable[[Any], Any]) -> None:
        self._change = change  # leaf to leaf
        self._back = back  # leaf to leaf, of what the call has put into its arguments
        self._containers: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []
        # by id: of the caller's tensor; and this one, of what was lent in its place
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor, int, dict[str, Any]]] = {}
        self._owners: dict[int, torch.Tensor] = {}
        self._objects: list[tuple[Any, dict[int, tuple[Any, Any]]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._give_back()
        for value, own in self._objects:
            for write, item in _places(value):
                is_own = id(item) in own
                was = own[id(item)][1] if is_own else in_leaves(self._back, item)
                if was is not item:
                    write(was)

    def lend(self, value: Any) -> Any:
        """Return what the call is given in place of a value."""
        node = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
        if isinstance(value, torch.Tensor):
            return self._lend_tensor(value)
        if node is not None and isinstance(value, (tuple, list, dict)):
            children, context = node.flatten_fn(value)
            changed = [self.lend(child) for child in children]
            is_other = any(one is not other for one, other in zip(changed, children, strict=True))
            made = node.unflatten_fn(changed, context) if is_other else value
            if isinstance(value, (MutableMapping, MutableSequence)):
                self._containers.append((value, made, list(zip(changed, children, strict=True))))
            return made
        if not torch.is_grad_enabled() and _is_opened(value):
            # the object itself, which the caller may know by what the call leaves in it: a cache of keys and values; with
            # gradients, parts that are computed again in the backward pass would find it given back
            own: dict[int, tuple[Any, Any]] = {}
            self._objects.append((value, own))
            for write, item in _places(value):
                made = self.lend(item)
                own[id(made)] = made, item
                if made is not item:
                    write(made)
            return value
        return self._change(value)

    def own(self, leaf: Any) -> Any:
        """Return what the caller has given, for a tensor that was lent in its place."""
        return self._owners.get(id(leaf), leaf)

    def _lend_tensor(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) in self._tensors:  # models tell by identity that they are given one tensor several times
            return self._tensors[id(value)][1]
        made: torch.Tensor = self._change(value)
        if type(made) is torch.Tensor and not made.is_inference():
            for name, hung in own_attributes(value).items() if made is not value else ():
                setattr(made, name, hung)
            self._tensors[id(value)] = value, made, made._version, own_attributes(made)
            self._owners[id(made)] = value
        return made

    def _give_back(self) -> None:
        for tensor, made, version, before in self._tensors.values():
            for name, hung in own_attributes(made).items():
                if name not in before or before[name] is not hung:
                    setattr(tensor, name, in_leaves(self._back, hung))
            if made._version != version and made.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
                tensor.copy_(self._back(made))
        for value, made, pairs in self._containers:
            now = _items(made)
            if len(now) == len(pairs) and all(one is other for (_, one), (other, _) in zip(now, pairs, strict=True)):
                continue
            own = {id(one): other for one, other in pairs}
            items = [(k, own[id(v)] if id(v) in own else in_leaves(self._back, v)) for k, v in now]
            value.clear()
            value.update(items) if isinstance(value, MutableMapping) else value.extend(item for _, item in items)


def _is_opened(value: Any) -> bool:
    """Return whether a value is an object that holds tensors, other than a module or code."""
    return (
        not isinstance(value, (str, bytes, type, nn.Module, ModuleType, torch.optim.Optimizer))
        and not callable(value)
        and holds_tensors(value)
    )


def _places(value: Any, depth: int = _DEPTH) -> list[tuple[Callable[[Any], None], Any]]:
    """Yield the places where an object holds tensors and tuples, in objects, lists and dicts within as well: how to write there, and what is there."""
    found: list[tuple[Callable[[Any], None], Any]] = []
    places = [
        *((partial(operator.setitem, value, key), item) for key, item in _items(value)),
        *((partial(object.__setattr__, value, name), item) for name, item in attributes(value).items()),
    ]
    for write, item in places:
        if isinstance(item, (torch.Tensor, tuple)):
            found.append((write, item))
        elif depth > 1 and _is_opened(item):
            found += _places(item, depth - 1)
    return found


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, MutableMapping):
        return list(container.items())
    return list(enumerate(container)) if isinstance(container, MutableSequence) else []


def flatten(value: Any, is_leaf: Callable[[Any], bool] = lambda _value: False) -> tuple[list[Any], Structure]:
    """Leaves of a value in order, and its structure.

    Example:
        >>> leaves, structure = flatten({"x": (1, [2])})
        >>> leaves, structure.put([10, 20])
        ([1, 2], {'x': (10, [20])})
    """
    leaves: list[Any] = []
    return leaves, _structure(value, leaves, _DEPTH, is_leaf)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph, and without what a class of the user's does in its methods."""
    values = torch.Tensor.detach(tensor)
    return torch.Tensor.as_subclass(values, torch.Tensor) if is_plain(tensor) else values


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is what its numbers are: those of a class with operators of its own may be quantised, or nowhere."""
    return type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def holds_tensors(value: Any, depth: int = 3) -> bool:
    """Return whether a tensor is in a value that `flatten` does not know from torch."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (nn.Module, type, ModuleType, str, torch.optim.Optimizer)) or callable(value):
        return False
    return any(holds_tensors(item, depth - 1) for item in _contents(value))


def runs_later(value: Any) -> bool:
    """Return whether a value is code, or what yields others: it may give anything when it is used."""
    return callable(value) or hasattr(value, "__next__")


def _contents(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    else:
        items = []
    return [*items[:64], *attributes(value).values()]


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, with those of `__slots__` and the fields of a dataclass."""
    names = [*getattr(value, "__dict__", ())]
    names += [
        name
        for kind in type(value).__mro__
        for name in _names(vars(kind).get("__slots__", ()))
        if not name.startswith("__") and name not in names
    ]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names += [field.name for field in dataclasses.fields(value) if field.name not in names]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _structure(value: Any, leaves: list[Any], depth: int, is_leaf: Callable[[Any], bool]) -> Structure:
    parts = None if depth == 0 or is_leaf(value) else _parts(value)
    if parts is None:
        leaves.append(value)
        return LEAF
    keys, children, build = parts
    structures = tuple(_structure(child, leaves, depth - 1, is_leaf) for child in children)
    return Structure(type(value), tuple(keys), structures, build)


_Parts = tuple[list[str], list[Any], Callable[[list[Any]], Any]]


def _parts(value: Any) -> _Parts | None:
    if isinstance(value, torch.Tensor):
        return _jagged(value) if value.layout is torch.jagged else None
    if isinstance(value, PackedSequence):
        return _packed(value)
    if isinstance(value, MappingProxyType):
        names = [*value]
        return (
            _keys(value, len(names)),
            [*value.values()],
            lambda items: MappingProxyType(dict(zip(names, items, strict=True))),
        )
    if isinstance(value, torch.Size):
        return _keys(value, len(value)), list(value), torch.Size
    kind = _pytree._get_node_type(value)
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return (
            _registered_keys(node, value, len(children)),
            list(children),
            lambda items: node.unflatten_fn(items, context),
        )
    if not _is_opened(value):
        return None
    if isinstance(value, tuple):
        return _keys(value, len(value)), list(value), lambda items: tuple.__new__(type(value), items)
    return _opened(value)


def _registered_keys(node: Any, value: Any, count: int) -> list[str]:
    """Name the children of a kind that is registered: what iterating it gives, nobody but its library knows (the rows of a TensorDict)."""
    if node.flatten_with_keys_fn is None or isinstance(value, (dict, list, tuple)):
        return _keys(value, count)
    return [str(key) for key, _ in node.flatten_with_keys_fn(value)[0]]


def _keys(value: Any, count: int) -> list[str]:
    if isinstance(value, (dict, MappingProxyType)):
        return [f"[{key!r}]" for key in value][:count]
    fields = getattr(value, "_fields", None)
    return [f".{name}" for name in fields] if fields else [f"[{place}]" for place in range(count)]


def _opened(value: Any) -> _Parts:
    """An object: its items, if it is a dict or list of a kind of its own, and its attributes."""
    shell = _shell(value)
    if isinstance(value, dict):
        places: list[Any] = list(value)
    elif isinstance(value, list):
        places = list(range(len(value)))
    else:
        places = []
    # numbers and sizes as well: they may be those of the rows
    held = [
        (name, item)
        for name, item in attributes(value).items()
        if type(item) in (bool, int, float, torch.Size) or holds_tensors(item, _DEPTH)
    ]
    # past what a class of the user's does when it is read
    items = [
        dict.__getitem__(value, place) if isinstance(value, dict) else list.__getitem__(value, place)
        for place in places
    ]
    for place in places if _has_items(shell) else ():  # so that the shell keeps no tensor
        shell[place] = None
    for name, _ in held:
        object.__setattr__(shell, name, None)

    def build(children: list[Any]) -> Any:
        made = _shell(shell)
        if isinstance(made, list) and not _has_items(made):
            list.extend(made, children[: len(places)])
        else:
            for place, child in zip(places, children, strict=False):
                made[place] = child
        for name, child in zip(names, children[len(places) :], strict=True):
            object.__setattr__(made, name, child)
        return made

    names = [name for name, _ in held]
    keys = [*(f"[{place!r}]" for place in places), *(f".{name}" for name in names)]
    children = [*items, *(item for _, item in held)]
    return keys, children, build


def _shell(value: Any) -> Any:
    """Return an object of the same class with the same attributes and without items, past what its class does when it is copied."""
    kind = type(value)
    base: Any = next((each for each in (dict, list) if isinstance(value, each)), object)
    try:
        made = base.__new__(kind)
    except TypeError:  # a kind that C code makes (OrderedDict, deque): with its items
        return copy.copy(value)
    own = getattr(value, "__dict__", {})
    getattr(made, "__dict__", {}).update(own)
    for name, item in attributes(value).items():
        if name not in own:  # in a slot
            object.__setattr__(made, name, item)
    return made


def _has_items(value: Any) -> bool:
    if isinstance(value, dict):
        return dict.__len__(value) > 0
    return isinstance(value, list) and list.__len__(value) > 0


def _packed(value: PackedSequence) -> _Parts:
    rows, lengths = pad_packed_sequence(value, batch_first=True)
    is_sorted = value.sorted_indices is None

    def build(children: list[Any]) -> Any:
        return pack_padded_sequence(children[0], children[1], batch_first=True, enforce_sorted=is_sorted)

    return [".data", ".lengths"], [rows, lengths], build


# torch takes the lengths of two nested tensors for the same where they have one tensor of offsets
_offsets = WeakIdKeyDictionary()


def _jagged(value: Any) -> _Parts | None:
    if value.lengths() is not None or value._ragged_idx != 1:  # with holes, or transposed
        return None
    _offsets[value.offsets()] = None

    def build(children: list[Any]) -> Any:
        lengths, values = children
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        known = (each for each in _offsets if each.device == offsets.device and torch.equal(each, offsets))
        return torch.nested.nested_tensor_from_jagged(values, next(known, offsets))

    return [".lengths", ".values"], [value.offsets().diff(), value.values()], build
