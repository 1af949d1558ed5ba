"""Parameter groups that optimizers get while gradients are released: `hear_of_groups`."""

from __future__ import annotations

import functools
import weakref
from contextlib import ExitStack
from typing import Any

import torch

Optimizer = torch.optim.Optimizer


hearing: weakref.WeakSet[Any] = weakref.WeakSet()  # techniques that are told, by `group_added`
_instead_of: list[Any] = []  # what ours stands in for, while it does: torch's own, or what a library has put there


def hear_of_groups(technique: Any, undo: ExitStack) -> None:
    """Tell a technique of parameters that optimizers get, until undone."""
    hearing.add(technique)
    undo.callback(hear_no_more, technique)
    if not _instead_of:
        _instead_of.append(Optimizer.add_param_group)
        Optimizer.add_param_group = _add_param_group  # type: ignore[method-assign, assignment]


def hear_no_more(technique: Any) -> None:
    """Tell a technique no longer."""
    hearing.discard(technique)
    # below what somebody has put over it since, it stays and passes on
    if not hearing and Optimizer.add_param_group is _add_param_group:
        Optimizer.add_param_group = _instead_of.pop()  # type: ignore[method-assign]


@functools.wraps(Optimizer.add_param_group)
def _add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
    _instead_of[-1](optimizer, param_group)
    for each in [*hearing]:
        each.group_added(optimizer)
