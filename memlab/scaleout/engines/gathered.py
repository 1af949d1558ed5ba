"""`Gathered`: what autograd keeps of a gathered parameter, kept as the parameter itself.

A linear layer has autograd keep a view of its weight until the backward pass, and with it the gathered copy that ZeRO 3
frees after the layer's forward. Against that DeepSpeed puts a linear function of its own in place of torch's, for the
whole process and for good. Here the view is made again in the backward pass, of the parameter as it has
been gathered anew by then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.errors import ScaleError
from memlab.runtime.lazy import as_saved


@dataclass(frozen=True)
class _View:
    """View of a parameter: its shape, and where it begins in the parameter's elements."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    start: int


class Gathered:
    """Knows which storages belong to gathered parameters."""

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self._by_address: dict[int, nn.Parameter] = {}
        for module in model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                undo.callback(module.register_forward_pre_hook(self._note).remove)

    def keeping(self) -> AbstractContextManager[Any]:
        pack: Callable[[torch.Tensor], Any] = self._pack
        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def _note(self, module: nn.Module, _inputs: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                self._by_address[parameter.untyped_storage().data_ptr()] = parameter

    def _pack(self, tensor: torch.Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr()
        parameter = self._by_address.get(address)
        # a storage that was freed may have given its address to another one
        if parameter is None or not parameter.numel() or parameter.untyped_storage().data_ptr() != address:
            return as_saved(tensor)
        start = int(tensor.storage_offset() - parameter.storage_offset())
        return _View(parameter, tensor.size(), tensor.stride(), start)


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, _View):
        tensor: torch.Tensor = kept
        return tensor
    data = kept.parameter.detach()
    if not data.numel():
        raise ScaleError("a parameter was not gathered for the backward pass of ZeRO 3: use --scale fsdp2")
    return data.as_strided(kept.size, kept.stride, data.storage_offset() + kept.start)
