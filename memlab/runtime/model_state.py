"""State that a model, or a part of one, reads beside its inputs and parameters, so that it can be run again as it was.

Rules:

1. State is whatever the part's modules, and objects among its arguments, can reach (`reach`), and the random states of torch,
   Python and NumPy. Objects of torch's and memlab's own machinery are left alone: those of an engine hold gathered
   parameters for a moment only.
2. It is remembered by reference before a run. Running again puts the references back first, and afterwards what was
   there meanwhile. So counters count once, a cache is filled once, and an attribute keeps the tensor it got in the first run.
3. Tensors that a run writes to are copied beforehand: small ones always, since some operators write to running statistics
   without a trace, and those that the part has been seen to write to. Any others are watched. Running again writes to a copy.
4. A tensor with a graph is remembered without it; else steps would hold each other's graphs.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.runtime.reach import ABSENT, SMALL_BYTES, ModuleHooks, Walk, attributes_of_class, content_of
from memlab.runtime.rng import Randomness

# containers that are looked into
_OF_A_MODEL, _OF_A_PART = 20_000, 300
_StandIns = dict["KeptTensor", torch.Tensor]
# what every module has; `training` is state, as a loop may switch modes between forward and backward
_OF_EVERY_MODULE = (frozenset(vars(nn.Module())) - {"training"}) | {"forward", "__getstate__", "_compiled_call_impl"}
_COPIED = (torch.Tensor, FakeTensor)


class Written:
    """Tensors that a part has been seen to write to."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._by_id[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        found = self._by_id.get(id(tensor))
        return found is not None and found() is tensor


class KeptTensor:
    """A tensor of the state, as it is before a run.

    Args:
        tensor: as modules refer to it.
        copied: whether its values are kept beside it.
    """

    __slots__ = ("__weakref__", "_copy", "_held", "_seen", "_version")

    def __init__(self, tensor: torch.Tensor, *, copied: bool) -> None:
        self._seen = weakref.ref(tensor)
        self._held = tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)
        self._copy: torch.Tensor | None = None
        self._version = tensor._version
        if copied:
            self.copy()

    @property
    def storage_key(self) -> int:
        return int(self._held.untyped_storage()._cdata)

    @property
    def is_copied(self) -> bool:
        return self._copy is not None

    def copy(self) -> torch.Tensor | None:
        """Keep its values; returns the tensor that modules refer to."""
        if self._copy is None:
            self._copy = self._held.detach().clone()
        return self._seen()

    def as_it_was(self, *, with_graph: bool = False) -> torch.Tensor:
        """It, or a copy that may be written to.

        Args:
            with_graph: with the graph it has; whoever asks has kept it.
        """
        if self._copy is None:
            seen = self.seen if with_graph else None
            return self._held if seen is None else seen
        return self._copy.requires_grad_(self._held.requires_grad).clone()

    @property
    def original(self) -> torch.Tensor:
        """The tensor that modules refer to; without its graph where nobody holds that any more."""
        seen = self.seen
        return self._held if seen is None else seen

    @property
    def is_written(self) -> bool:
        """Whether it has been written to since."""
        return self._held._version != self._version

    def write_back(self) -> None:
        """Give it the values it had, unnoticed by a graph that has saved it: what a run writes, its backward does not read."""
        if self._copy is not None:
            self._held.data.copy_(self._copy)

    @property
    def seen(self) -> torch.Tensor | None:
        """The tensor that modules refer to."""
        return self._seen()


@dataclass
class Repetition:
    """A run under the state of an earlier one.

    Args:
        counts: its state is the one to go on with, instead of that of the earlier run.
    """

    counts: bool = False


