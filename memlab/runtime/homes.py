"""The device that a parameter is used on, while its values are kept elsewhere."""

from __future__ import annotations

import torch

from memlab.runtime.lifetimes import WhileAlive

# of the storage its values rest in, which parameters and the aliases of them share
_homes: WhileAlive[torch.device] = WhileAlive()


def home_of(parameter: torch.Tensor) -> torch.device:
    """The device a parameter is used on.

    Example:
        >>> home_of(torch.nn.Parameter(torch.ones(2)))
        device(type='cpu')
    """
    return _homes.of(parameter.untyped_storage()) or parameter.device


def is_at_rest(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's values rest somewhere until they are used."""
    return _homes.of(parameter.untyped_storage()) is not None


def rests(stored: torch.Tensor, home: torch.device) -> None:
    """Remember, as long as its storage lives, where values that rest in a tensor are used."""
    _homes.keep(stored.untyped_storage(), home)
