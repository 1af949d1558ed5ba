"""`HalfWeights`: a model's weights in a 16-bit format for a while, their own bits kept off the device and put back.

1. Every fp32 parameter and saved buffer is replaced by its rounded copy, one at a time; its own data goes to host
   memory beside a GPU, to a file beside the CPU. So the device holds half of the weights, and going back is exact.
   Batch normalisation stays in fp32: its kernels take 16-bit inputs beside fp32 weights and statistics, and not all of
   them take weights and statistics of different formats.
2. Tensors stay the same objects, gradients are set aside (theirs must have the dtype of their parameter).
3. Inputs in fp32 are rounded on the way in, outputs widened on the way out; caches stay as the model makes them.

Autocast was weighed and is not used: it keeps the fp32 weights and holds their casts beside them, half as much again,
and a generation casts every weight once for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.inferring.cache import is_cache
from memlab.plan import Precision, Tier
from memlab.runtime.homes import is_at_rest
from memlab.runtime.modules import CACHE_NAMES
from memlab.techniques.offload.spill import Spill, resolve_tier
from memlab.techniques.precision.first_call import AUTOCAST_DTYPES
from memlab.techniques.precision.pure_bf16 import convertible_buffers


class HalfWeights:
    """Rounds a model's weights, and puts them back."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.dtype = AUTOCAST_DTYPES[precision]
        self._model = model
        self._device = next(model.parameters()).device
        self._spill = Spill(resolve_tier(Tier.AUTO, self._device, "weights"))
        self._own: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._check(precision)

    @property
    def host_bytes(self) -> int:
        return self._spill.stored_bytes

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients that were set aside; they still take memory of the device."""
        return [gradient for _, _, gradient in self._own if gradient is not None]

    def convert(self) -> None:
        """Round the weights. What raises on the way leaves them to be put back by `restore`."""
        with torch.no_grad():
            for tensor in self._convertible():
                gradient = tensor.grad if tensor.is_leaf else None
                self._own.append((tensor, self._spill.store(tensor.data), gradient))
                if gradient is not None:
                    tensor.grad = None
                tensor.data = tensor.data.to(self.dtype)

    def restore(self) -> None:
        """Put everything back, bit for bit; harmless when done.

        Raises:
            torch.OutOfMemoryError: there is no room for the weights in fp32; what was put back stays, and the rest
                can be put back once memory is free.
        """
        with torch.no_grad():
            while self._own:
                tensor, own, gradient = self._own[-1]
                if tensor.dtype is not own.dtype:
                    tensor.data = torch.empty_like(tensor.data, dtype=own.dtype).copy_(own)
                if gradient is not None:
                    tensor.grad = gradient
                self._own.pop()

    def called(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model with inputs in the weights' format."""

        def narrow(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.dtype) if tensor.dtype is torch.float32 else tensor

        named = {name: _converted(value, narrow) for name, value in kwargs.items()}
        return call(*(_converted(value, narrow) for value in args), **named)

    def widened(self, output: Any) -> Any:
        """An output in fp32, as the cell would have got it; caches stay as they are."""
        return _converted(output, lambda tensor: tensor.float() if tensor.dtype is self.dtype else tensor)

    def _convertible(self) -> list[torch.Tensor]:
        norms = [m for m in self._model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        kept = {id(parameter) for norm in norms for parameter in norm.parameters()}
        tensors = [*self._model.parameters(), *convertible_buffers(self._model)]
        return [tensor for tensor in tensors if tensor.dtype is torch.float32 and id(tensor) not in kept]

    def _check(self, precision: Precision) -> None:
        if any(map(is_at_rest, self._model.parameters())):
            raise RefusalError(
                "precision",
                "--offload params is in force, and streams the weights in the format they have",
                "switch it off first (%memfit undo), or leave the format out",
            )
        recurrent = any(isinstance(module, nn.RNNBase) for module in self._model.modules())
        if precision is Precision.FP16 and self._device.type == "cpu" and recurrent:
            raise RefusalError("precision", "the CPU has no fp16 kernels for recurrent layers", "use --bf16 here")


def _converted(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of mappings, lists and tuples with its tensors converted; other objects and caches as they are."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if is_cache(value):
        return value
    if isinstance(value, tuple):
        parts = [_converted(part, convert) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is list:
        return [_converted(part, convert) for part in value]
    if type(value) is dict:
        return {name: part if name in CACHE_NAMES else _converted(part, convert) for name, part in value.items()}
    if isinstance(value, Mapping) and hasattr(value, "to_tuple"):
        # an output of Transformers: attributes and items are the same things
        fields = {name: part if name in CACHE_NAMES else _converted(part, convert) for name, part in value.items()}
        return type(value)(**fields)
    return value
