"""State that a plan change can touch, remembered by reference, so that going back needs no memory.

Rules:

1. A change makes new tensors and leaves the old ones unwritten (rule 4 of `memlab.techniques.base`), so a
   reference to an old tensor is a copy of it, and going back is bit for bit.
2. Remembered are: attributes, parts and hooks of modules; data, gradient, attributes and hooks of parameters and buffers;
   state, groups and hooks of optimizers; the fields of techniques and of memlab's own objects within them,
   with the state of their random generators; torch's precision of matrix products, and what runs around backward passes.
3. References keep old tensors alive beside the new ones. Where there is no room for both, `spare` moves
   those that have been replaced off the device. Going back then needs the memory they took before, and by
   then everything newer has been dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from memlab.plan import Plan
from memlab.runtime import backward, containers
from memlab.runtime.fp32_products import Fp32Products
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.ownership import parameters_in
from memlab.runtime.state_entries import PackedState, kept_of
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.techniques.base import Technique
from memlab.techniques.offload.spill import Spill, is_spilled

# seen from a technique, these are either remembered on their own or keep account of it themselves
_LEAVES = (torch.Tensor, nn.Module, torch.optim.Optimizer, Plan, Spill, Enum)


class Rollback:
    """State that a plan change may alter, as it is now: of a model, its optimizers, modules beside it, and what is `owned` by memlab.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = Rollback(model)
        >>> model.weight.data = model.weight.data.bfloat16()
        >>> model.forward = print
        >>> before.restore()
        >>> model.weight.dtype, "forward" in vars(model)
        (torch.float32, False)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        owned: Iterable[Any] = (),
        beside: Iterable[nn.Module] = (),
    ) -> None:
        optimizers = list(optimizers)
        roots = (model, *beside)
        self._spill = Spill()
        self._products = Fp32Products()
        self._parts: list[_Part] = [
            *_parts_of_models(roots),
            *(part for tensor in _tensors(roots, optimizers) for part in _parts_of_tensor(tensor)),
            *(part for optimizer in optimizers for part in _parts_of_optimizer(optimizer)),
            *_parts_of_owned(owned),
            _Kept(containers.Sequence(backward.around)),
        ]
        self._unspared = self._parts

    def restore(self) -> None:
        """Make everything what it was."""
        # newer tensors go before older ones that were moved away come back
        for part in self._parts:
            part.drop_newer()
        for part in self._parts:
            part.restore()
        self._products.restore()

    def spare(self) -> None:
        """Move old tensors that have been replaced by now off the device."""
        self._unspared = [part for part in self._unspared if not part.spare(partial(_Away, self._spill))]


class _Away:
    """A tensor moved off the device."""

    def __init__(self, spill: Spill, tensor: torch.Tensor) -> None:
        self._stored = spill.store(tensor)
        self._device, self._stride = tensor.device, tensor.stride()

    def back(self) -> torch.Tensor:
        stored = self._stored
        resident = torch.empty_strided(stored.shape, self._stride, dtype=stored.dtype, device=self._device)
        return resident.copy_(stored)


_Mover = Callable[[torch.Tensor], _Away]


def _sent(value: Any, away: _Mover) -> Any:
    # paged tensors of bitsandbytes move by themselves; what a technique keeps elsewhere takes no memory of the device, and
    # the technique knows it by its storage
    is_plain = type(value) is torch.Tensor and value.numel() >= SMALL_ELEMENTS and not hasattr(value, "is_paged")
    return away(value) if is_plain and not is_spilled(value.untyped_storage()) else value


def _brought(value: Any) -> Any:
    return value.back() if isinstance(value, _Away) else value


# --- parts ----------------------------------------------------------------------------------------


class _Part(ABC):
    """One thing remembered."""

    @abstractmethod
    def restore(self) -> None:
        """Make it what it was; nothing is written that is so already."""

    def drop_newer(self) -> None:  # noqa: B027 - most parts hold nothing newer
        """Drop what is newer, as far as that needs no memory."""

    def spare(self, away: _Mover) -> bool:
        """Send away what has been replaced; True when there is nothing more to send."""
        return True


class _Table(_Part):
    """Keys and values of a mapping, in order, values by reference."""

    def __init__(self, table: MutableMapping[Any, Any]) -> None:
        self._table = table
        self._items = dict(table.items())  # past the `__getitem__` of a class of the user's, or of an engine's

    def restore(self) -> None:
        items = {key: _brought(value) for key, value in self._items.items()}
        containers.Mapping(self._table).fill(items)

    def drop_newer(self) -> None:
        if any(isinstance(value, _Away) for value in self._items.values()):
            self._table.clear()
        else:
            self.restore()


class _TensorTable(_Table):
    """A mapping of a technique's own, whose tensors are sent away one by one as they leave it."""

    def spare(self, away: _Mover) -> bool:
        for key, value in self._items.items():
            if isinstance(value, torch.Tensor) and self._table.get(key) is not value:
                self._items[key] = _sent(value, away)
        return False


class _Kept(_Part):
    """A list or a set."""

    def __init__(self, container: containers.Container) -> None:
        self._container = container
        self._items = container.read()

    def restore(self) -> None:
        self._container.fill(self._items)


