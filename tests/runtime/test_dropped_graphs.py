"""Graphs of calls that no backward pass follows are freed, whatever the model collects in them."""

from __future__ import annotations

import contextvars
import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, fit


@dataclass
class Collected:
    hidden: list[torch.Tensor] = field(default_factory=list)
    last: torch.Tensor | None = None


@dataclass(slots=True)
class Slotted:
    hidden: list[torch.Tensor] = field(default_factory=list)
    last: torch.Tensor | None = None


_WAYS = ("list", "dict of a list", "set", "object", "slots")
_PLACES = ("argument", "context", "attribute")
_variable: contextvars.ContextVar[Any] = contextvars.ContextVar("collects")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.collects: Any = None

    def forward(self, x: torch.Tensor, place: str, collects: Any = None) -> torch.Tensor:
        if place != "argument":
            collects = _variable.get() if place == "context" else self.collects
        result: torch.Tensor = x + self.inner(x)
        if isinstance(collects, dict):
            collects["hidden"].append(result)
        elif isinstance(collects, list):
            collects.append(result)
        elif isinstance(collects, set):
            collects.add(result)
        else:
            collects.hidden.append(result)
            collects.last = result
        return result


class Collecting(nn.Module):
    """Collects what its blocks give, in one of several ways."""

    def __init__(self, way: str, place: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.way, self.place = way, place
        self.kept: Any = None

    def forward(self, x: torch.Tensor, *, keep: bool = False) -> torch.Tensor:
        made = {"list": [], "dict of a list": {"hidden": []}, "set": set(), "object": Collected(), "slots": Slotted()}
        collects: Any = made[self.way]
        token = _variable.set(collects)
        for block in self.blocks:
            block.collects = collects if self.place == "attribute" else None
        for block in self.blocks:
            x = block(x, self.place, collects if self.place == "argument" else None)
        for block in self.blocks:
            block.collects = Collected()
        _variable.reset(token)
        if keep:
            self.kept = collects
        return x


def _graphs() -> int:
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    return sum(each.grad_fn is not None for each in tensors)


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("way", _WAYS)
def test_graphs_of_calls_without_a_backward_pass_are_freed(way: str, place: str) -> None:
    before = _graphs()
    # of what a context variable holds a tile keeps lists, dicts and sets only as they were
    tiled = () if way in ("object", "slots") else ("--tile 2",)
    for flags in ("--checkpoint", "--checkpoint every:2", *tiled):
        model = Collecting(way, place)
        if flags.startswith("--tile"):
            for block in model.blocks:
                block.inner = nn.Sequential(nn.Linear(8, 40_000), nn.Tanh(), nn.Linear(40_000, 8))
        with fit(Workload(model, torch.optim.SGD(model.parameters())), flags):
            for _ in range(3):
                model(torch.randn(4, 8))
            with torch.no_grad():
                model(torch.randn(4, 8))
            assert _graphs() == before, flags


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("way", _WAYS)
def test_graphs_that_are_held_go_on_as_they_are(way: str, place: str) -> None:
    """The loop holds a loss over other calls, and what one call has collected."""
    gradients = []
    for flags in ("", "--checkpoint"):
        torch.manual_seed(0)
        model = Collecting(way, place)
        first, second, third = torch.randn(3, 4, 8)
        with fit(Workload(model, torch.optim.SGD(model.parameters())), flags):
            loss = model(first).square().mean()
            model(second, keep=True)
            loss = loss + model(third).square().mean()
            model(second)
            kept = model.kept
            hidden = kept["hidden"] if isinstance(kept, dict) else getattr(kept, "hidden", kept)
            assert len(hidden) == 3
            sum(each.mean() for each in hidden).backward()
            loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, other in zip(*gradients, strict=True):
        assert torch.equal(plain, other)


def test_a_graph_that_is_held_over_several_calls_is_freed_when_it_is_dropped() -> None:
    before = _graphs()
    model = Collecting("object", "argument")
    with fit(Workload(model, torch.optim.SGD(model.parameters())), "--checkpoint"):
        model(torch.randn(4, 8), keep=True)
        for dropped_after in range(12):
            if dropped_after == 5:
                model.kept = None
            model(torch.randn(4, 8)).sum().backward()
        assert _graphs() == before


def test_context_variables_that_hold_themselves_or_much_are_no_obstacle() -> None:
    model = Collecting("list", "argument")
    endless: dict[str, Any] = {"much": [*range(100_000)]}
    endless["itself"] = endless
    token = contextvars.ContextVar[Any]("endless").set(endless)
    with fit(Workload(model, torch.optim.SGD(model.parameters())), "--checkpoint"):
        model(torch.randn(4, 8)).sum().backward()
    assert token.var.get() is endless
    token.var.reset(token)