class State(Walk):
    """The state before a run.

    Args:
        modules: of the part.
        objects: among its arguments, other than tensors.
        written: tensors known to be written to.
        device: whose random numbers are drawn, beside the CPU's.
        most_containers: how many are looked into.

    Attributes:
        random: states of all generators.
    """

    attributes_left_alone = _OF_EVERY_MODULE

    def __init__(
        self,
        modules: Iterable[nn.Module],
        objects: Iterable[Any],
        written: Written,
        device: torch.device,
        most_containers: int = _OF_A_PART,
    ) -> None:
        super().__init__()
        self.most_containers = most_containers
        self._written = written
        self._contents: list[_Content] = []
        self._tensors: dict[int, KeptTensor] = {}
        self._generators: list[Any] = []
        for module in modules:
            self.module("", module)
            self._contents.append(_Parameters(module._parameters))
        for value in objects:
            self.look_at(value, "", 0)
        for content in self._contents:
            content.hold(self._tensors)
        self._tensors_kept = list(self._tensors.values())
        self._tensors.clear()
        self._seen.clear()
        self.random = Randomness(device, self._generators)

    @classmethod
    def of_model(
        cls, model: nn.Module, device: torch.device, objects: Iterable[Any] = (), written: Written | None = None
    ) -> State:
        """Return the state of a whole model, which is looked into further than a part that is run at every step."""
        return cls(model.modules(), objects, Written() if written is None else written, device, _OF_A_MODEL)

    @property
    def tensors(self) -> Sequence[KeptTensor]:
        """Return those that modules and arguments refer to."""
        return self._tensors_kept

    @contextmanager
    def again(self, *, with_graphs: bool = False) -> Iterator[Repetition]:
        """Context in which the state is as it was; afterwards it is what it has become since.

        Args:
            with_graphs: tensors have the graphs they had, for a run that is to be derived through.
        """
        repetition = Repetition()
        now = [content.taken_again() for content in self._contents]
        random_now = self.random.taken_again()
        stand_ins = {kept: kept.as_it_was(with_graph=with_graphs) for kept in self._tensors_kept}
        try:
            for content in self._contents:
                content.put_back(stand_ins)
            self.random.restore()
            yield repetition
        finally:
            if repetition.counts:
                self._put_originals(stand_ins)
            else:
                random_now.restore()
                for content in reversed(now):
                    content.put_back({})

    def restore(self) -> None:
        """Put everything back, values of tensors included, for good."""
        originals = {kept: kept.original for kept in self._tensors_kept}
        for content in self._contents:
            content.put_back(originals)
        for kept in self._tensors_kept:
            kept.write_back()
        self.random.restore()

    def learn(self) -> None:
        """Note which tensors have been written to since, so that the next state keeps copies of them."""
        for kept in self._tensors_kept:
            if kept.is_written:
                self._written.add(kept.original)

    def _put_originals(self, stand_ins: _StandIns) -> None:
        """In place of copies, the tensors they were made of, which the first run has written to."""
        originals = {id(copy): kept.seen for kept, copy in stand_ins.items() if kept.is_copied}
        for content in self._contents:
            now = content.taken_again()
            now.exchange(originals)
            now.put_back({})

    # -- what the walk meets ---------------------------------------------------------------------------

    def met_mapping(
        self, values: MutableMapping[Any, Any], name: Callable[[Any], str], skipped: Collection[str]
    ) -> None:
        self._contents.append(_Attributes(values) if skipped else _Mapping(values))

    def met_hooks(self, attributes: dict[str, Any]) -> None:
        self._contents.append(_Hooks(attributes))

    def met_sequence(self, values: list[Any] | deque[Any], name: str) -> None:
        self._contents.append(_Sequence(values))

    def met_set(self, values: set[Any], name: str) -> None:
        self._contents.append(_Set(values))

    def met_names(self, world: dict[str, Any], names: Collection[str]) -> None:
        self._contents.append(_Names(world, names))

    def met_class(self, kind: type) -> None:
        self._contents.append(_ClassAttributes(kind))

    def met_cell(self, cell: CellType, name: str) -> None:
        self._contents.append(_Cell(cell))

    def met_array(self, array: Any, name: str) -> None:
        self._contents.append(_Array(array))

    def met_generator(self, generator: Any) -> None:
        self._generators.append(generator)

    def met_tensor(self, tensor: torch.Tensor, name: str) -> None:
        if id(tensor) in self._tensors or isinstance(tensor, nn.Parameter) or type(tensor) not in _COPIED:
            return
        if tensor.layout is not torch.strided or tensor.is_inference():
            return
        is_small = tensor.grad_fn is None and tensor.numel() * tensor.element_size() <= SMALL_BYTES
        self._tensors[id(tensor)] = KeptTensor(tensor, copied=is_small or tensor in self._written)


