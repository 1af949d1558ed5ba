"""`Start`: what a model call began with, to be put back before the call is run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memlab.runtime.aliases import Storage, put_back, version_of
from memlab.runtime.model_state import KeptTensor, State, Written
from memlab.runtime.modules import ModuleMembers
from memlab.runtime.reach import SMALL_BYTES
from memlab.runtime.rng import Randomness, RandomState
from memlab.runtime.touch import own_class

_SMALL_ELEMENTS = 4096  # of a buffer that is copied whatever is known of it
_written = Written()
# large tensors, with whether the last call has left them as they were
_left_alone: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
_models: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()  # that have been called
_met: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()  # large tensors that they referred to before a call


class Weights:
    """Weights and gradients before a call. One that runs a backward pass of its own, or updates weights, cannot be repeated."""

    def __init__(self, model: nn.Module) -> None:
        trained = (each for each in model.parameters() if each.requires_grad and each.is_leaf)
        self._before = [(each, each.grad, version_of(each.grad), each._version) for each in trained]

    @property
    def are_untouched(self) -> bool:
        return all(
            each.grad is gradient and version_of(gradient) == version and each._version == written
            for each, gradient, version, written in self._before
        )


class Start:
    """Start of a model call: what the model reaches, and random states.

    A large buffer that calls have left alone so far (a mask, a table) is not copied, and one of which nothing is known is copied to
    the host: the device may be full. Nor is another large tensor that the model refers to, unless it was there before an earlier
    call: what a hook keeps of each call is another one each time.
    """

    def __init__(self, model: nn.Module, device: torch.device, objects: Iterable[Any] | None = ()) -> None:
        # of the call; None where no more than random states and buffers is worth the time
        self._objects = objects
        self._model, self._device = model, device
        self._graphs: list[torch.Tensor | None] = []
        own = [*model.modules()]
        self._members = ModuleMembers(own)
        self._state = None if objects is None else State.of_model(model, device, objects, _written)
        if self._state is not None:
            self._copy_lasting(self._state)
        self._random = Randomness() if self._state is None else self._state.random
        beside = [] if self._state is None else self._state.beside_it
        self._buffers = [
            (
                table,
                name,
                buffer,
                None if _left_alone.get(buffer) else _copied(buffer),
                buffer._version,
                Storage(buffer),
            )
            for table, name, buffer in (*_buffers_of([*own, *beside]), *_left_to_forwards(own, beside, device))
            if not (buffer.is_inference() or buffer.is_meta or self._is_in_state(buffer))
        ]

    def _copy_lasting(self, state: State) -> None:
        is_first = self._model not in _models
        _models[self._model] = True
        buffers = {id(buffer) for module in self._model.modules() for buffer in module._buffers.values()}
        for kept in state.own_tensors:
            tensor = kept.original
            if kept.is_copied or _left_alone.get(tensor) or tensor.grad_fn is not None or id(tensor) in buffers:
                continue
            if is_first or tensor in _met:
                kept.copy(on_host=True)
            _met[tensor] = True

    def _is_in_state(self, buffer: torch.Tensor) -> bool:
        is_small = buffer.numel() * buffer.element_size() <= SMALL_BYTES
        return self._state is not None and is_small and own_class(buffer) is torch.Tensor

    @property
    def random(self) -> RandomState:
        """Random state of torch."""
        return self._random.torch

    def now(self) -> Start:
        """The same things as they are at this moment, to be put back soon: tensors keep their graphs."""
        now = Start(self._model, self._device, self._objects)
        now._graphs = [kept.seen for kept in now._state.tensors] if now._state is not None else []
        return now

    @property
    def copied_ids(self) -> set[int]:
        """Ids of the tensors whose values are put back."""
        return {id(kept.seen) for kept in (self._state.tensors if self._state is not None else ()) if kept.is_copied}

    @property
    def state(self) -> State:
        """State that the model reaches, where that was looked at."""
        assert self._state is not None
        return self._state

    def call_ended(self) -> None:
        """Learn which buffers a call leaves alone, and which other tensors it writes to."""
        for table, name, buffer, copy, version, storage in self._buffers:
            is_there = name in table and table[name] is buffer  # of torch.jit, no dict
            is_same = is_there and buffer._version == version and not storage.is_another
            if buffer.numel() > _SMALL_ELEMENTS:
                # by values: BatchNorm, and writes to `.data`, leave versions alone
                is_same = is_same and (copy is None or torch.equal(buffer.detach().to(copy.device), copy))
                _left_alone[buffer] = is_same
        if self._state is not None:
            self._state.learn()
            for kept in self._state.own_tensors:
                if kept.original.nbytes > SMALL_BYTES and kept.is_as_copied:
                    _left_alone[kept.original] = True

    def begin_again(self) -> None:
        """Put all of it back for a call that has not ended; what it has made (parameters, parts) goes, to be made again."""
        self._members.take_away_others()
        self.restore()

    def restore(self, instead: dict[KeptTensor, torch.Tensor] | None = None) -> None:
        """Put all of it back; some tensors have others in their places."""
        if self._state is not None:
            self._state.restore(instead)
        else:
            self._random.restore()
        for table, name, buffer, copy, _, storage in self._buffers:
            if name not in table or table[name] is not buffer:
                table[name] = buffer
            storage.give_back()
            if copy is not None:
                # unnoticed by a graph that has saved it: what a call writes to a buffer, its backward does not read
                put_back(buffer, copy)


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy, on the host of a large tensor that no call is known to write to."""
    on_host = buffer.numel() > _SMALL_ELEMENTS and buffer not in _left_alone
    return buffer.detach().to("cpu" if on_host else buffer.device, copy=True)


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Buffers, each with the table that holds it and its name there."""
    for module in modules:
        yield from ((module._buffers, name, each) for name, each in module._buffers.items() if each is not None)


def _left_to_forwards(
    own: Sequence[nn.Module], beside: Iterable[nn.Module], device: torch.device
) -> list[tuple[Any, str, torch.Tensor]]:
    """The same of parameters that a forward pass may keep averages in (MoCo): those that do not train, and all of modules beside.

    None where they are far more than what trains: base weights beside adapters, which nothing writes to.
    """
    frozen = {id(each[2]): each for each in _parameters_of(own, device) if not each[2].requires_grad}
    reached = {id(each[2]): each for each in _parameters_of(beside, device)}
    trained_bytes = sum(
        p.nbytes for module in own for p in module._parameters.values() if p is not None and p.requires_grad
    )
    few = [each for each in (frozen, reached) if sum(p.nbytes for _, _, p in each.values()) <= 2 * trained_bytes]
    return [each for found in few for each in found.values()]


def _parameters_of(modules: Iterable[nn.Module], device: torch.device) -> Iterator[tuple[Any, str, nn.Parameter]]:
    for module in modules:
        for name, each in module._parameters.items():
            if each is not None and own_class(each) is nn.Parameter and each.device == device:
                yield module._parameters, name, each