class _Generator(_Part):
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._state = generator.get_state()

    def restore(self) -> None:
        self._generator.set_state(self._state)


class _State(_Part):
    """State of one parameter: which dict it is, and what that holds."""

    def __init__(self, optimizer: torch.optim.Optimizer, key: Any, state: dict[str, Any]) -> None:
        self._optimizer, self._key, self._state = optimizer, key, state
        self._items = kept_of(state)
        self._closed = state.closed if isinstance(state, PackedState) else None

    def restore(self) -> None:
        self._items = {name: _brought(value) for name, value in self._items.items()}
        self._state.clear()
        self._state.update(self._items)
        if isinstance(self._state, PackedState):
            self._state.closed = self._closed

    def spare(self, away: _Mover) -> bool:
        if not self._is_replaced():
            return False
        live = {id(value) for value in self._optimizer.state.get(self._key, {}).values()}
        for name, value in self._items.items():
            if id(value) not in live:
                self._items[name] = _sent(value, away)
                self._state.pop(name, None)
        return True

    def _is_replaced(self) -> bool:
        return self._optimizer.state.get(self._key) is not self._state


class _Data(_Part):
    """Values, gradient and class of a parameter or buffer, and whether it trains."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._class = tensor, type(tensor)
        self._data: Any = tensor.data
        self._gradient: Any = tensor.grad if tensor.is_leaf else None
        self._trains = tensor.requires_grad

    def restore(self) -> None:
        tensor = self._tensor
        if tensor.is_leaf and tensor.requires_grad is not self._trains:
            tensor.requires_grad_(self._trains)
        if type(tensor) is not self._class:  # the one under which weights are watched
            tensor.__class__ = self._class
        if self._is_replaced():
            if tensor.is_leaf:
                tensor.grad = None
            tensor.data = _brought(self._data)
        if tensor.is_leaf and tensor.grad is not self._gradient:
            tensor.grad = _brought(self._gradient)

    def spare(self, away: _Mover) -> bool:
        if not self._is_replaced():
            return False
        self._data = _sent(self._data, away)
        if self._gradient is not None and self._tensor.grad is not self._gradient:
            self._gradient = _sent(self._gradient, away)
        return True

    def _is_replaced(self) -> bool:
        if isinstance(self._data, _Away):
            return True
        now, before = self._tensor, self._data
        return now.dtype is not before.dtype or storage_of(now) != storage_of(before)


class _TensorHooks(_Part):
    """Hooks of one kind on a parameter; torch makes their table with the first of them."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor, self._name = tensor, name
        self._items = list((getattr(tensor, name, None) or {}).items())

    def restore(self) -> None:
        table = getattr(self._tensor, self._name, None)
        if table is not None and list(table.items()) != self._items:
            table.clear()
            table.update(self._items)


# --- what there is to remember --------------------------------------------------------------------


def _parts_of_models(models: Iterable[nn.Module]) -> Iterator[_Part]:
    for module in {id(module): module for model in models for module in model.modules()}.values():
        yield _Table(vars(module))
        for key, value in vars(module).items():
            # beside the hooks themselves there are tables of which are called when
            if isinstance(value, MutableMapping) and (
                "_hooks" in key or key in ("_parameters", "_buffers", "_modules")
            ):
                yield _Table(value)


def _tensors(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    updated = chain.from_iterable(map(parameters_in, optimizers))
    own = chain.from_iterable(chain(model.parameters(), model.buffers()) for model in models)
    everything = {id(tensor): tensor for tensor in (*own, *updated)}
    return list(everything.values())


def _parts_of_tensor(tensor: torch.Tensor) -> Iterator[_Part]:
    if tensor.layout is torch.strided:
        yield _Data(tensor)
    yield _Table(vars(tensor))
    yield _TensorHooks(tensor, "_backward_hooks")
    yield _TensorHooks(tensor, "_post_accumulate_grad_hooks")


def _parts_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[_Part]:
    yield from (_State(optimizer, key, state) for key, state in optimizer.state.items() if isinstance(state, dict))
    yield _Table(optimizer.state)
    yield _Table(vars(optimizer))
    for key, value in vars(optimizer).items():
        if isinstance(value, MutableMapping) and key.endswith("_hooks"):
            yield _Table(value)
    for group in optimizer.param_groups:
        yield _Table(group)


def _parts_of_owned(roots: Iterable[Any]) -> Iterator[_Part]:
    waiting, seen = deque(roots), set[int]()
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, _LEAVES):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Generator):
            yield _Generator(thing)
        elif isinstance(thing, MutableMapping):
            yield _TensorTable(thing)
            waiting.extend(thing.values())
        elif isinstance(thing, set):
            yield _Kept(containers.SetMembers(thing))
        elif isinstance(thing, (list, deque)):
            yield _Kept(containers.Sequence(thing))
            waiting.extend(thing)
        elif _is_own(thing):
            yield _TensorTable(vars(thing))
            waiting.extend(vars(thing).values())


def _is_own(thing: Any) -> bool:
    if isinstance(thing, Technique):
        return True
    return hasattr(thing, "__dict__") and not isinstance(thing, type) and type(thing).__module__.startswith("memlab.")
