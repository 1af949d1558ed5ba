"""Frozen weights beside adapters in fewer bits (QLoRA), and their own bits off the device until the undo.

Rules:

1. What is packed are the frozen weights of the linear layers that adapters can go beside, but for the output layer. Layers and
   parameters remain the user's objects: a parameter has its own values throughout, off the device, so files and copies are of the
   model as it was; the layer's forward pass uses the packed form (`stand_in`).
2. In each product a weight is unpacked to the format of the computation, and dropped; the backward pass unpacks it again. No graph
   keeps it.
3. NF4 is bitsandbytes' (blocks of 64 with a scale in fp32, as `BitsAndBytesConfig` has it by default). INT8 has a scale for each
   row of outputs, and activations are not quantised.
4. What adapters learn beside such weights belongs to them. It is not merged into the weights as they were.

Sources: QLoRA, https://arxiv.org/abs/2305.14314; https://huggingface.co/docs/bitsandbytes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.extras import require
from memlab.plan import BaseBits, Plan
from memlab.runtime.lifetimes import held_by_others
from memlab.runtime.mechanisms import OwnMemory, Turns
from memlab.runtime.stand_ins import stand_in
from memlab.runtime.state_layers import SMALL_ELEMENTS
from memlab.runtime.workload import Workload
from memlab.techniques.adapters.injected import adapters_of
from memlab.techniques.adapters.targets import linear_layers
from memlab.techniques.base import Description, Reduces, Technique, Traits
from memlab.techniques.offload.block_streaming import BlockStreaming, ParameterCopies, can_rest
from memlab.techniques.offload.lending import Lending
from memlab.techniques.offload.spill import Spill, check_parameters_move
from memlab.units import format_bytes

_BLOCK = 64  # weights of NF4 with one scale
_LARGEST_INT8 = 127


class QuantisedBase(Technique, Turns, OwnMemory):
    """Keep the frozen weights beside adapters in fewer bits; see the module for the rules."""

    field = "base"
    descriptions = (
        Description(
            "--lora --base nf4",
            "frozen weights: 4.5 bits each",
            "each weight is unpacked twice a step; its own bits are on the host",
            "weights 9 % off. Undone to the bit",
            "the peak is mostly activations; refused without --lora, and for what is quantised already",
        ),
        Description(
            "--lora --base int8",
            "the same: 8 bits each",
            "as `--base nf4`",
            "weights 0.8 % off",
            "as `--base nf4`",
        ),
        Description(
            "--lora --base bf16",
            "the same: 16 bits each",
            "as `--base nf4`",
            "weights 0.2 % off",
            "as `--base nf4`; weights in 16 bits already",
        ),
    )
    traits = Traits(Reduces.MODEL_STATES, needs_uncompiled=True)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._spill = Spill(say=self.notes.once)
        self._packed: list[_Packed] = []
        self._lending: Lending | None = None  # of their own bits to the loop's own code, beside a GPU

    # -- whether it applies --------------------------------------------------------------------

    def check(self, workload: Workload) -> None:
        if self.plan.base is BaseBits.NF4:
            require("bitsandbytes")
        if self.host.predecessor(self) is not None:
            return  # whose weights are off the device now
        check_parameters_move(workload, self.field, "leave out --base")
        if not self._layers(workload):
            raise RefusalError(
                self.field,
                f"no linear layer of {workload.name} that adapters can go beside has a weight of {SMALL_ELEMENTS} elements or more "
                f"with more bits than {self.plan.base} and a storage of its own",
                "leave out --base",
            )

    def _layers(self, workload: Workload) -> list[Any]:
        """The layers whose weights are packed."""
        model, known = workload.model, adapters_of(workload.model)
        instead = {} if known is None else known.instead
        output = getattr(model, "get_output_embeddings", lambda: None)()
        layers: list[Any] = [*linear_layers(model, instead).values()]
        return [
            layer
            for layer in layers
            if layer is not output
            and can_rest(layer.weight, layer.weight.device if isinstance(layer.weight, FakeTensor) else workload.device)
            and 8 * layer.weight.element_size() > _BITS[self.plan.base]
        ]

    # -- in and out ----------------------------------------------------------------------------

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        layers = self._layers(workload)
        held = held_by_others([layer.weight for layer in layers], self.host.aliases())
        free = [layer for layer in layers if id(layer.weight) not in held]
        before_bytes = sum(layer.weight.nbytes for layer in free)
        # a twin says that it is on the device it stands for
        device = workload.device if workload.has_values else layers[0].weight.device
        streaming = BlockStreaming([], ParameterCopies(device), self._spill)
        for layer in free:
            packed = _KINDS[self.plan.base](layer.weight, is_transposed=not isinstance(layer, nn.Linear))
            self._packed.append(packed)
            undo.callback(self._give_back, layer.weight, streaming)
            streaming.send_away(layer.weight)
            stand_in(layer, "forward", partial(_forward, layer, packed), undo)
        if streaming.link.overlaps:
            weights = [layer.weight for layer in free]
            self._lending = Lending(weights, weights, streaming, streaming.send_away, _let_be)
            undo.callback(self._lending.taken_over)
        now_bytes = sum(tensor.nbytes for tensor in self.held_tensors)
        self.notes.append(
            f"{len(free)} frozen weights in {self.plan.base}: {format_bytes(before_bytes)} → {format_bytes(now_bytes)}; their own bits are "
            "off the device"
        )
        if held:
            self.notes.append(f"{len(held)} frozen weights stay as they are: the loop holds their values")

    def _give_back(self, weight: nn.Parameter, streaming: BlockStreaming) -> None:
        if streaming.resting(weight) is not None:  # else the loop has given it other data, or holds it on the device
            streaming.bring_back(weight, is_held=bool(held_by_others([weight], self.host.aliases() + 1)))

    # -- the loop ------------------------------------------------------------------------------

    def taken_over(self) -> None:
        if self._lending is not None:
            self._lending.taken_over()

    def handed_back(self) -> None:
        if self._lending is not None:
            self._lending.handed_back()

    # -- what it keeps -------------------------------------------------------------------------

    @property
    def held_tensors(self) -> Sequence[torch.Tensor]:
        return [tensor for packed in self._packed for tensor in packed.tensors]

    @property
    def host_bytes(self) -> int:
        return self._spill.stored_bytes


def _let_be(_parameter: nn.Parameter) -> None:
    return None


# --- packed weights --------------------------------------------------------------------------------


class _Packed(ABC):
    """A weight in fewer bits."""

    tensors: Sequence[torch.Tensor]  # that it takes

    def __init__(self, weight: torch.Tensor, *, is_transposed: bool) -> None:
        self.is_transposed = is_transposed  # whether inputs come first, as in layers of GPT-2

    @abstractmethod
    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight for a computation in a format."""


