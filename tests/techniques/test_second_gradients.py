"""Gradients of gradients where a model's weights are in what it is given, or stand in it several times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from memlab import Workload, fit
from memlab.rescue.rescuer import Rescuer

Loop = Callable[[nn.Module, torch.Tensor], None]


class Shared(nn.Module):
    """Two blocks, one that runs after each of them, and two layers with the same weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self._block(width) for _ in range(2)])
        self.between = self._block(width)
        self.head, self.tied = nn.Linear(width, width), nn.Linear(width, width)
        self.tied.weight = self.head.weight

    @staticmethod
    def _block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.tied(values)
        for block in self.blocks:
            values = values + self.between(values + block(values))
        return torch.tanh(self.head(values))


def penalty(model: nn.Module, values: torch.Tensor) -> None:
    loss = model(values).square().mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()


def penalty_of_a_call_of_a_call(model: nn.Module, values: torch.Tensor) -> None:
    penalty(on_its_output(model), values)


def on_its_output(model: nn.Module) -> nn.Module:
    """The model called on its own output."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = model(model(values))
            return out

    return Twice()


def backward_that_keeps_its_graph(model: nn.Module, values: torch.Tensor) -> None:
    model(model(values)).square().mean().backward(create_graph=True)
    parameters = list(model.parameters())
    of_slopes = torch.autograd.grad(sum(p.grad.square().sum() for p in parameters), parameters)  # type: ignore[union-attr, arg-type]
    for parameter, gradient in zip(parameters, of_slopes, strict=True):
        parameter.grad = gradient


def penalty_on_an_input_made_of_a_weight(model: nn.Module, values: torch.Tensor) -> None:
    made = values * model.head.weight.diagonal().mean()  # type: ignore[union-attr, operator]
    loss = model(made).square().mean()
    (slope,) = torch.autograd.grad(loss, made, create_graph=True)
    (loss + slope.square().sum()).backward()


def gradients(loop: Loop, flags: str, guard: Rescuer | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Shared(256).double().train()
    values = torch.randn(8, 256, dtype=torch.float64)  # [b, d]
    with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), flags, rescue=guard):
        loop(model, values)
        return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


LOOPS: tuple[Loop, ...] = (
    penalty,
    penalty_of_a_call_of_a_call,
    backward_that_keeps_its_graph,
    penalty_on_an_input_made_of_a_weight,
)
# plans, and whether calls are guarded
PLANS = (
    ("", True),
    ("--accumulate 2", False),
    ("--accumulate 2 --checkpoint", True),
    ("--tile 4", False),
    ("--offload activations", True),
    ("--accumulate 2 --offload params", False),
)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_gradients_of_gradients_are_those_of_the_untouched_loop(loop: Loop) -> None:
    expected = gradients(loop, "")
    for flags, is_guarded in PLANS:
        for one, other in zip(expected, gradients(loop, flags, Rescuer() if is_guarded else None), strict=True):
            assert (one - other).abs().max() <= 1e-9 * one.abs().max(), (flags, is_guarded)


def logits_past_python(model: nn.Module, ids: torch.Tensor) -> None:
    out = model(input_ids=ids, labels=ids)
    (out.loss + torch.vmap(lambda row: row.square().mean())(out.logits).sum() + out.logits.mean()).backward()


def logits_in_a_transform(model: nn.Module, ids: torch.Tensor) -> None:
    out = model(input_ids=ids, labels=ids)
    (out.loss + torch.func.vjp(lambda logits: logits.square().mean(), out.logits)[0]).backward()


def penalty_on_gradients_of_the_loss(model: nn.Module, ids: torch.Tensor) -> None:
    loss = model(input_ids=ids, labels=ids).loss
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()


def penalty_on_gradients_of_logits(model: nn.Module, ids: torch.Tensor) -> None:
    out = model(input_ids=ids, labels=ids)
    likely = out.logits.log_softmax(-1).gather(-1, ids[..., None]).mean()
    slopes = torch.autograd.grad(likely, list(model.parameters()), create_graph=True)
    (out.loss + sum(slope.square().sum() for slope in slopes)).backward()


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize(
    "loop",
    [logits_past_python, logits_in_a_transform, penalty_on_gradients_of_the_loss, penalty_on_gradients_of_logits],
    ids=lambda loop: loop.__name__,
)
def test_a_head_that_shares_its_weight_has_its_gradient_once(loop: Loop, is_tied: bool) -> None:
    def of(flags: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 20000, "n_positions": 16}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **drop, tie_word_embeddings=is_tied)).double().train()
        model.set_attn_implementation("eager")
        ids = torch.randint(0, 20000, (4, 16))  # [b, s]
        with fit(Workload(model, torch.optim.SGD(model.parameters(), lr=0.1)), flags):
            loop(model, ids)
            return [p.grad.clone() for p in model.parameters()]

    expected = of("")
    for flags in ("--chunk-loss", "--accumulate 2"):
        for one, other in zip(expected, of(flags), strict=True):
            assert (one - other).abs().max() <= 1e-6 * one.abs().max(), flags
