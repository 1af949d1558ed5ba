"""Leaves that a forward pass makes, or that it asks gradients of: what the loop reads there is what it reads without memlab."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit

Read = Callable[[nn.Module, torch.Tensor, Any], torch.Tensor]


class Field(nn.Sequential):
    """A network of coordinates, whose gradients the loop looks at."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Linear(2, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
        self.kind = kind
        self.seen: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> Any:
        if self.kind == "argument":
            return super().forward(rows.requires_grad_())
        leaf = rows.clone().detach().requires_grad_()
        if self.kind == "attribute":
            self.seen = leaf
        out = super().forward(leaf)
        return (out, leaf) if self.kind == "output" else out


def leaf_of(model: nn.Module, rows: torch.Tensor, out: Any) -> torch.Tensor:
    """Return the leaf of a call."""
    return {"argument": rows, "attribute": model.seen, "output": out[-1]}[model.kind]  # type: ignore[return-value, index]


def gradient_left(model: nn.Module, rows: torch.Tensor, out: Any) -> torch.Tensor:
    leaf = leaf_of(model, rows, out)
    (out[0] if model.kind == "output" else out).square().mean().backward()
    assert leaf.grad is not None
    return leaf.grad


def penalty(model: nn.Module, rows: torch.Tensor, out: Any) -> torch.Tensor:
    value = out[0] if model.kind == "output" else out
    (gradient,) = torch.autograd.grad(value.sum(), leaf_of(model, rows, out), create_graph=True)
    (value.square().mean() + gradient.square().mean()).backward()
    return gradient


def trained(kind: str, read: Read, flags: str, *, rescue: bool = False, session: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Field(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with fit(Workload(model, optimizer), flags, rescue=rescue) if session else nullcontext():
        for _ in range(2):
            rows = torch.randn(8, 2)
            optimizer.zero_grad()
            found.append(read(model, rows, model(rows)).detach().clone())
            optimizer.step()
    return [*found, *(each.detach() for each in model.parameters())]


KINDS, READS = ("argument", "attribute", "output"), (gradient_left, penalty)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("flags", "rescue"), [("", True), ("--checkpoint", False), ("--offload activations", True)])
def test_gradients_of_a_leaf_are_there(flags: str, rescue: bool, kind: str, read: Read) -> None:
    expected = trained(kind, read, "", session=False)
    found = trained(kind, read, flags, rescue=rescue)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("argument", "accumulation: Field has its argument[0][0] require gradients: a split batch gives it none"),
        ("attribute", "accumulation: seen of Field is a leaf that its forward pass makes: a split batch gives it no gradient"),
        ("output", "accumulation: output[1] of Field is a leaf that its forward pass makes: a split batch gives it no gradient"),
    ],
)  # fmt: skip
def test_a_split_batch_has_no_such_leaf(kind: str, line: str) -> None:
    with pytest.raises(RefusalError) as caught:
        trained(kind, gradient_left, "--accumulate 2")
    assert str(caught.value) == f"{line}; use --checkpoint or --offload activations, which keep the batch whole"


@pytest.mark.parametrize(
    ("kind", "what"), [("argument", "has an argument require"), ("output", "returns a leaf that requires")]
)
def test_in_pure_bf16_it_would_be_another_tensor(kind: str, what: str) -> None:
    with pytest.raises(RefusalError) as caught:
        trained(kind, gradient_left, "--precision pure-bf16")
    assert str(caught.value) == (
        f"precision: the forward pass {what} gradients, which would be one of its own in bf16; use --bf16"
    )


def test_under_fp16_its_gradient_is_true() -> None:
    expected, *_ = trained("output", gradient_left, "", session=False)
    found, *_ = trained("output", gradient_left, "--fp16")
    assert (found - expected).norm() < 5e-3 * expected.norm()
