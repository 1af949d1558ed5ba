"""Changes that engines need in their process: a group of one rank, and nothing that a library sets for good.

The group has no port and no file; it is there while an engine of this process holds it. A group of one rank that the user has
made is used as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from memlab.errors import RefusalError

_MANY = "use %%memfit --nproc, which starts processes of its own"
# DeepSpeed asks for it at every turn
_VARIABLE = "LOCAL_RANK"
# engines that hold the group
_holders: set[int] = set()
# what takes back what was made for them
_undo = ExitStack()


def check() -> None:
    """Refuse where several processes train already."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RefusalError("scale", f"this process is one of {dist.get_world_size()} ranks already", _MANY)


def hold(holder: object, device: torch.device) -> None:
    """Have a group until `release`."""
    if not _holders:
        if _VARIABLE not in os.environ:
            os.environ[_VARIABLE] = str(device.index or 0)
            _undo.callback(os.environ.pop, _VARIABLE, None)
        if not dist.is_initialized():
            _make_group(device)
            _undo.callback(dist.destroy_process_group)
    _holders.add(id(holder))


def backends_for(device: torch.device) -> str:
    """Return the backends of a group of this kind of device: what is offloaded, and checkpoints, talk on the CPU as well."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def at_end(callback: Callable[[], object]) -> None:
    """Have something called when the last holder lets go, before the group ends."""
    _undo.callback(callback)


def release(holder: object) -> None:
    """Let it go; harmless when done."""
    _holders.discard(id(holder))
    if not _holders:
        _undo.close()


def _make_group(device: torch.device) -> None:
    hook = sys.excepthook
    try:
        dist.init_process_group(backends_for(device), store=HashStore(), rank=0, world_size=1)
    finally:
        sys.excepthook = hook  # torch's names the rank in front of every line


@contextmanager
def surroundings_kept() -> Iterator[None]:
    """Take back what a library sets within on the environment and on torch's classes."""
    before = dict(os.environ)
    classes = [(each, dict(vars(each))) for each in (torch.nn.Module, torch.Tensor)]
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        for each, attributes in classes:
            _restore(each, attributes)


def _restore(kind: type, attributes: dict[str, Any]) -> None:
    for name, value in list(vars(kind).items()):
        if name not in attributes:
            delattr(kind, name)
        elif attributes[name] is not value:
            setattr(kind, name, attributes[name])
