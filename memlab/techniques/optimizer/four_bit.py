"""AdamW with moments in 4 bits, as torchao's `AdamW4bit`: its tables and blocks, in torch's own operators.

torchao's needs a compiler: run as it is written it takes ten times the memory of moments in fp32. AdamW works number by number
and blocks are short, so parameters are updated in slices, and what an update takes beside the moments does not grow with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import embedding

from memlab.runtime.state_entries import State
from memlab.techniques.optimizer.state_formats import Group, Moments, OwnAdamW, StateFormat

_BLOCK_ELEMENTS = 128  # that share a scale
_SMALLEST = 4096  # parameters with fewer elements, and those that blocks do not fill, keep fp32 moments
_SLICE_ELEMENTS = 2**20  # whole blocks; an update takes 20 MiB beside the moments
_LEAST_SCALE = 1e-12
_NAMES = {"1": True, "2": False}  # the number of each moment in the names of entries, and whether it has a sign

# the values of the 16 codes, and from which number on one is rounded to the next: 4-bit optimizers, https://arxiv.org/abs/2309.01507,
# in the rounding of torchao.optim.quant_utils
_VALUES = {
    True: (
        *(-0.887499988079071, -0.6625000238418579, -0.4375, -0.21249999105930328, -0.07750000059604645),
        *(-0.0325000025331974, -0.005499999970197678, 0.0, 0.005499999970197678, 0.0325000025331974),
        *(0.07750000059604645, 0.21249999105930328, 0.4375, 0.6625000238418579, 0.887499988079071, 1.0),
    ),
    False: tuple(code / 16 for code in range(1, 17)),
}
_BOUNDARIES = {
    True: (
        *(-0.7749999761581421, -0.550000011920929, -0.32499998807907104, -0.14499999582767487, -0.054999999701976776),
        *(-0.01900000125169754, -0.002749999985098839, 0.002749999985098839, 0.01900000125169754, 0.055000003427267075),
        *(0.14499999582767487, 0.32500001788139343, 0.550000011920929, 0.7750000357627869, 0.9437500238418579),
    ),
    False: tuple((code + 0.5) / 16 for code in range(1, 16)),
}


class FourBitFormat(StateFormat):
    """Two codes in a byte and a scale per block for each moment, or fp32."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.device, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        return ("codes1" if _is_packed(parameter) else "moment1") in state

    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        state = self._empty(parameter, moments.step)
        for number, values in zip(_NAMES, (moments.first, moments.second), strict=True):
            flat = values.detach().reshape(-1)
            for part in _slices(parameter):
                _write(state, number, part, flat[part].float())
        return state

    def decode(self, parameter: torch.nn.Parameter, group: Group, state: State) -> Moments:
        moments = []
        for number in _NAMES:
            values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            for part in _slices(parameter):
                values.view(-1)[part] = _read(state, number, part)
            moments.append(values)
        return Moments(int(state["step"]), *moments)

    def fresh(self, parameter: torch.nn.Parameter) -> State:
        state = self._empty(parameter, 0)
        for number in _NAMES:
            for name in ("moment", "codes", "scale"):
                if f"{name}{number}" in state:
                    state[f"{name}{number}"].zero_()
        return state

    def keeps_all(self, parameter: torch.nn.Parameter) -> bool:
        return not _is_packed(parameter)

    def _empty(self, parameter: torch.nn.Parameter, step: int) -> State:
        elements, device = parameter.numel(), parameter.device
        state: State = {"step": step}
        for number, signed in _NAMES.items():
            if not _is_packed(parameter):
                state[f"moment{number}"] = torch.empty(elements, dtype=torch.float32, device=device)
                continue
            state[f"codes{number}"] = torch.empty(elements // 2, dtype=torch.uint8, device=device)
            state[f"scale{number}"] = torch.empty(elements // _BLOCK_ELEMENTS, dtype=torch.float32, device=device)
            state[f"pairs{number}"], state[f"boundaries{number}"] = self._table(device, signed=signed)
        return state

    def _table(self, device: torch.device, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The two values of each byte, and the boundaries between codes; all parameters of a device share them."""
        if (device, signed) not in self._tables:
            values = _VALUES[signed]
            pairs = [(high, low) for high in values for low in values]
            both = (
                torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in (pairs, _BOUNDARIES[signed])
            )
            self._tables[device, signed] = (next(both), next(both))
        return self._tables[device, signed]


class FourBitAdamW(OwnAdamW):
    """AdamW whose state is in `FourBitFormat`. Numbers are computed in fp32, and the weights take the moments before they are rounded."""

    def update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        numbers = parameter.detach().contiguous().view(-1)  # the parameter's own memory where it is contiguous
        gradient = parameter.grad.detach().reshape(-1)  # type: ignore[union-attr]
        first_left, second_left = (1 - beta ** state["step"] for beta in group["betas"])
        for part in _slices(parameter):
            gradients, weights = gradient[part].float(), numbers[part].float()
            first, second = (_read(state, number, part) for number in _NAMES)
            first.lerp_(gradients, 1 - group["betas"][0])
            second.lerp_(gradients.square(), 1 - group["betas"][1])
            for number, moment in zip(_NAMES, (first, second), strict=True):
                _write(state, number, part, moment)
            divisor = second.sqrt_().div_(second_left**0.5).add_(group["eps"])
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.addcdiv_(first, divisor, value=-group["lr"] / first_left)
            if weights.dtype is not numbers.dtype:
                numbers[part] = weights
        if not parameter.is_contiguous():
            parameter.copy_(numbers.view(parameter.shape))


def _is_packed(parameter: torch.nn.Parameter) -> bool:
    elements: int = parameter.numel()
    return elements >= _SMALLEST and elements % _BLOCK_ELEMENTS == 0


def _slices(parameter: torch.nn.Parameter) -> Iterator[slice]:
    elements = parameter.numel()
    for start in range(0, elements, _SLICE_ELEMENTS):
        yield slice(start, min(start + _SLICE_ELEMENTS, elements))


def _read(state: State, number: str, part: slice) -> torch.Tensor:
    """A slice of a moment in fp32, in memory of its own."""
    if f"moment{number}" in state:
        whole: torch.Tensor = state[f"moment{number}"]
        return whole[part].clone()
    codes, scales = _packed_parts(state, number, part)
    values = embedding(codes.int(), state[f"pairs{number}"]).view(-1, _BLOCK_ELEMENTS)
    return values.mul_(scales.unsqueeze(-1)).view(-1)


def _write(state: State, number: str, part: slice, values: torch.Tensor) -> None:
    """Keep a slice of a moment, which is left as it is."""
    if f"moment{number}" in state:
        state[f"moment{number}"][part] = values
        return
    codes, scales = _packed_parts(state, number, part)
    blocks = values.view(-1, _BLOCK_ELEMENTS)
    torch.linalg.vector_norm(blocks, float("inf"), dim=-1, out=scales)
    scales.clamp_(min=_LEAST_SCALE)
    boundaries = state[f"boundaries{number}"]
    halves = torch.bucketize(blocks / scales.unsqueeze(-1), boundaries, right=True, out_int32=True).view(-1, 2)
    codes.copy_(halves[:, 0].mul_(16).add_(halves[:, 1]))


def _packed_parts(state: State, number: str, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    codes = state[f"codes{number}"][part.start // 2 : part.stop // 2]
    scales = state[f"scale{number}"][part.start // _BLOCK_ELEMENTS : part.stop // _BLOCK_ELEMENTS]
    return codes, scales
