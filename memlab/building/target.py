"""Device and number format of a model that is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memlab.errors import BuildError
from memlab.runtime import accelerator

_SHORT_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_BY_NAME = _SHORT_NAMES | {str(dtype).removeprefix("torch."): dtype for dtype in _SHORT_NAMES.values()}


@dataclass(frozen=True)
class BuildTarget:
    """Device and number format of a model to be built."""

    device: torch.device  # where its tensors are to be
    dtype: torch.dtype | None  # format of its floating-point tensors; None leaves the choice to the factory

    @classmethod
    def parse(cls, device: torch.device | str, dtype: torch.dtype | str | None) -> BuildTarget:
        """Read and check what the user gave."""
        return cls(_device(device), _dtype(dtype))


def _device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
        if device.type != "meta":
            # an index, so that "cuda" stays the device that is current now
            return torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise BuildError(f"device {given!r} cannot be used here ({reason}); {_devices_here()}") from error
    raise BuildError(f"device 'meta' holds no values, so nothing can be built there; {_devices_here()}")


def _devices_here() -> str:
    found = ["cpu", *map(str, accelerator.every())]
    return f"devices here: {', '.join(found)}"


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    dtype = _BY_NAME.get(given) if isinstance(given, str) else given
    if given is None or dtype in _SHORT_NAMES.values():
        return dtype
    raise BuildError(
        f"dtype {given!r}: a model is built in one of {', '.join(_SHORT_NAMES)} "
        f"(or torch.float16, torch.bfloat16, torch.float32, torch.float64)"
    )
