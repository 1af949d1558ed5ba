"""State that a model's forward can change or leave behind beside its output, and restoring it.

Numbered rules:

1. Looked at is what the model can reach (`reach`), and small frozen parameters.
2. A `Snapshot` knows how all of it was. `effects` lists what has changed since, by name; `restore` puts it back.
3. A tensor that is written in place is seen by its version, or by its values where it is known to change: writes through `.data`
   and those of BatchNorm leave the version alone. Copies are kept of small tensors that are no parameters, and of whatever was
   seen to change before.
4. Hooks that a forward registers are no effects: functions cannot be compared. They are put back with the rest, and are those of its
   first run again once its effects are written (`register`).
5. Generators of random numbers among it are `Snapshot.generators`, and are put back by who runs the forward (`rng`).
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.runtime.reach import (
    ABSENT,
    LIBRARIES,
    PLAIN,
    SMALL_BYTES,
    ModuleHooks,
    Walk,
    attributes_of_class,
    content_of,
)

_FIELD = "accumulation"
KEEP_WHOLE = "use --checkpoint or --offload activations, which keep the batch whole"
# frozen parameters up to this size are looked at: codebooks, running statistics kept as parameters
_SMALL_PARAMETER_BYTES = 8 * 1024**2


@dataclass(frozen=True)
class Effect:
    """One thing a forward has changed.

    Args:
        name: how one writes the place.
        kind: "set" for a place that holds another value, "appended" for new items of a list, "written" for a tensor or array
            that was changed in place.
        before: what was there; None for new items.
        value: what is there now: the new value, the list of new items, or a copy of the tensor.
        write: puts a value there.
    """

    name: str
    kind: str
    before: Any
    value: Any
    write: Callable[[Any], None]


class Snapshot(Walk):
    """Everything beside the outputs that a model's forward may change, as it is now.

    Args:
        model: the model.
        changing: names of tensors that are known to change, copies of which are kept whatever their size.
        complete: keep copies of all tensors.
        without_buffers_of: kinds of modules whose buffers are left alone.
        buffers_alone: look at nothing but buffers.

    Attributes:
        generators: of random numbers, which the forward may draw from.
    """

    most_containers = 20_000
    left_alone = LIBRARIES
    attributes_left_alone = frozenset(
        {
            "_parameters", "_modules", "_buffers", "training", "forward", "__getstate__", "_compiled_call_impl", "_is_full_backward_hook",
            # recurrent layers list their weights there, which stand-ins replace
            "_flat_weights", "_flat_weight_refs",
            # the whole program hangs on these
            "_trainer", "_fabric", "trainer", "fabric", *(name for name in vars(nn.Module()) if "hook" in name),
            "_non_persistent_buffers_set",
        }
    )  # fmt: skip

    def __init__(
        self,
        model: nn.Module,
        changing: Collection[str] = (),
        *,
        complete: bool = False,
        without_buffers_of: type | tuple[type, ...] = (),
        buffers_alone: bool = False,
    ) -> None:
        super().__init__()
        self._changing = changing
        self._complete = complete
        self._nodes: list[_Node] = []
        self._tensors: list[_Tensor] = []
        self._hooks: list[ModuleHooks] = []
        self._registered: list[ModuleHooks] = []  # as the first run that changed them left them
        self.generators: list[Any] = []
        for path, module in model.named_modules():
            if buffers_alone:
                self.buffers(path, module)
                continue
            self.module(path, module, buffers=not isinstance(module, without_buffers_of))
            for name, parameter in module._parameters.items():
                if (
                    parameter is not None
                    and not parameter.requires_grad
                    and _bytes_of(parameter) <= _SMALL_PARAMETER_BYTES
                ):
                    self.met_tensor(parameter, f"parameter {path}.{name}" if path else f"parameter {name}")

    def effects(self) -> dict[str, Effect]:
        """Return what has changed since, by name."""
        found: dict[str, Effect] = {}
        for node in self._nodes:
            for effect in node.effects():
                found[effect.name] = effect
        for tensor in self._tensors:
            if tensor.is_changed():
                found[tensor.name] = Effect(tensor.name, "written", tensor.before, tensor.copy(), tensor.write)
        return found

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Everything is as it was within, and again as it is now afterwards."""
        now = self.effects()
        for tensor in self._tensors:
            if tensor.before is None:
                now.pop(tensor.name, None)
        hooks = [ModuleHooks(each.attributes) for each in self._hooks]
        self.restore(strict=False)
        try:
            yield
        finally:
            self.restore(strict=False)
            for effect in now.values():
                effect.write(effect.value)
            for each in hooks:
                each.restore()

    def restore(self, *, strict: bool = True) -> None:
        """Put everything back as it was.

        Args:
            strict: else tensors of which there is no copy stay as they are.

        Raises:
            RefusalError: a large tensor was changed of which there is no copy.
        """
        for node in self._nodes:
            node.restore()
        changed = [each for each in self._hooks if each.are_changed]
        self._registered = self._registered or [ModuleHooks(each.attributes) for each in changed]
        for each in changed:
            each.restore()
        for tensor in self._tensors:
            if tensor.is_changed():
                if tensor.before is None:
                    if not strict:
                        continue
                    raise RefusalError(
                        _FIELD, f"the forward pass has begun to change {tensor.name} in place", KEEP_WHOLE
                    )
                tensor.write(tensor.before)
                tensor.look_again()

    def register(self) -> None:
        """Have the hooks again that the first run has left, which `restore` took away."""
        for each in self._registered:
            each.restore()

    # -- what the walk meets ---------------------------------------------------------------------------

    def met_hooks(self, attributes: dict[str, Any]) -> None:
        self._hooks.append(ModuleHooks(attributes))

    def met_mapping(
        self, values: MutableMapping[Any, Any], name: Callable[[Any], str], skipped: Collection[str]
    ) -> None:
        self._nodes.append(_Dict(values, name, skipped))

    def met_sequence(self, values: list[Any] | deque[Any], name: str) -> None:
        self._nodes.append(_List(values, name))

    def met_set(self, values: set[Any], name: str) -> None:
        self._nodes.append(_Set(values, name))

    def met_names(self, world: dict[str, Any], names: Collection[str]) -> None:
        self._nodes.append(_Names(world, names))

    def met_class(self, kind: type) -> None:
        self._nodes.append(_Class(kind))

    def met_cell(self, cell: types.CellType, name: str) -> None:
        self._nodes.append(_Cell(cell, name))

    def met_array(self, array: Any, name: str) -> None:
        self._tensors.append(_Array(name, array))

    def met_generator(self, generator: Any) -> None:
        self.generators.append(generator)

    def met_tensor(self, tensor: torch.Tensor, name: str) -> None:
        if self._is_new(tensor) and not tensor.is_inference() and not isinstance(tensor, FakeTensor):
            compares = self._complete or name in self._changing
            # frozen parameters are many, and seldom written to: of those a copy is kept that have been
            keep = compares or (_bytes_of(tensor) <= SMALL_BYTES and not isinstance(tensor, nn.Parameter))
            self._tensors.append(_Tensor(name, tensor, keep=keep, compares=compares))


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


