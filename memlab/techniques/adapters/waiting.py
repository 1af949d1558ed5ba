"""What belongs to parameters that do not train meanwhile: their gradients and optimizer state, off the device."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.techniques.offload.spill import Spill

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter


class Waiting:
    """Gradients and optimizer state that wait off the device, and come back bit for bit.

    Entries of optimizers remain the same dicts. What is of few numbers stays where it is.

    Example:
        >>> weight, waiting = torch.nn.Parameter(torch.zeros(64, 64)), Waiting()
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> optimizer.state[weight] = entry = {"momentum_buffer": torch.ones(64, 64)}
        >>> waiting.take_state(optimizer, [weight])
        >>> dict(optimizer.state), waiting.stored_bytes
        ({}, 16384)
        >>> waiting.give_state_back(optimizer, [weight])
        >>> optimizer.state[weight] is entry, entry["momentum_buffer"].sum().item()
        (True, 4096.0)
    """

    def __init__(self) -> None:
        self._spill = Spill()
        self._gradients: dict[int, _Sent] = {}  # by id of the parameter
        # of each optimizer, by id of the parameter
        self._states: MutableMapping[Optimizer, dict[int, _Entry]] = WeakIdKeyDictionary()

    @property
    def stored_bytes(self) -> int:
        """Bytes that are off the device."""
        return self._spill.stored_bytes

    def away(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor off the device."""
        return self._spill.store(tensor)

    # -- gradients -----------------------------------------------------------------------------

    def take_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Take what a loop has not dropped yet: nobody drops it while the parameter does not train."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._gradients[id(parameter)] = self._sent(parameter.grad)
                parameter.grad = None

    def give_gradients_back(self, parameters: Sequence[Parameter]) -> None:
        """Give back what was taken, where there is no newer one."""
        for parameter in parameters:
            if (taken := self._gradients.get(id(parameter))) is not None and parameter.grad is None:
                parameter.grad = taken.back()

    # -- optimizer state -----------------------------------------------------------------------

    def take_state(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Take the entries of some parameters."""
        taken = self._states.setdefault(optimizer, {})
        for parameter in parameters:
            if state := optimizer.state.get(parameter):
                values = {name: self._sent(value) if _is_large(value) else value for name, value in state.items()}
                taken[id(parameter)] = _Entry(state, values)
                state.clear()  # a loop that holds it would hold its tensors
                del optimizer.state[parameter]

    def give_state_back(self, optimizer: Optimizer, parameters: Sequence[Parameter]) -> None:
        """Give back the entries of some parameters, in the order in which they are given."""
        for parameter in parameters:
            if (kept := self._states.get(optimizer, {}).get(id(parameter))) is not None:
                kept.entry.clear()
                for name, value in kept.values.items():
                    kept.entry[name] = value.back() if isinstance(value, _Sent) else value
                optimizer.state[parameter] = kept.entry

    def forget(self) -> None:
        """Keep nothing: what was given back is in its place."""
        self._gradients.clear()
        self._states.clear()

    def copied(self) -> Callable[[], None]:
        """Copy what waits; return what has that wait again."""
        gradients = dict(self._gradients)
        states = {
            optimizer: {
                key: replace(kept, values={name: _copy(value) for name, value in kept.values.items()})
                for key, kept in entries.items()
            }
            for optimizer, entries in self._states.items()
        }

        def restore() -> None:
            self._gradients = gradients
            self._states.clear()
            self._states.update(states)

        return restore

    def _sent(self, tensor: torch.Tensor) -> _Sent:
        return _Sent(self.away(tensor), tensor.device)


@dataclass(frozen=True)
class _Sent:
    """A tensor off its device."""

    values: torch.Tensor
    device: torch.device

    def back(self) -> torch.Tensor:
        return self.values.to(self.device, copy=True)


@dataclass(frozen=True)
class _Entry:
    """State of one parameter."""

    entry: dict[str, Any]  # the optimizer's, which a loop may hold
    values: dict[str, Any]  # what it held


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_large(value: Any) -> bool:
    """Return whether it is worth a copy; a tensor of a class of its own may see to its place by itself."""
    return (
        type(value) in (torch.Tensor, FakeTensor) and value.numel() >= SMALL_ELEMENTS and not hasattr(value, "is_paged")
    )
