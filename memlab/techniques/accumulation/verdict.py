"""`SplitVerdict`: what the judge finds out about a batch's shape, for the calls of that shape that are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.runtime.containers import Effect
from memlab.techniques.accumulation.merge import Merge
from memlab.techniques.accumulation.split import Outputs


@dataclass(frozen=True)
class Left:
    """Rule by which values that a forward leaves in one place are combined.

    Args:
        merges: one for each leaf; None where items of lists are put one after another.
    """

    merges: tuple[Merge, ...] | None


@dataclass(frozen=True)
class SplitVerdict:
    """Result of a judgement.

    Args:
        merges: of outputs that are neither joined nor weighted, by position.
        left: what is left beside the output, by name.
        changing: names of tensors that are written in place.
        rows: rows that were run.
        generators: of random numbers, which the model refers to.
        starts: what was in the places before, see `start_of`.
        goes_on: whether numbers of Python and NumPy are drawn one after another, part by part; else each part draws the same.
        needs_graph: whether a call without gradients gives something else.
        draws: whether the model draws random numbers with torch.
    """

    merges: Mapping[int, Merge]
    left: Mapping[str, Left]
    changing: frozenset[str]
    rows: int
    generators: tuple[Any, ...] = ()
    starts: frozenset[Any] = frozenset()
    goes_on: bool = True
    needs_graph: bool = False
    draws: bool = False

    def knows(self, outputs: Outputs) -> bool:
        """Return whether a call has left something in the places where the judged one did, and in no other."""
        return {*outputs.spec.children[1].children_by_name()} == {*self.left}


def start_of(effects: Mapping[str, Effect], rows: int) -> frozenset[Any]:
    """Return the kinds of things that were in the places a forward writes to; a state of a batch's rows is another than none."""

    def kind(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return (type(value), *(size == rows for size in value.shape)) if is_tensor else type(value)

    return frozenset((name, kind(effect.before)) for name, effect in effects.items() if effect.kind == "set")