class _Node(ABC):
    """A container as it was."""

    @abstractmethod
    def effects(self) -> Iterator[Effect]:
        """Yield what has changed in it since."""

    def restore(self) -> None:
        for effect in [*self.effects()]:
            effect.write(effect.before)


class _Dict(_Node):
    def __init__(self, values: MutableMapping[Any, Any], name: Callable[[Any], str], skipped: Collection[str]) -> None:
        self._values, self._name, self._skipped = values, name, skipped
        self._before = dict(values)

    def effects(self) -> Iterator[Effect]:
        now, before = self._values, self._before
        for key in [key for key, value in now.items() if not _same(before.get(key, ABSENT), value)]:
            if key not in self._skipped:
                yield self._effect(key, before.get(key, ABSENT), now[key])
        if len(now) < len(before) or before.keys() - now.keys():
            for key in [key for key in before if key not in now and key not in self._skipped]:
                yield self._effect(key, before[key], ABSENT)

    def _effect(self, key: Any, before: Any, value: Any) -> Effect:
        return Effect(self._name(key), "set", before, value, functools.partial(self._write, key))

    def _write(self, key: Any, value: Any) -> None:
        if value is ABSENT:
            self._values.pop(key, None)
        else:
            self._values[key] = value


class _Names(_Dict):
    """Some of a module's globals."""

    def __init__(self, world: dict[str, Any], names: Collection[str]) -> None:
        super().__init__(world, str, ())
        self._before = {name: world[name] for name in names}

    def effects(self) -> Iterator[Effect]:
        for key, before in self._before.items():
            now = self._values.get(key, ABSENT)
            if not _same(before, now):
                yield self._effect(key, before, now)


