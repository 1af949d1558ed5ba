"""`SplitVerdict`: what the judge finds out about a batch's shape, for the calls of that shape that are split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memlab.errors import RefusalError, listed
from memlab.runtime.aliases import KEEP_WHOLE
from memlab.runtime.containers import Effect
from memlab.techniques.accumulation.merge import Merge
from memlab.techniques.accumulation.noise import Order
from memlab.techniques.accumulation.split import Outputs


@dataclass(frozen=True)
class Left:
    """Rule by which values that a forward leaves in one place are combined."""

    merges: tuple[Merge, ...] | None  # one for each leaf; None where items of lists are put one after another


@dataclass(frozen=True)
class SplitVerdict:
    """Result of a judgement."""

    merges: Mapping[int, Merge]  # of outputs that are neither joined nor weighted, by position
    left: Mapping[str, Left]  # what is left beside the output, by name
    changing: frozenset[str]  # names of tensors that are written in place
    rows: int  # rows that were run
    generators: tuple[Any, ...] = ()  # of random numbers, which the model refers to
    starts: frozenset[Any] = frozenset()  # what was in the places before, see `start_of`
    # whether numbers of Python and NumPy are drawn one after another, part by part; else each part draws the same
    goes_on: bool = True
    needs_graph: bool = False  # whether a call without gradients gives something else
    leading: frozenset[int] = frozenset()  # outputs that others are computed from
    chooses: bool = False  # whether the model takes indices, or numbers of Python, from values it has computed
    draws: bool = False  # whether the model draws random numbers with torch
    order: Order = Order.ROWS  # in which they follow the rows

    def knows(self, outputs: Outputs) -> bool:
        """Return whether a call has left something in the places where the judged one did, and in no other."""
        return {*outputs.spec.children[1].children_by_name()} == {*self.left}


def unjudged(what: str) -> RefusalError:
    """The refusal of a call of which no two rows could be judged."""
    reason = f"{what}, and there is no memory to see what the whole batch would leave"
    return RefusalError("accumulation", reason, KEEP_WHOLE)


def making(name: str, made: Sequence[str]) -> str:
    """Return why a call of a model is not split that makes parameters of these names."""
    return f"the forward pass of {name} makes parameters ({listed(made)}), and each micro-batch would make its own"


def start_of(effects: Mapping[str, Effect], rows: int) -> frozenset[Any]:
    """Return the kinds of things that were in the places a forward writes to; a state of a batch's rows is another than none."""

    def kind(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return (type(value), *(size == rows for size in value.shape)) if is_tensor else type(value)

    return frozenset((name, kind(effect.before)) for name, effect in effects.items() if effect.kind == "set")
