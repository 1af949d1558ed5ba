"""Formats in which optimizers keep Adam's moments, and translation between them.

Every format decodes to `Moments` and encodes from them, one parameter at a time. Second moments are
exchanged as Adam accumulates them, that is without bias correction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from memlab.extras import require
from memlab.runtime.buckets import counts_on_device
from memlab.runtime.state_entries import State

Group = Mapping[str, Any]
_BLOCK_ELEMENTS = 256  # bitsandbytes: elements that share one scale in an 8-bit optimizer
_PAGED_ELEMENTS = 100_000  # bitsandbytes pages tensors from this size on
_TINY = 1e-30  # Adafactor's own floor of a second moment


@dataclass(frozen=True)
class Moments:
    """Adam's state of one parameter."""

    step: int  # number of updates so far
    first: torch.Tensor  # moving average of the gradient
    second: torch.Tensor  # moving average of the squared gradient

    def to(self, dtype: torch.dtype) -> Moments:
        """The same moments in another dtype."""
        return Moments(self.step, self.first.to(dtype), self.second.to(dtype))


class OwnAdamW(torch.optim.Optimizer, ABC):
    """An AdamW that is written here, for state in a format that torch's own cannot read."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    @abstractmethod
    def update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """Update one parameter, with the settings of its group."""


class StateFormat(ABC):
    """One way of keeping moments."""

    keeps_first: ClassVar[bool] = True  # whether the first moment survives
    keeps_second: ClassVar[bool] = True  # whether the second moment survives, at least approximately
    follows_dtype: ClassVar[bool] = False  # whether moments must have the dtype of their parameter
    counts_updates: ClassVar[bool] = True  # whether the optimizer counts the updates of a parameter in its "step"
    # those of its entries, where it can be the format of the user's own optimizer
    names: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        """Return whether the state of a parameter is in this format."""

    @abstractmethod
    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        """Write moments in this format; new tensors, the old ones stay as they are."""

    @abstractmethod
    def decode(self, parameter: torch.nn.Parameter, group: Group, state: State) -> Moments:
        """Read moments out of this format."""

    def keeps_all(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether moments in fp32 survive bit for bit."""
        return self.keeps_first and self.keeps_second

    def fresh(self, parameter: torch.nn.Parameter) -> State | None:
        """State before the first update, or None to let the optimizer create it."""
        return None


class TorchAdamFormat(StateFormat):
    """torch.optim.Adam and AdamW: two tensors like the parameter, and a step tensor."""

    follows_dtype = True
    names = frozenset({"step", "exp_avg", "exp_avg_sq"})

    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        return self.names <= state.keys()

    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        return {
            "step": _step_tensor(parameter, group, moments.step),
            "exp_avg": _like(parameter, moments.first),
            "exp_avg_sq": _like(parameter, moments.second),
        }

    def decode(self, parameter: torch.nn.Parameter, group: Group, state: State) -> Moments:
        return Moments(int(state["step"]), state["exp_avg"], state["exp_avg_sq"])


def _step_tensor(parameter: torch.nn.Parameter, group: Group, step: int) -> torch.Tensor:
    """The step as torch would have made it: on the host unless the kernel reads it on the device."""
    is_double = torch.get_default_dtype() is torch.float64 and not group.get("fused")
    dtype = torch.float64 if is_double else torch.float32
    return torch.tensor(float(step), dtype=dtype, device=parameter.device if counts_on_device(group) else "cpu")


