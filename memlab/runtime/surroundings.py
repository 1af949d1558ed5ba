"""State that a model's forward can change or leave behind beside its output, and restoring it.

Numbered rules:

1. Looked at are: buffers; attributes of modules, and what lists, dicts, sets and plain objects among them hold; small frozen
   parameters; what the user's hooks and forwards reach (closures, bound objects, arguments of partials, globals they name,
   attributes of the class). Objects of torch's and memlab's own machinery are left alone.
2. A `Snapshot` knows how all of it was. `effects` lists what has changed since, by name; `restore` puts it back.
3. A tensor that is written in place is seen by its version, or by its values where it is known to change: writes through `.data`
   and those of BatchNorm leave the version alone. Copies are kept of small tensors that are no parameters, and of whatever was
   seen to change before.
4. Generators of random numbers among it are `Snapshot.generators`, and are put back by who runs the forward (`rng`).
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.errors import RefusalError
from memlab.runtime.rng import is_generator

_FIELD = "accumulation"
KEEP_WHOLE = "use --checkpoint or --offload activations, which keep the batch whole"
# tensors up to this size are always copied, so that a change can be taken back
_SMALL_BYTES = 64 * 1024
# frozen parameters up to this size are looked at: codebooks, running statistics kept as parameters
_SMALL_PARAMETER_BYTES = 8 * 1024**2
_DEPTH = 4
_MOST_ITEMS = 256  # of a container that is looked into
_MOST_NODES = 20_000
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_non_persistent_buffers_set",
)  # fmt: skip
_NOT_STATE = frozenset(
    {
        "_parameters", "_modules", "_buffers", "training", "forward", "__getstate__", "_compiled_call_impl", "_is_full_backward_hook",
        # recurrent layers list their weights there, which stand-ins replace
        "_flat_weights", "_flat_weight_refs",
        # the whole program hangs on these
        "_trainer", "_fabric", "trainer", "fabric", *_HOOKS,
    }
)  # fmt: skip
_LIBRARIES = ("torch", "memlab", "transformers", "accelerate", "peft", "lightning", "numpy", "torchvision", "builtins")
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "nothing"})()


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


class Snapshot:
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

    def __init__(
        self,
        model: nn.Module,
        changing: Collection[str] = (),
        *,
        complete: bool = False,
        without_buffers_of: type | tuple[type, ...] = (),
        buffers_alone: bool = False,
    ) -> None:
        self._changing = changing
        self._without = without_buffers_of
        self._complete = complete
        self._seen: set[int] = set()
        self._nodes: list[_Node] = []
        self._tensors: list[_Tensor] = []
        self.generators: list[Any] = []
        classes: set[type] = set()
        for path, module in model.named_modules():
            if buffers_alone:
                self._add_buffers(path, module)
                continue
            self._add_module(path, module, is_new_class=type(module) not in classes)
            classes.add(type(module))

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
        self.restore(strict=False)
        try:
            yield
        finally:
            self.restore(strict=False)
            for effect in now.values():
                effect.write(effect.value)

    def restore(self, *, strict: bool = True) -> None:
        """Put everything back as it was.

        Args:
            strict: else tensors of which there is no copy stay as they are.

        Raises:
            RefusalError: a large tensor was changed of which there is no copy.
        """
        for node in self._nodes:
            node.restore()
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

    # -- looking around ------------------------------------------------------------------------

    def _add_buffers(self, path: str, module: nn.Module) -> None:
        self._add_dict(module._buffers, lambda key: f"buffer {path}.{key}" if path else f"buffer {key}", 1)

    def _add_module(self, path: str, module: nn.Module, *, is_new_class: bool) -> None:
        prefix = f"{path}." if path else ""
        self._add_dict(module.__dict__, lambda key: f"{prefix}{key}", 0, skipped=_NOT_STATE)
        if not isinstance(module, self._without):
            self._add_buffers(path, module)
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            if _bytes_of(parameter) <= _SMALL_PARAMETER_BYTES:
                self._add_tensor(f"parameter {prefix}{name}", parameter)
        where = path or type(module).__name__
        for hooks in (getattr(module, key) for key in _HOOKS[:4]):
            for hook in hooks.values():
                self._add_function(hook, f"a hook of {where}", 1)
        if is_new_class and not _is_of_library(type(module)):
            for name, member in vars(type(module)).items():
                if isinstance(member, types.FunctionType):
                    self._add_function(member, f"{type(module).__name__}.{name}", 1)
            self._nodes.append(_Class(type(module)))
            for name, member in vars(type(module)).items():
                if not name.startswith("__"):
                    self._add(member, f"{type(module).__name__}.{name}", 1)

    def _add(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, _PLAIN) or depth > _DEPTH or len(self._nodes) > _MOST_NODES:
            return
        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, dict):
            self._add_dict(value, lambda key: f"{name}[{key!r}]", depth)
        elif isinstance(value, (list, deque)):
            self._add_list(value, name, depth)
        elif isinstance(value, set):
            if self._is_new(value):
                self._nodes.append(_Set(value, name))
        elif isinstance(value, tuple):
            for place, item in enumerate(value[:_MOST_ITEMS]):
                self._add(item, f"{name}[{place}]", depth + 1)
        elif type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            if self._is_new(value) and value.nbytes <= _SMALL_BYTES:
                self._tensors.append(_Array(name, value))
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._add_function(value, name, depth)
        elif is_generator(value):
            if self._is_new(value):
                self.generators.append(value)
        elif _is_object(value):
            self._add_dict(value.__dict__, lambda key: f"{name}.{key}", depth)

    def _add_dict(
        self, values: dict[Any, Any], name: Callable[[Any], str], depth: int, skipped: Collection[str] = ()
    ) -> None:
        if not self._is_new(values):
            return
        self._nodes.append(_Dict(values, name, skipped))
        if len(values) <= _MOST_ITEMS:
            for key, value in [*values.items()]:
                if not isinstance(value, _PLAIN) and key not in skipped:
                    self._add(value, name(key), depth + 1)

    def _add_list(self, values: list[Any] | deque[Any], name: str, depth: int) -> None:
        if not self._is_new(values):
            return
        self._nodes.append(_List(values, name))
        if len(values) <= _MOST_ITEMS:
            for place, value in enumerate(values):
                if not isinstance(value, _PLAIN):
                    self._add(value, f"{name}[{place}]", depth + 1)

    def _add_function(self, function: Any, name: str, depth: int) -> None:
        if depth > _DEPTH or not self._is_new(function):
            return
        if isinstance(function, functools.partial):
            for value in (function.func, *function.args, *function.keywords.values()):
                self._add(value, name, depth + 1)
        elif isinstance(function, types.MethodType):
            self._add(function.__self__, name, depth + 1)
            self._add_function(function.__func__, name, depth + 1)
        elif isinstance(function, types.FunctionType):
            if not _is_library_name(function.__module__):
                self._add_code(function, name, depth)
        else:
            self._add(function, name, depth)

    def _add_code(self, function: types.FunctionType, name: str, depth: int) -> None:
        for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if self._is_new(cell):
                self._nodes.append(_Cell(cell, f"{cell_name} of {name}"))
                if (value := _content(cell)) is not _ABSENT:
                    self._add(value, f"{cell_name} of {name}", depth + 1)
        world = function.__globals__
        named = [key for key in function.__code__.co_names if key in world and _is_state(world[key])]
        if named:
            self._nodes.append(_Names(world, named))
            for key in named:
                self._add(world[key], key, depth + 1)
        for value in function.__defaults__ or ():
            self._add(value, name, depth + 1)

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if self._is_new(tensor) and not tensor.is_inference() and not isinstance(tensor, FakeTensor):
            compares = self._complete or name in self._changing
            # frozen parameters are many, and seldom written to: of those a copy is kept that have been
            keep = compares or (_bytes_of(tensor) <= _SMALL_BYTES and not isinstance(tensor, nn.Parameter))
            self._tensors.append(_Tensor(name, tensor, keep=keep, compares=compares))

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        return True


def _is_state(value: Any) -> bool:
    """Return whether a global may be something a forward writes to: no function, class or module."""
    return not (callable(value) or isinstance(value, (types.ModuleType, type, nn.Module)))


def _is_object(value: Any) -> bool:
    """Return whether attributes of a value may be state: an object of the user's."""
    # modes of torch see every operator, the trials of the judgement too: what they count is no state of the model
    is_code = isinstance(value, (nn.Module, type, types.ModuleType, TorchDispatchMode, TorchFunctionMode))
    return not is_code and hasattr(value, "__dict__") and not _is_of_library(type(value))


