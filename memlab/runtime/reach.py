"""A walk over what a model's forward can read or change beside its inputs and parameters.

Rules:

1. From a module it leads to its attributes and buffers, and by its class's own code to attributes of the class, cells of closures
   and globals which that code names, of the user's Python modules too; hooks, functions, autograd functions and the user's classes
   are followed as well. Lists, dictionaries, sets and plain objects, with `__slots__` or without, are looked into, to a depth.
   Modules that are met so are walked as well (`beside`).
2. Objects of torch's, DeepSpeed's and memlab's own machinery are left alone, and so is code of well-known libraries: they keep what they count
   in modules. Optimizers, schedulers, scalers and distributions are looked into, the loop's optimizers but for the state of parameters.
3. Of classes that are no modules' those attributes are followed which followed code names: others may be another thread's.
4. Every container is met once.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.runtime import callers, containers
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.ownership import parameters_in
from memlab.runtime.rng import is_generator
from memlab.runtime.stand_ins import HOOK_OPTIONS, have_others, is_ours

# tensors and arrays up to this size are copied whatever is known of them, since some operators write without a trace
SMALL_BYTES = 64 * 1024
_PLAIN_TYPES = frozenset(containers.PLAIN)
_DEPTH = 4
_OF_A_MODULE = 4  # containers: attributes, slots, buffers, attributes of parameters
MOST_ITEMS = 256  # of a container that is looked into
# objects of an engine hold gathered parameters for a moment only
_MACHINERY = ("torch", "memlab", "deepspeed", "builtins")
LIBRARIES = (*_MACHINERY, "transformers", "accelerate", "peft", "lightning", "numpy", "torchvision")
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# those of every module, in torch's own `nn.modules.module`
GLOBAL_FORWARD_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
_GLOBAL_BACKWARD_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks")
# classes of torch's that are looked into
_STATEFUL = (
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.distributions.Distribution,
    torch.quasirandom.SobolEngine,
)  # fmt: skip
# parameters and what plans attach to; the rest is met by itself
_OF_OPTIMIZERS = frozenset(
    (
        "param_groups", "state", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
    )
)  # fmt: skip
# beside them, by the same numbers, what was asked for when they were registered
_HOOK_TABLES = (*MODULE_HOOKS, *HOOK_OPTIONS)
_hook_tables = operator.itemgetter(*_HOOK_TABLES)


class ModuleHooks:
    """The hooks of a module as they are now, without memlab's own: a plan may have come since, or gone.

    A forward may register hooks in its first call, and note in an attribute that it has: both are put back, or neither.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes
        self._before = self._now()

    @property
    def are_there(self) -> bool:
        """Return whether there are any; most modules have none, and are told at little cost."""
        return any(_hook_tables(self.attributes))

    @property
    def are_changed(self) -> bool:
        """Return whether some were registered or removed since."""
        return bool(self._before or self.are_there) and _numbers(self._now()) != _numbers(self._before)

    def restore(self) -> None:
        """Put them back; what is there already stays as it is."""
        if not self.are_changed:
            return
        users = self._now()
        for key in _HOOK_TABLES:
            table, before = self.attributes[key], self._before.get(key, {})
            for number in users.get(key, {}).keys() - before.keys():
                del table[number]
            table.update({number: value for number, value in before.items() if number not in table})

    def _now(self) -> dict[str, dict[int, Any]]:
        """Hooks and what was asked for with them, by table and number; without empty tables."""
        if not self.are_there:
            return {}
        tables = {key: table for key in _HOOK_TABLES if (table := self.attributes[key])}
        ours = {number for key in MODULE_HOOKS for number, hook in tables.get(key, {}).items() if is_ours(hook)}
        users = {key: {n: value for n, value in table.items() if n not in ours} for key, table in tables.items()}
        return {key: table for key, table in users.items() if table}


def _numbers(tables: dict[str, dict[int, Any]]) -> dict[str, Collection[int]]:
    return {key: table.keys() for key, table in tables.items() if key in MODULE_HOOKS}


_passed_by: ContextVar[frozenset[int]] = ContextVar("_passed_by", default=frozenset())