# --- containers -------------------------------------------------------------------------------------


class _Content(ABC):
    """Content of a container at a moment."""

    def __init__(self, container: Any, items: Any) -> None:
        self.container = container
        self._items: Any = items

    def hold(self, tensors: dict[int, KeptTensor]) -> None:
        """Hold tensors as they are kept, not those with their graphs."""
        if tensors:
            self._items = {key: _held(value, tensors) for key, value in self._items.items()}

    def exchange(self, others: dict[int, Any]) -> None:
        """Hold others in place of some values, by number."""
        self._items = {key: others.get(id(value), value) for key, value in self._items.items()}

    def taken_again(self) -> _Content:
        """Return what the same container holds now."""
        return type(self)(self.container)  # type: ignore[call-arg]

    @abstractmethod
    def put_back(self, stand_ins: _StandIns) -> None:
        """Have the container hold it again, with other tensors in place of some."""


class _Mapping(_Content):
    def __init__(self, container: MutableMapping[Any, Any]) -> None:
        super().__init__(container, dict(container))

    def put_back(self, stand_ins: _StandIns) -> None:
        items = {key: _instead(value, stand_ins) for key, value in self._items.items()}
        if not _same_items(self.container, items):
            self.container.clear()
            self.container.update(items)


class _Attributes(_Content):
    """A module's own attributes."""

    def __init__(self, container: MutableMapping[str, Any]) -> None:
        super().__init__(container, {name: container[name] for name in container.keys() - _OF_EVERY_MODULE})

    def put_back(self, stand_ins: _StandIns) -> None:
        for name in [name for name in self.container if name not in _OF_EVERY_MODULE and name not in self._items]:
            del self.container[name]
        for name, value in self._items.items():
            wanted = _instead(value, stand_ins)
            if name not in self.container or self.container[name] is not wanted:
                self.container[name] = wanted


class _Hooks(_Content):
    """A module's hooks."""

    def __init__(self, container: dict[str, Any]) -> None:
        super().__init__(container, {})
        self._hooks = ModuleHooks(container)

    def put_back(self, stand_ins: _StandIns) -> None:
        self._hooks.restore()


class _Some(_Content):
    """Some items of a mapping, of which others are left alone."""

    def put_back(self, stand_ins: _StandIns) -> None:
        now = self._now()
        for name, value in self._items.items():
            wanted = _instead(value, stand_ins)
            if now.get(name, ABSENT) is not wanted:
                self._write(name, wanted)

    @abstractmethod
    def _now(self) -> dict[Any, Any]:
        """Return what is there now."""

    @abstractmethod
    def _write(self, name: Any, value: Any) -> None:
        """Put a value there; ABSENT takes it away."""


class _Names(_Some):
    """Some of the globals of a file."""

    def __init__(self, container: dict[str, Any], names: Collection[str]) -> None:
        super().__init__(container, {name: container.get(name, ABSENT) for name in names})

    def taken_again(self) -> _Content:
        return _Names(self.container, self._items.keys())

    def _now(self) -> dict[Any, Any]:
        return {name: self.container.get(name, ABSENT) for name in self._items}

    def _write(self, name: Any, value: Any) -> None:
        if value is ABSENT:
            self.container.pop(name, None)
        else:
            self.container[name] = value