class _Bf16(_Packed):
    def __init__(self, weight: torch.Tensor, *, is_transposed: bool) -> None:
        super().__init__(weight, is_transposed=is_transposed)
        self.tensors = [weight.detach().to(torch.bfloat16)]

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[0].to(dtype)


class _Int8(_Packed):
    def __init__(self, weight: torch.Tensor, *, is_transposed: bool) -> None:
        super().__init__(weight, is_transposed=is_transposed)
        values = weight.detach().float()
        scales = values.abs().amax(0 if is_transposed else 1, keepdim=True).div_(_LARGEST_INT8)
        # a row of zeros has no scale
        scales.masked_fill_(scales == 0, 1.0)
        self.tensors = [values.div(scales).round_().to(torch.int8), scales]

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        numbers, scales = self.tensors
        return numbers.to(dtype).mul_(scales.to(dtype))


class _Nf4(_Packed):
    def __init__(self, weight: torch.Tensor, *, is_transposed: bool) -> None:
        super().__init__(weight, is_transposed=is_transposed)
        require("bitsandbytes")  # which registers the operators
        self._shape = weight.shape
        values = weight.detach().contiguous()
        numbers, scales = torch.ops.bitsandbytes.quantize_4bit(values, _BLOCK, "nf4", torch.uint8)
        self.tensors = [numbers, scales]

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        numbers, scales = self.tensors
        found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(numbers, scales, _BLOCK, "nf4", self._shape, dtype)
        return found


_KINDS: dict[BaseBits, type[_Packed]] = {BaseBits.BF16: _Bf16, BaseBits.INT8: _Int8, BaseBits.NF4: _Nf4}
_BITS = {BaseBits.BF16: 16, BaseBits.INT8: 8, BaseBits.NF4: 4}


def _forward(layer: Any, packed: _Packed, inputs: torch.Tensor) -> torch.Tensor:
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    return _product(inputs, packed, layer.bias, dtype)


class _Product(torch.autograd.Function):
    """Product with a packed weight that does not train."""

    @staticmethod
    def forward(
        context: Any, inputs: torch.Tensor, packed: _Packed, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        context.packed, context.given, context.dtype = packed, inputs.dtype, dtype
        weight = packed.unpacked(dtype)
        return F.linear(
            inputs.to(dtype), weight.t() if packed.is_transposed else weight, None if bias is None else bias.to(dtype)
        )

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        weight = context.packed.unpacked(context.dtype)
        found = gradients[0].to(context.dtype).matmul(weight.t() if context.packed.is_transposed else weight)
        return found.to(context.given), None, None, None


_product: Callable[..., torch.Tensor] = _Product.apply
