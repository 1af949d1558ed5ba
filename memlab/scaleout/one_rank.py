"""A process group of one rank, for engines that train in this process.

It has no port and no file; it is there while an engine holds it. A group of one rank that the user has made is used
as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from memlab.errors import RefusalError

_MANY = "use %%memfit --nproc, which starts processes of its own"
# engines that hold the group; it counts only where it was made here
_holders: set[int] = set()
_is_made_here = False


def check() -> None:
    """Refuse where several processes train already.

    Raises:
        RefusalError: this process is one rank of several.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RefusalError("scale", f"this process is one of {dist.get_world_size()} ranks already", _MANY)


def hold(holder: object, device: torch.device) -> None:
    """Have a group until `release`.

    Args:
        holder: whoever needs it.
        device: that tensors are on.
    """
    global _is_made_here  # noqa: PLW0603 - a process has one default group
    _holders.add(id(holder))
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    hook = sys.excepthook
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sys.excepthook = hook  # torch's names the rank in front of every line
    _is_made_here = True


def release(holder: object) -> bool:
    """Let it go; harmless when done.

    Returns:
        Whether nobody holds it any more.
    """
    global _is_made_here  # noqa: PLW0603 - as above
    _holders.discard(id(holder))
    if _holders:
        return False
    if _is_made_here and dist.is_initialized():
        dist.destroy_process_group()
    _is_made_here = False
    return True



@contextmanager
def same_environment() -> Iterator[None]:
    """Take back the environment variables that a library sets within."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