@contextmanager
def passing_by(models: Iterable[nn.Module]) -> Iterator[None]:
    """Context within which walks do not look into some models, though code names them: those that a twin was made from."""
    found = [each for model in models for each in (*model.modules(), *model.parameters(), *model.buffers())]
    before = _passed_by.set(frozenset(map(id, found)))
    try:
        yield
    finally:
        _passed_by.reset(before)


class Walk(ABC):
    """A walk that keeps what it meets."""

    most_containers: int  # how many are looked into
    left_alone: ClassVar[tuple[str, ...]] = _MACHINERY  # libraries whose objects are not looked into
    attributes_left_alone: ClassVar[frozenset[str]]  # attributes of modules that are no state

    def __init__(self, own: Collection[nn.Module]) -> None:
        self._own = own  # modules that it begins with
        self._seen = {id(module) for module in own}
        self._passed_by = _passed_by.get()
        self._containers = 0
        # in the order in which they were met
        self._contents: list[tuple[containers.Container, containers.Items]] = []
        self._hooks: list[ModuleHooks] = []
        self._named: set[str] = set()  # attributes, by code that was followed
        self._classes: dict[type, set[str]] = {}  # of the user's, with the attributes that were followed
        self.generators: list[Any] = []  # of random numbers that were met
        self.unreadable: list[str] = []  # names of what was met and cannot be put back

    @property
    def contents(self) -> Collection[tuple[containers.Container, containers.Items]]:
        """Return what was met, each with what it held then."""
        return self._contents

    @property
    def is_full(self) -> bool:
        """Return whether nothing further is looked into; what modules themselves hold does not count."""
        return self._containers > self.most_containers + _OF_A_MODULE * len(self._own)

    def module(self, path: str, module: nn.Module, *, buffers: bool = True) -> None:
        """Walk from a module, not from its children."""
        attributes = vars(module)
        self._dict(attributes, lambda key: f"{path}.{key}" if path else str(key), 0, skipped=self.attributes_left_alone)
        if slots := containers.Slots(module):
            self._mapping(slots, lambda key: f"{path}.{key}" if path else str(key), 0)
        if buffers:
            self.buffers(path, module)
        self._parameters(path, module)
        hooks = ModuleHooks(attributes)
        self._hooks.append(hooks)
        for key in MODULE_HOOKS if hooks.are_there else ():
            for hook in attributes[key].values():
                self._function(hook, f"a hook of {path or type(module).__name__}", 1)
        if "forward" in attributes:
            self._function(attributes["forward"], f"forward of {path or type(module).__name__}", 1)
        if id(type(module)) in self._seen:
            return
        for key in (*GLOBAL_FORWARD_HOOKS, *_GLOBAL_BACKWARD_HOOKS):
            for hook in getattr(nn.modules.module, key).values():
                self._function(hook, "a hook of every module", 1)
        for kind in type(module).__mro__:
            if self._is_new(kind) and not _is_of(kind.__module__, LIBRARIES):
                self._class(kind)

    def buffers(self, path: str, module: nn.Module) -> None:
        """Walk from a module's buffers alone."""
        if module._buffers:
            self._dict(module._buffers, lambda key: f"buffer {path}.{key}" if path else f"buffer {key}", 0)

    def buffers_made(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Walk from the buffers that a forward may give to modules, by path, which have none."""
        empty = {path: module._buffers for path, module in modules if not module._buffers}
        self.met(containers.NewBuffers(empty, lambda key: f"buffer {_joined(key)}"))

    def parameter_attributes(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Walk from the attributes of parameters of modules, by path."""
        held = {
            path: module._parameters
            for path, module in modules
            # what a tensor without values has is torch's
            if module._parameters and not any(isinstance(each, FakeTensor) for each in module._parameters.values())
        }
        attributes = containers.ParameterAttributes(held, _joined)
        self._items(self.met(attributes).items(), attributes.name, 0)

    def _parameters(self, path: str, module: nn.Module) -> None:
        """Walk from parameters that a forward may turn into others: those of quantised layers, and frozen ones of the user's layers."""
        prefix = f"{path}." if path else ""
        is_users = bool(module._parameters) and not _is_of(type(module).__module__, LIBRARIES)
        turns = False
        for parameter in module._parameters.values():
            if type(parameter) is nn.Parameter:
                turns |= is_users and not parameter.requires_grad
            elif parameter is not None and not _is_of(type(parameter).__module__, _MACHINERY):
                turns |= not parameter.requires_grad
        if turns:
            self.met(containers.FrozenValues(module._parameters, lambda key: f"{prefix}{key}"))

    @abstractmethod
    def beside(self, model: nn.Module, name: str) -> None:
        """A module that was met on the way: one that the walk began with, or one beside it, as a teacher in a list."""

    @abstractmethod
    def met_tensor(self, tensor: torch.Tensor, name: str) -> None:
        """A tensor that is no container's alone: it may be met again."""

    def met(self, container: containers.Container) -> containers.Items:
        """Something that holds values, before what it holds; returns that."""
        items = container.read()
        self._contents.append((container, items))
        return items

    # -- where it leads -----------------------------------------------------------------------------

    def look_at(self, value: Any, name: str, depth: int) -> None:
        """Walk from any value."""
        # what was met is asked first: some libraries make it slow to ask for the class of an object
        if depth > _DEPTH or type(value) in _PLAIN_TYPES or id(value) in self._seen:
            return
        if isinstance(value, containers.PLAIN) or self.is_full or id(value) in self._passed_by:
            return
        if isinstance(value, torch.Tensor):
            self.met_tensor(value, name)
        elif isinstance(value, dict):
            self._dict(value, lambda key: f"{name}[{key!r}]", depth)
        elif isinstance(value, (list, deque)):
            if self._is_new(value):
                self.met(containers.Sequence(value, _always(name)))
                self._places(value, name, depth)
        elif isinstance(value, tuple):
            self._places(value, name, depth)
        elif isinstance(value, set):
            if self._is_new(value):
                self.met(containers.SetMembers(value, _always(name)))
        elif isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)):
            self._function(value, name, depth)
        elif is_generator(value):
            if self._is_new(value):
                self.generators.append(value)
        elif type(value).__module__ == "numpy":
            if type(value).__name__ == "ndarray" and value.nbytes <= SMALL_BYTES and self._is_new(value):
                self.met(containers.Array(value, _always(name)))
        elif isinstance(value, nn.Module):
            self.beside(value, name)
        elif isinstance(value, functools._lru_cache_wrapper):
            if self._is_new(value):
                for cache in containers.caches_of(value):
                    self._dict(cache, lambda key: f"the cache of {name} ({key!r})", depth)
                self._function(value.__wrapped__, name, depth)
        elif containers.is_unreadable(value):
            if self._is_new(value):
                self.unreadable.append(f"{name} ({type(value).__name__})")
        elif isinstance(value, ContextVar):
            if self._is_new(value):
                self._items(self.met(containers.Variable(value, _always(name))).items(), _always(name), depth)
        elif isinstance(value, type):
            self._type(value)
        elif self._is_new(value) and self._is_object(value):
            self._type(type(value))
            if isinstance(value, torch.optim.Optimizer):
                self._optimizer(value, name)
            elif type(getattr(value, "__dict__", None)) is dict:
                self._dict(value.__dict__, lambda key: f"{name}.{key}", depth)
            if slots := containers.Slots(value):
                self._mapping(slots, lambda key: f"{name}.{key}", depth)

    def _optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Walk from an optimizer: one that hooks gather statistics for, or that a forward itself updates with."""
        depth = 1  # its state lies as deep as a model's, wherever it was met
        self._dict(vars(optimizer), lambda key: f"{name}.{key}", depth, skipped=_OF_OPTIMIZERS)
        self.met(containers.Sequence(optimizer.param_groups, _always(f"{name}.param_groups")))
        for group in optimizer.param_groups:
            self._dict(group, lambda key: f"{name}.param_groups[{key!r}]", depth + 1, skipped=frozenset(("params",)))
        parameters = [*parameters_in(optimizer)]
        # aliases may be in the places of weights
        weights = {_place_of(weight) for module in self._own for weight in module._parameters.values()}
        # a session hooks those that step
        is_hooked = any(map(is_ours, optimizer._optimizer_step_pre_hooks.values()))
        is_loops = is_hooked and any(_place_of(parameter) in weights for parameter in parameters)
        of_state = containers.BesideParameters if is_loops else containers.Mapping
        state = of_state(optimizer.state, _always(f"{name}.state"))
        self._items(self.met(state).items(), state.name, depth)
        if not is_loops:
            gradients = containers.ParameterGradients(parameters, _always(f"gradients of {name}"))
            self._items(self.met(gradients).items(), gradients.name, depth)
            # of modules they are met with these
            bare = [parameter for parameter in parameters if not isinstance(parameter, nn.Parameter)]
            self._places(bare, f"parameters of {name}", depth)

    def _dict(
        self, values: dict[Any, Any], name: Callable[[Any], str], depth: int, skipped: frozenset[str] = frozenset()
    ) -> None:
        if self._is_new(values):
            self._mapping(values, name, depth, skipped)

    def _mapping(
        self,
        values: MutableMapping[Any, Any],
        name: Callable[[Any], str],
        depth: int,
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        self._items(self.met(containers.Mapping(values, name, skipped)).items(), name, depth)

    def _items(self, items: Collection[tuple[Any, Any]], name: Callable[[Any], str], depth: int) -> None:
        self._containers += 1
        if depth == 0 or len(items) <= MOST_ITEMS:
            for key, value in [each for each in items if type(each[1]) not in _PLAIN_TYPES]:
                self.look_at(value, name(key), depth + 1)

    def _places(self, values: Collection[Any], name: str, depth: int) -> None:
        few = values if len(values) <= MOST_ITEMS else ()
        self._items([*enumerate(few)], lambda place: f"{name}[{place}]", depth)

    def _class(self, kind: type) -> None:
        for name, member in [*vars(kind).items()]:
            for function in _functions_of(member):
                self._function(function, f"{kind.__name__}.{name}", 1)
        self.met(containers.ClassAttributes(kind))
        for name, member in [*vars(kind).items()]:
            if not name.startswith("__") and not isinstance(member, types.FunctionType):
                self.look_at(member, f"{kind.__name__}.{name}", 1)

    def _type(self, kind: type) -> None:
        """Walk from a class of the user's, or one with a forward and a backward pass of its own."""
        is_differentiable = issubclass(kind, torch.autograd.Function)
        for each in kind.__mro__:
            if is_differentiable and not _is_of(each.__module__, LIBRARIES):
                if self._is_new(each):
                    self._class(each)
            elif _is_users(each.__module__) and not issubclass(each, nn.Module):
                self._classes.setdefault(each, set())

    def _follow_classes(self) -> None:
        """Walk from what was named so far of classes that were met, until nothing new is named."""
        found = {kind: set[str]() for kind in self._classes}
        while new := [
            (kind, name, member)
            for kind, followed in [*self._classes.items()]
            for name, member in [*vars(kind).items()]
            if name not in followed and (name in self._named or (name.startswith("__") and callable(member)))
        ]:
            for kind, name, member in new:
                self._classes[kind].add(name)
                functions = _functions_of(member)
                for function in functions:
                    self._function(function, f"{kind.__name__}.{name}", 1)
                if not functions and not name.startswith("__"):
                    found.setdefault(kind, set()).add(name)
                    self.look_at(member, f"{kind.__name__}.{name}", 1)
        for kind, names in found.items():
            if names:
                self.met(containers.ClassAttributes(kind, sorted(names)))

    def _function(self, function: Any, name: str, depth: int) -> None:
        if depth > _DEPTH or not self._is_new(function):
            return
        if isinstance(function, functools.partial):
            for value in (function.func, *function.args, *function.keywords.values()):
                self.look_at(value, name, depth + 1)
        elif isinstance(function, types.MethodType):
            self.look_at(function.__self__, name, depth + 1)  # of `Function.apply` the class, whose passes it runs
            self._function(function.__func__, name, depth + 1)
        elif isinstance(function, types.BuiltinMethodType):  # which `Function.apply` is since torch 2.15
            if not isinstance(function.__self__, types.ModuleType):
                self.look_at(function.__self__, name, depth + 1)
        elif isinstance(function, types.FunctionType):
            if not _is_of(function.__module__, LIBRARIES):
                self._code(function, name, depth)
        else:
            self.look_at(function, name, depth)

    def _code(self, function: types.FunctionType, name: str, depth: int) -> None:
        for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if self._is_new(cell):
                self.met(containers.Cell(cell, _always(f"{cell_name} of {name}")))
                self.look_at(containers.content_of(cell), f"{cell_name} of {name}", depth + 1)
        self._named.update(_attributes_of(function.__code__))
        self._names(function.__globals__, _globals_of(function.__code__), function.__code__, depth)
        for value in function.__defaults__ or ():
            self.look_at(value, name, depth + 1)
        if function.__dict__ or _is_users(function.__module__):  # which may get its first attribute in a call
            self._dict(function.__dict__, lambda key: f"{name}.{key}", depth)
        if function.__kwdefaults__:
            self._dict(function.__kwdefaults__, _always(name), depth)

    def _names(self, world: dict[str, Any], names: Iterable[str], code: types.CodeType, depth: int) -> None:
        """Walk from what code names in a Python module."""
        named = {key: world[key] for key in names if key in world}
        state = [key for key, value in named.items() if _is_state(value)]
        if state:
            self.met(containers.Names(world, state))
        for key, value in named.items():
            if isinstance(value, types.ModuleType):
                if depth < _DEPTH and _is_users(value.__name__):
                    self._names(vars(value), _attributes_of(code), code, depth + 1)
            elif isinstance(value, (types.FunctionType, type)) or key in state:
                self.look_at(value, key, depth + 1)

    def _is_object(self, value: Any) -> bool:
        """Return whether attributes of a value may be state: an object of the user's."""
        # modes of torch see every operator, memlab's own runs too: what they count is no state of the model
        is_code = isinstance(value, (nn.Module, type, types.ModuleType, TorchDispatchMode, TorchFunctionMode))
        home = type(value).__module__
        is_stateful = isinstance(value, _STATEFUL) and _is_of(home, ("torch",))
        return not is_code and (is_stateful or not _is_of(home, self.left_alone))

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        return True