class _ClassAttributes(_Some):
    def __init__(self, container: type) -> None:
        super().__init__(container, attributes_of_class(container))

    def put_back(self, stand_ins: _StandIns) -> None:
        for name in [name for name in self._now() if name not in self._items]:
            delattr(self.container, name)
        super().put_back(stand_ins)

    def _now(self) -> dict[Any, Any]:
        return attributes_of_class(self.container)

    def _write(self, name: Any, value: Any) -> None:
        setattr(self.container, name, value)


class _Cell(_Some):
    """A variable of a closure."""

    def __init__(self, container: CellType) -> None:
        super().__init__(container, {0: content_of(container)})

    def _now(self) -> dict[Any, Any]:
        return {0: content_of(self.container)}

    def _write(self, name: Any, value: Any) -> None:
        if value is ABSENT:
            del self.container.cell_contents
        else:
            self.container.cell_contents = value


class _Array(_Content):
    """Values of an array of NumPy's."""

    def __init__(self, container: Any) -> None:
        super().__init__(container, container.copy())

    def hold(self, tensors: dict[int, KeptTensor]) -> None:
        pass

    def exchange(self, others: dict[int, Any]) -> None:
        pass

    def put_back(self, stand_ins: _StandIns) -> None:
        if self.container.flags.writeable:
            self.container[...] = self._items


class _Parameters(_Content):
    """A module's parameters: others for the length of a call, under `torch.func.functional_call`."""

    def __init__(self, container: dict[str, Any]) -> None:
        super().__init__(container, dict(container))

    def put_back(self, stand_ins: _StandIns) -> None:
        for name, value in self._items.items():
            now = self.container.get(name)
            # an engine that shards parameters changes them by itself
            if now is not value and "DTensor" not in (type(now).__name__, type(value).__name__):
                self.container[name] = value


class _Sequence(_Content):
    def __init__(self, container: list[Any] | deque[Any]) -> None:
        super().__init__(container, list(container))

    def hold(self, tensors: dict[int, KeptTensor]) -> None:
        self._items = [_held(value, tensors) for value in self._items]

    def exchange(self, others: dict[int, Any]) -> None:
        self._items = [others.get(id(value), value) for value in self._items]

    def put_back(self, stand_ins: _StandIns) -> None:
        items = [_instead(value, stand_ins) for value in self._items]
        if len(items) != len(self.container) or any(a is not b for a, b in zip(items, self.container, strict=True)):
            self.container.clear()
            self.container.extend(items)


class _Set(_Content):
    def __init__(self, container: set[Any]) -> None:
        super().__init__(container, set(container))

    def hold(self, tensors: dict[int, KeptTensor]) -> None:
        pass  # tensors in sets stay what they are

    def exchange(self, others: dict[int, Any]) -> None:
        pass

    def put_back(self, stand_ins: _StandIns) -> None:
        if self.container != self._items:
            self.container.clear()
            self.container.update(self._items)


def _held(value: Any, tensors: dict[int, KeptTensor]) -> Any:
    if type(value) is tuple:
        held = tuple(_held(item, tensors) for item in value)
        return value if all(a is b for a, b in zip(held, value, strict=True)) else held
    return tensors.get(id(value), value) if isinstance(value, torch.Tensor) else value


def _instead(value: Any, stand_ins: _StandIns) -> Any:
    if type(value) is KeptTensor:
        return stand_ins[value]
    if type(value) is tuple and any(type(item) in (KeptTensor, tuple) for item in value):
        return tuple(_instead(item, stand_ins) for item in value)
    return value


def _same_items(container: MutableMapping[Any, Any], items: dict[Any, Any]) -> bool:
    return len(container) == len(items) and all(
        key is other and value is items[key] for (key, value), other in zip(container.items(), items, strict=True)
    )