def _like(parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """A copy of values in the memory layout of their parameter."""
    return torch.empty_like(parameter, dtype=values.dtype, requires_grad=False).copy_(values)


class BnbFormat(StateFormat):
    """Optimizers of bitsandbytes: 8 bits per value with a scale per block, or fp32."""

    # the number of each moment in the names of entries, and whether it has a sign
    signed: ClassVar[Mapping[str, bool]]

    def __init__(self, bits: int = 8, smallest_8bit: int = 4096, paged: bool = False) -> None:
        self.bits = bits  # 8 or 32
        self.smallest_8bit = smallest_8bit  # parameters with fewer elements keep fp32 moments
        self.paged = paged  # keep the moments in CUDA's unified memory
        self._functional = require("bitsandbytes").functional
        self._maps: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        if {name for name in state if name.startswith("state")} != {f"state{number}" for number in self.signed}:
            return False
        is_paged = hasattr(state["state1"], "is_paged")
        return (state["state1"].dtype == self._dtype(parameter)) and is_paged == self._is_paged(parameter)

    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        state: State = {"step": moments.step}
        for (number, signed), values in zip(self.signed.items(), (moments.first, moments.second), strict=False):
            if self._dtype(parameter) is torch.float32:
                state[f"state{number}"] = self._placed(parameter, _flat_fp32(values).clone())
                continue
            state[f"qmap{number}"] = codebook = self._map_on(parameter.device, signed=signed)
            codes, state[f"absmax{number}"] = self._quantized(values, codebook)
            state[f"state{number}"] = self._placed(parameter, codes)
        return state

    def decode(self, parameter: torch.nn.Parameter, group: Group, state: State) -> Moments:
        moments = [self._read(parameter, state, number) for number in self.signed]
        return Moments(int(state["step"]), moments[0], moments[-1])

    def fresh(self, parameter: torch.nn.Parameter) -> State:
        # made here and not by bitsandbytes, whose page manager keeps paged buffers for ever
        dtype = self._dtype(parameter)
        state: State = {"step": 0}
        for number, signed in self.signed.items():  # contiguous, as bitsandbytes makes its parameters
            zeros = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            state[f"state{number}"] = self._placed(parameter, zeros)
            if dtype is torch.uint8:
                state[f"qmap{number}"] = self._map_on(parameter.device, signed=signed)
                blocks = -(-parameter.numel() // _BLOCK_ELEMENTS)
                state[f"absmax{number}"] = torch.zeros(blocks, device=parameter.device, dtype=torch.float32)
        return state

    def keeps_all(self, parameter: torch.nn.Parameter) -> bool:
        return super().keeps_all(parameter) and self._dtype(parameter) is torch.float32

    def _dtype(self, parameter: torch.nn.Parameter) -> torch.dtype:
        return torch.uint8 if self.bits == 8 and parameter.numel() >= self.smallest_8bit else torch.float32

    def _is_paged(self, parameter: torch.nn.Parameter) -> bool:
        return self.paged and parameter.is_cuda and parameter.numel() >= _PAGED_ELEMENTS

    def _map_on(self, device: torch.device, *, signed: bool) -> torch.Tensor:
        """The codebook of moments with or without a sign; all parameters of a device share them."""
        if device not in self._maps:
            create = self._functional.create_dynamic_map
            self._maps[device] = (create(signed=False).to(device), create(signed=True).to(device))
        return self._maps[device][signed]

    def _quantized(self, values: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, quantization = self._functional.quantize_blockwise(
            _flat_fp32(values), code=codebook, blocksize=_BLOCK_ELEMENTS
        )
        return codes, quantization.absmax

    def _read(self, parameter: torch.nn.Parameter, state: State, number: str) -> torch.Tensor:
        codes: torch.Tensor = state["state" + number]
        if codes.dtype is not torch.uint8:
            return codes
        values: torch.Tensor = self._functional.dequantize_blockwise(
            codes.to(parameter.device),  # paged ones say they are on the host
            absmax=state["absmax" + number],
            code=state["qmap" + number],
            blocksize=_BLOCK_ELEMENTS,
        )
        return values

    def _placed(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        if not self._is_paged(parameter):
            return values
        buffer: torch.Tensor = self._functional.get_paged(*values.shape, dtype=values.dtype, device=parameter.device)
        return buffer.copy_(values)


class BnbAdamFormat(BnbFormat):
    """bitsandbytes' Adam family: both moments."""

    signed: ClassVar[Mapping[str, bool]] = {"1": True, "2": False}
    names = frozenset({"step"} | {f"{name}{number}" for name in ("state", "qmap", "absmax") for number in (1, 2)})


class BnbLionFormat(BnbFormat):
    """bitsandbytes' Lion: a running mean of the gradient, as Adam's first moment is."""

    keeps_second = False
    signed: ClassVar[Mapping[str, bool]] = {"1": True}


def _flat_fp32(values: torch.Tensor) -> torch.Tensor:
    """Values as bitsandbytes walks them: fp32, in the order of their indices."""
    return values.detach().float().contiguous()


class AdafactorFormat(StateFormat):
    """transformers' Adafactor without momentum: means of the squared gradient over rows and columns."""

    keeps_first = False

    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        return "exp_avg" not in state and ("exp_avg_sq_row" in state or "exp_avg_sq" in state)

    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        # Adafactor's decay starts at zero, so its averages are those of Adam after bias correction
        second = (moments.second.float() / max(_bias_correction(group, moments.step), _TINY)).add_(_TINY)
        state: State = {"step": moments.step, "RMS": 0}
        if parameter.dim() < 2:
            return state | {"exp_avg_sq": second}
        return state | {"exp_avg_sq_row": second.mean(dim=-1), "exp_avg_sq_col": second.mean(dim=-2)}

    def decode(self, parameter: torch.nn.Parameter, group: Group, state: State) -> Moments:
        step = int(state["step"])
        second = _unfactored(state) * _bias_correction(group, step)
        return Moments(step, torch.zeros_like(second), second)


def _bias_correction(group: Group, step: int) -> float:
    return float(1.0 - float(group["betas"][1]) ** step)


def _unfactored(state: State) -> torch.Tensor:
    if "exp_avg_sq" in state:
        whole: torch.Tensor = state["exp_avg_sq"].float()
        return whole
    rows, columns = state["exp_avg_sq_row"].float(), state["exp_avg_sq_col"].float()
    share = rows / rows.mean(dim=-1, keepdim=True).clamp_min_(_TINY)
    return torch.mul(share.unsqueeze(-1), columns.unsqueeze(-2))


class NoMomentsFormat(StateFormat):
    """SGD without momentum: only a count of the updates, to know whether there were any."""

    keeps_first = False
    keeps_second = False
    counts_updates = False

    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        return state.keys() == {"step"}

    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        return {"step": moments.step}

    def decode(self, parameter: torch.nn.Parameter, group: Group, state: State) -> Moments:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return Moments(0, zeros, zeros)

    def fresh(self, parameter: torch.nn.Parameter) -> State:
        return {"step": 0}


class MuonFormat(NoMomentsFormat):
    """torch.optim.Muon: a running mean of the gradient, as Adam's first moment is."""

    keeps_first = True
    follows_dtype = True

    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        return "momentum_buffer" in state

    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        return {"step": moments.step, "momentum_buffer": _like(parameter, moments.first)}

    def fresh(self, parameter: torch.nn.Parameter) -> State:
        return {"step": 0, "momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
