"""Tensors in host memory that the loop has been given in place of tensors on a device, as in the state dict of an optimizer.

To the loop they are on the device: a function of torch that uses their values gets a copy there, which goes with it, and what it
writes is written back. Where the loop goes on to hold something of the copy (a view, ``.data``), the tensor stays on the device.
Where there is no room for the copy they are used where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from memlab.runtime.callers import is_memlab_code
from memlab.runtime.homes import home_of, is_at_rest, rests
from memlab.runtime.lifetimes import is_shared
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.touch import WatchedTensors, uses_values
from memlab.runtime.tree import flatten, in_leaves

ASK_FOR_THE_DEVICE = (
    torch.Tensor.get_device,
    torch.Tensor.is_pinned,
    *(getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")),
)


class _Away(WatchedTensors):
    def _asked(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if is_memlab_code(frame) and self._are_own(types):
                return function(*args, **kwargs)
            if function in ASK_FOR_THE_DEVICE:
                return function(torch.empty(0, device=home_of(args[0])))
            is_copied = uses_values(function) or function is torch.Tensor.__deepcopy__
            copies = self._copies(args, kwargs) if is_copied else {}
        with self._left(args, kwargs):
            result = _run_on(copies, function, args, kwargs)
        self.leave([tensor for tensor, _ in copies.values() if not is_at_rest(tensor)])
        return result

    def _copies(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        try:
            with torch.inference_mode(mode=False):  # whose tensors do not tell whether they are written to
                return {id(tensor): (tensor, tensor.to(home_of(tensor))) for tensor in self._watched_in(args, kwargs)}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {}


_away = _Away(tuple)


def sent_away(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in host memory, which to the loop is on the tensor's device; the tensor itself where it is there.

    Example:
        >>> tensor = torch.ones(2)
        >>> sent_away(tensor) is tensor
        True
    """
    return tensor if tensor.device.type == "cpu" else as_on(tensor.device, tensor.cpu())


def as_on(device: torch.device, copy: torch.Tensor) -> torch.Tensor:
    """Have a tensor in host memory be on a device, to the loop."""
    rests(copy, device)
    _away.watch([copy])
    return copy


def _run_on(
    copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    leaves, structure = flatten((args, dict(kwargs)))
    own_args, own_kwargs = structure.put([copies[id(leaf)][1] if id(leaf) in copies else leaf for leaf in leaves])
    versions = {key: copy._version for key, (_, copy) in copies.items()}
    result = function(*own_args, **own_kwargs)
    for key, (tensor, copy) in copies.items():
        if is_shared(copy) or copy.shape != tensor.shape:
            tensor.data = copy
        elif copy._version != versions[key]:
            tensor.copy_(copy)
    own = {id(copy): tensor for tensor, copy in copies.values()}
    return in_leaves(lambda leaf: own.get(id(leaf), leaf), result, of_tensors=False)