class _Class(_Node):
    """Attributes of a class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._before = attributes_of_class(kind)

    def effects(self) -> Iterator[Effect]:
        now = attributes_of_class(self._kind)
        for name in {**self._before, **now}:
            before, value = self._before.get(name, ABSENT), now.get(name, ABSENT)
            if not _same(before, value):
                yield Effect(
                    f"{self._kind.__name__}.{name}", "set", before, value, functools.partial(self._write, name)
                )

    def _write(self, name: str, value: Any) -> None:
        if value is ABSENT:
            delattr(self._kind, name)
        else:
            setattr(self._kind, name, value)


class _Cell(_Node):
    def __init__(self, cell: types.CellType, name: str) -> None:
        self._cell, self._name = cell, name
        self._before = content_of(cell)

    def effects(self) -> Iterator[Effect]:
        now = content_of(self._cell)
        if not _same(self._before, now):
            yield Effect(self._name, "set", self._before, now, self._write)

    def _write(self, value: Any) -> None:
        if value is ABSENT:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = value


class _List(_Node):
    def __init__(self, values: list[Any] | deque[Any], name: str) -> None:
        self._values, self._name = values, name
        self._before = list(values)

    def effects(self) -> Iterator[Effect]:
        count = len(self._before)
        is_prefix = len(self._values) >= count and all(map(_same, self._before, self._values))
        if not is_prefix:
            yield Effect(self._name, "set", self._before, list(self._values), self._replace)
        elif len(self._values) > count:
            yield Effect(self._name, "appended", None, list(self._values)[count:], self._values.extend)

    def restore(self) -> None:
        if any(True for _ in self.effects()):
            self._replace(self._before)

    def _replace(self, values: list[Any]) -> None:
        self._values.clear()
        self._values.extend(values)


class _Set(_Node):
    def __init__(self, values: set[Any], name: str) -> None:
        self._values, self._name = values, name
        self._before = frozenset(values)

    def effects(self) -> Iterator[Effect]:
        if self._values != self._before:
            yield Effect(self._name, "set", self._before, frozenset(self._values), self._replace)

    def _replace(self, values: frozenset[Any]) -> None:
        self._values.clear()
        self._values.update(values)


class _Tensor:
    """A tensor that may be written in place."""

    def __init__(self, name: str, tensor: torch.Tensor, *, keep: bool, compares: bool) -> None:
        self.name = name
        self._tensor = tensor
        self._version = tensor._version
        self._compares = compares
        self.before: Any = self.copy() if keep else None

    def is_changed(self) -> bool:
        if self._tensor._version != self._version:
            return True
        return self._compares and not _same_values(self._tensor.detach(), self.before)

    def look_again(self) -> None:
        self._version = self._tensor._version

    def copy(self) -> Any:
        return self._tensor.detach().clone()

    def write(self, value: Any) -> None:
        with torch.no_grad():
            self._tensor.detach().copy_(value)


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(torch.equal(one, other) or ((one == other) | (one.isnan() & other.isnan())).all())


class _Array(_Tensor):
    """A NumPy array; it has no version, so its values are compared."""

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self._array = array
        self.before = array.copy()

    def is_changed(self) -> bool:
        return bool((self._array != self.before).any())

    def look_again(self) -> None:
        pass

    def copy(self) -> Any:
        return self._array.copy()

    def write(self, value: Any) -> None:
        self._array[...] = value