def _place_of(tensor: torch.Tensor | None) -> int:
    """Return the key of a tensor's storage; where it has none, its own."""
    has_storage = tensor is not None and torch._C._has_storage(tensor)
    return storage_of(tensor) if tensor is not None and has_storage else id(tensor)


def _joined(key: tuple[str, ...] | None) -> str:
    """Return how one writes a place in tables of several modules; of all of them for None."""
    return "of modules" if key is None else ".".join(filter(None, key))


def _always(name: str) -> Callable[[Any], str]:
    return lambda _key: name


def keeps_state_in_modules(home: str) -> bool:
    """Return whether code of a module of Python's is a well-known library's, which keeps what it counts in models."""
    return _is_of(home, LIBRARIES) and not _is_of(home, _MACHINERY)


def _functions_of(member: Any) -> tuple[types.FunctionType, ...]:
    """Functions behind a member of a class, bare or wrapped as Python does it."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    wrapped = (member.fget, member.fset) if isinstance(member, property) else (member,)
    return tuple(each for each in wrapped if isinstance(each, types.FunctionType))


def has_backward_hooks(model: nn.Module) -> bool:
    """Return whether a backward pass through a model calls hooks of modules that are not memlab's."""
    tables = [getattr(nn.modules.module, key) for key in _GLOBAL_BACKWARD_HOOKS]
    for module in model.modules():
        tables += module._backward_hooks, module._backward_pre_hooks
    return have_others(tables)


def is_of_library(home: str | None) -> bool:
    """Return whether code of a module of Python's is a well-known library's, or memlab's own."""
    return _is_of(home, LIBRARIES)


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that code, and code within it, reads or writes as globals; `co_names` has those of attributes as well."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "LOAD_NAME"))]
    within = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _globals_of(each)]
    return tuple(dict.fromkeys([*own, *within]))


@functools.lru_cache(maxsize=4096)
def _attributes_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that code, and code within it, reads or writes as attributes, and others beside."""
    within = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _attributes_of(each)]
    return tuple(dict.fromkeys([*code.co_names, *within]))


@functools.lru_cache(maxsize=4096)
def _is_users(home: str | None) -> bool:
    """Return whether a module of Python's is the user's own, and no library's."""
    file = getattr(sys.modules.get(home or ""), "__file__", None) or ""
    return not _is_of(home, (*LIBRARIES, *sys.stdlib_module_names)) and not callers.is_installed(file)


def _is_state(value: Any) -> bool:
    """Return whether a global may be something a forward changes: no function, class or module."""
    return not isinstance(value, _CODE)


def _is_of(module: str | None, libraries: tuple[str, ...]) -> bool:
    return (module or "").partition(".")[0] in libraries
