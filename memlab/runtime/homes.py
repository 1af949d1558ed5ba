"""The device that a parameter is used on, while its values are kept elsewhere."""

from __future__ import annotations

from collections.abc import MutableMapping
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memlab.runtime.lifetimes import WhileAlive

# of the storage its values rest in, which parameters and the aliases of them share
_homes: WhileAlive[torch.device] = WhileAlive()
_stood_for: MutableMapping[FakeTensorMode, torch.device] = WeakKeyDictionary()


def home_of(parameter: torch.Tensor) -> torch.device:
    """The device a parameter is used on.

    Example:
        >>> home_of(torch.nn.Parameter(torch.ones(2)))
        device(type='cpu')
    """
    return _homes.of(parameter.untyped_storage()) or parameter.device


def stood_for(parameter: torch.Tensor) -> torch.device:
    """Return the device a parameter is used on; of a prediction's fake one, which is on the CPU, the device that it stands for."""
    device = _stood_for.get(parameter.fake_mode) if isinstance(parameter, FakeTensor) else None
    return device or home_of(parameter)


def stand_for(mode: FakeTensorMode, device: torch.device) -> None:
    """Remember which device the fake tensors of a mode stand for."""
    _stood_for[mode] = device


def is_at_rest(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's values rest somewhere until they are used."""
    return _homes.of(parameter.untyped_storage()) is not None


def rests(stored: torch.Tensor, home: torch.device) -> None:
    """Remember, as long as its storage lives, where values that rest in a tensor are used."""
    _homes.keep(stored.untyped_storage(), home)
