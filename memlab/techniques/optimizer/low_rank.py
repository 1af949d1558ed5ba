"""APOLLO: AdamW whose moments are those of gradients in a random subspace (https://arxiv.org/abs/2412.05270).

The update is the gradient itself; how far each channel moves is read from AdamW's step in the subspace. A projection is a
tensor of the state here, where packages keep it in an object beside it, and drawn from a generator of its own: a loop's random numbers stay.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.runtime.state_entries import State
from memlab.techniques.optimizer.state_formats import Group, Moments, OwnAdamW, StateFormat

_MOST_RANK, _SHARE = 128, 4  # a subspace has as many dimensions, or a quarter of the matrix's shorter side
_STEPS_OF_A_PROJECTION = 200
_GROWTH = 1.01  # of an update's norm from one step to the next, at most
_TINY = 1e-8


class LowRankFormat(StateFormat):
    """Both moments in a subspace, the projection to it, and the norm of the last update."""

    keeps_second = False  # of a sum over the subspace each number has its share only

    def holds(self, parameter: torch.nn.Parameter, state: State) -> bool:
        return "projection" in state

    def encode(self, parameter: torch.nn.Parameter, group: Group, moments: Moments) -> State:
        state = self._empty(parameter, moments.step)
        rank, _ = state["projection"].shape
        # in expectation over projections; the second moment's is the same in all dimensions of the subspace
        first, second = _upright(moments.first).float(), _upright(moments.second)
        state["first"] = state["projection"] @ first
        state["second"] = second.sum(0, dtype=torch.float32).div_(rank).repeat(rank, 1)
        return state

    def decode(self, parameter: torch.nn.Parameter, group: Group, state: State) -> Moments:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return Moments(0, zeros, zeros)

    def fresh(self, parameter: torch.nn.Parameter) -> State:
        state = self._empty(parameter, 0)
        rank, _ = state["projection"].shape
        for name in ("first", "second"):
            state[name] = torch.zeros(rank, max(parameter.shape), dtype=torch.float32, device=parameter.device)
        return state

    @staticmethod
    def _empty(parameter: torch.nn.Parameter, step: int) -> State:
        # the first update may have any norm
        norm = torch.full((), float("inf"), dtype=torch.float32, device=parameter.device)
        return {"step": step, "projection": _projection(parameter, step), "norm": norm}


class Apollo(OwnAdamW):
    """APOLLO of matrices whose state is in `LowRankFormat`, with a scale for each channel, in steps of AdamW's size."""

    def update(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], _upright(parameter.grad)  # type: ignore[arg-type]
        if state["step"] % _STEPS_OF_A_PROJECTION == 0:
            state["projection"] = _projection(parameter, state["step"])
        state["step"] += 1
        projection, first, second = state["projection"], state["first"], state["second"]
        low = (projection.to(gradient.dtype) @ gradient).float()
        beta1, beta2 = group["betas"]
        first.mul_(beta1).add_(low, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        step = first / second.sqrt().add_(group["eps"])
        # of a vector in a subspace so much shorter, AdamW's step is as much longer
        rank, dimensions = projection.shape
        scale = _norms(step).div_(_norms(low).add_(_TINY)).mul_((dimensions / rank) ** 0.5)
        norm = torch.linalg.vector_norm(scale * _norms(gradient))
        excess = (norm / (state["norm"] + _TINY)).clamp_(min=_GROWTH).div_(_GROWTH)
        # a step without a gradient says nothing of the next one's
        state["norm"] = torch.where(norm > 0, norm / excess, state["norm"])
        corrected = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        scale.div_(excess)
        weights = _upright(parameter.detach())
        weights.addcmul_(gradient, scale.to(weights.dtype), value=-group["lr"] * corrected)
        weights.mul_(1 - group["lr"] * group["weight_decay"])


def _upright(matrix: torch.Tensor) -> torch.Tensor:
    """The same memory with the shorter side first, along which gradients are projected."""
    rows, columns = matrix.shape
    return matrix if rows < columns else matrix.t()


def _norms(matrix: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(matrix, dim=0, dtype=torch.float32)
    return norms


def _projection(parameter: torch.nn.Parameter, step: int) -> torch.Tensor:
    """The projection of a step: the same one wherever it is drawn."""
    short = min(parameter.shape)
    rank = min(_MOST_RANK, -(-short // _SHARE))
    generator = torch.Generator(device="cpu").manual_seed(step // _STEPS_OF_A_PROJECTION)
    drawn = torch.randn(rank, short, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.div_(rank**0.5).to(parameter.device)
