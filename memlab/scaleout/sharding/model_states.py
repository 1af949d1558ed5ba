"""Model states from a number of parameters alone: what they come to, and what each rank and each tier holds of them.

The count per parameter is that of mixed-precision training with Adam: 2 bytes for the weight and 2 for its gradient in
half precision, and 12 for what the update works on (an fp32 copy of the weight and two fp32 moments), 16 in all; 18 with
gradients that are gathered in fp32 (Rajbhandari et al., "ZeRO", section 3.1, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memlab.errors import PlanError, ScaleError

# what each engine divides among ranks
_DIVIDED = {
    "ddp": frozenset[str](),
    "zero1": frozenset({"optimizer state"}),
    "zero2": frozenset({"optimizer state", "gradients"}),
    "zero3": frozenset({"optimizer state", "gradients", "parameters"}),
    "fsdp2": frozenset({"optimizer state", "gradients", "parameters"}),
}
_OFFLOADED = {"optimizer": "optimizer state", "params": "parameters", "gradients": "gradients"}


@dataclass(frozen=True)
class ModelStates:
    """Sizes of a model's states on each rank."""

    parameters: int  # how many parameters the model has
    engine: str  # as in ``--scale``
    ranks: int  # how many
    whole: Mapping[str, int]  # bytes of the model's states, by kind
    on_device: Mapping[str, int]  # bytes on each rank's device, by kind
    offloaded: Mapping[str, int]  # bytes of each rank off its device (in host memory or on NVMe), by kind

    @property
    def whole_bytes(self) -> int:
        return sum(self.whole.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.on_device.values())

    @property
    def offloaded_bytes(self) -> int:
        return sum(self.offloaded.values())


def model_states(
    parameters: int,
    engine: str = "zero3",
    *,
    ranks: int = 1,
    offload: tuple[str, ...] = (),
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> ModelStates:
    """Say what model states come to; activations, gathered layers and buffers come on top.

    Args:
        parameters: how many parameters the model has.
        engine: ddp, fsdp2, zero1, zero2 or zero3.
        ranks: among how many they are divided.
        offload: what is kept off the device: optimizer, gradients, params.
        parameter_bytes: of one parameter.
        gradient_bytes: of one gradient.
        optimizer_bytes: of the optimizer's state of one parameter, with an fp32 copy where there is one.

    Raises:
        PlanError: no such engine, or nothing by that name that could be offloaded.
        ScaleError: numbers that are none of parameters or ranks.

    Example:
        A model of 10¹² parameters on a DGX-2 node of 16 GPUs, with everything on NVMe: the 16 TB that ZeRO-Infinity
        spreads, 1 TB for each GPU.

        >>> states = model_states(10**12, "zero3", ranks=16, offload=("optimizer", "gradients", "params"))
        >>> states.whole_bytes, states.device_bytes, states.offloaded_bytes
        (16000000000000, 0, 1000000000000)
        >>> on_devices = model_states(10**12, "zero3", ranks=512, gradient_bytes=4)
        >>> on_devices.whole_bytes, round(on_devices.device_bytes / 1e9, 1)
        (18000000000000, 35.2)
    """
    if engine not in _DIVIDED:
        raise PlanError(f"engine {engine!r}: allowed are {', '.join(_DIVIDED)}")
    if strange := [name for name in offload if name not in _OFFLOADED]:
        raise PlanError(f"offload {strange[0]!r}: allowed are {', '.join(_OFFLOADED)}")
    for name, number in (("parameters", parameters), ("ranks", ranks)):
        if not isinstance(number, int) or number < 1:
            raise ScaleError(f"{name} {number!r}: expected a whole number, 1 or more")
    each = {"parameters": parameter_bytes, "gradients": gradient_bytes, "optimizer state": optimizer_bytes}
    whole = {kind: parameters * size_bytes for kind, size_bytes in each.items()}
    of_a_rank = {
        kind: -(-parameters // ranks) * each[kind] if kind in _DIVIDED[engine] else whole[kind] for kind in whole
    }
    off = {_OFFLOADED[name] for name in offload}
    return ModelStates(
        parameters,
        engine,
        ranks,
        whole,
        {kind: size for kind, size in of_a_rank.items() if kind not in off},
        {kind: size for kind, size in of_a_rank.items() if kind in off},
    )