def _is_of_library(kind: type) -> bool:
    return _is_library_name(kind.__module__)


def _is_library_name(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


class _Node(ABC):
    """A container as it was."""

    @abstractmethod
    def effects(self) -> Iterator[Effect]:
        """Yield what has changed in it since."""

    def restore(self) -> None:
        for effect in [*self.effects()]:
            effect.write(effect.before)


class _Dict(_Node):
    def __init__(self, values: dict[Any, Any], name: Callable[[Any], str], skipped: Collection[str]) -> None:
        self._values, self._name, self._skipped = values, name, skipped
        self._before = dict(values)

    def effects(self) -> Iterator[Effect]:
        now, before = self._values, self._before
        for key in [key for key, value in now.items() if not _same(before.get(key, _ABSENT), value)]:
            if key not in self._skipped:
                yield self._effect(key, before.get(key, _ABSENT), now[key])
        if len(now) < len(before) or before.keys() - now.keys():
            for key in [key for key in before if key not in now and key not in self._skipped]:
                yield self._effect(key, before[key], _ABSENT)

    def _effect(self, key: Any, before: Any, value: Any) -> Effect:
        return Effect(self._name(key), "set", before, value, functools.partial(self._write, key))

    def _write(self, key: Any, value: Any) -> None:
        if value is _ABSENT:
            self._values.pop(key, None)
        else:
            self._values[key] = value


class _Names(_Dict):
    """Some of a module's globals."""

    def __init__(self, world: dict[str, Any], names: list[str]) -> None:
        super().__init__(world, str, ())
        self._before = {name: world[name] for name in names}

    def effects(self) -> Iterator[Effect]:
        for key, before in self._before.items():
            now = self._values.get(key, _ABSENT)
            if not _same(before, now):
                yield self._effect(key, before, now)


class _Class(_Node):
    """Attributes of a class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._before = {name: value for name, value in vars(kind).items() if not name.startswith("__")}

    def effects(self) -> Iterator[Effect]:
        now = vars(self._kind)
        for name in {**self._before, **{key: None for key in now if not key.startswith("__")}}:
            before, value = self._before.get(name, _ABSENT), now.get(name, _ABSENT)
            if not _same(before, value):
                yield Effect(
                    f"{self._kind.__name__}.{name}", "set", before, value, functools.partial(self._write, name)
                )

    def _write(self, name: str, value: Any) -> None:
        if value is _ABSENT:
            delattr(self._kind, name)
        else:
            setattr(self._kind, name, value)


class _Cell(_Node):
    def __init__(self, cell: types.CellType, name: str) -> None:
        self._cell, self._name = cell, name
        self._before = _content(cell)

    def effects(self) -> Iterator[Effect]:
        now = _content(self._cell)
        if not _same(self._before, now):
            yield Effect(self._name, "set", self._before, now, self._write)

    def _write(self, value: Any) -> None:
        if value is _ABSENT:
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
