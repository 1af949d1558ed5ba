"""Choice of the blocks to recompute, so that what blocks keep between forward and backward fits into so many bytes.

Rules:

1. The budget counts what the graph of each block keeps of one training forward, in distinct storages: results
   of operators inside blocks that are not recomputed, and the inputs of all blocks, which stay either way. Parameters do
   not count, nor what lies outside of the blocks (embeddings, the head's logits).
2. What blocks keep is measured in the first training forward of a shape. All blocks are recomputed in it, and each is run
   once more, with its graph, which is dropped at once: so no more than one block is held at a time. Where a model repeats no
   block, parts of it stand for blocks (`segments`), and are measured when they are chosen.
3. The choice holds for batches of that shape from the next forward on, and for smaller ones down to half the elements:
   those keep less. Any other shape is measured anew.
4. Of equal blocks the first are recomputed: the backward pass gets to them when the others have been let go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memlab.errors import RefusalError
from memlab.techniques.checkpointing.kept import Kept
from memlab.techniques.checkpointing.rerun import Part
from memlab.units import MIB, exact_size, format_bytes

# a choice serves batches down to this share of the elements it was made for
_LEAST_SHARE = 0.5

_Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass
class _Blocks:
    """Bytes that blocks kept in one training forward, in the order in which they ran."""

    own_bytes: dict[Part, int] = field(default_factory=dict)
    cost: dict[Part, float] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)

    def add(self, block: Part, kept: Kept) -> None:
        """Take in one run; a block that runs several times keeps something each time."""
        self.own_bytes[block] = self.own_bytes.get(block, 0) + kept.own_bytes
        self.cost[block] = self.cost.get(block, 0.0) + kept.cost
        self.inputs |= kept.inputs

    @property
    def input_bytes(self) -> int:
        return sum(self.inputs.values())

    @property
    def all_bytes(self) -> int:
        """Return what is kept where nothing is recomputed."""
        return self.input_bytes + sum(self.own_bytes.values())


@dataclass(frozen=True)
class _Choice:
    """The blocks that are recomputed, and a line about it."""

    recomputed: frozenset[Part]
    words: str


class Budget:
    """Chooses the blocks of one model, for each shape of its batches."""

    def __init__(self, budget_bytes: int, name: str) -> None:
        self._budget_bytes = budget_bytes
        self._name = name
        self._choices: dict[_Shape, _Choice] = {}
        self._now: _Choice | None = None
        self._measured: _Blocks | None = None
        self.notes: list[str] = []

    @contextmanager
    def applied(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Budget]:
        """Recompute what was chosen in one training forward of the model, or see what there is to choose from."""
        shape = _shape_of(args, kwargs)
        self._now = self._choice_for(shape)
        self._measured = _Blocks() if self._now is None else None
        try:
            yield self
            if self._measured is not None and self._measured.own_bytes:
                self._choices[shape] = self._chosen(self._measured)
        finally:
            self._now = self._measured = None

    @property
    def is_measuring(self) -> bool:
        """Return whether what blocks keep is not known yet for this call."""
        return self._measured is not None

    def add(self, block: Part, kept: Kept) -> None:
        """Take in what one run of a block keeps."""
        assert self._measured is not None
        self._measured.add(block, kept)

    def decide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], kept: Iterable[tuple[Part, Kept]]) -> None:
        """Choose for batches of a shape, of blocks that have been measured together."""
        blocks = _Blocks()
        for block, of_block in kept:
            blocks.add(block, of_block)
        self._choices[_shape_of(args, kwargs)] = self._chosen(blocks)

    def forget(self) -> None:
        """Choices so far were made for batches that will not come."""
        self._choices.clear()

    def recomputes(self, block: Part) -> bool:
        """Return whether this block, about to run, is recomputed; where that is not known yet, it is."""
        return self._now is None or block in self._now.recomputed

    def _choice_for(self, shape: _Shape) -> _Choice | None:
        """A choice made for this shape, or for one little larger."""
        return next((choice for known, choice in self._choices.items() if _serves(known, shape)), None)

    def _chosen(self, blocks: _Blocks) -> _Choice:
        to_free = blocks.all_bytes - self._budget_bytes
        keys = [*blocks.own_bytes]
        chosen = cheapest([blocks.own_bytes[key] for key in keys], [blocks.cost[key] for key in keys], to_free)
        if chosen is None:
            choice = self._over_budget(blocks)
        else:
            recomputed = frozenset(keys[position] for position in chosen)
            kept_bytes = blocks.all_bytes - sum(blocks.own_bytes[key] for key in recomputed)
            choice = _Choice(recomputed, self._words(len(recomputed), blocks, kept_bytes))
        self.notes = [choice.words]
        return choice

    def _words(self, recomputed: int, blocks: _Blocks, kept_bytes: int) -> str:
        return (
            f"{recomputed} of {len(blocks.own_bytes)} blocks recomputed: {format_bytes(kept_bytes)} kept of "
            f"{format_bytes(blocks.all_bytes)}, budget {format_bytes(self._budget_bytes)}"
        )

    def _over_budget(self, blocks: _Blocks) -> _Choice:
        """All blocks, for a later batch; the first batch is refused, as no step has been made under this plan yet."""
        if self._choices:
            words = self._words(len(blocks.own_bytes), blocks, blocks.input_bytes)
            return _Choice(frozenset(blocks.own_bytes), f"{words}, which a batch of this shape exceeds")
        enough = exact_size(math.ceil(blocks.input_bytes / MIB) * MIB)
        raise RefusalError(
            "checkpointing",
            f"with all {len(blocks.own_bytes)} blocks of {self._name} recomputed they still keep their inputs, "
            f"{format_bytes(blocks.input_bytes)}, and the budget is {format_bytes(self._budget_bytes)}",
            f"use --checkpoint budget:{enough} or more, or add --accumulate N, which divides them",
        )


def _shape_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Shape:
    tensors = (leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor))
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _serves(known: _Shape, shape: _Shape) -> bool:
    """Return whether what was chosen for one shape will do for another: the same, or smaller by not too much."""
    if known == shape:
        return True
    alike = len(known) == len(shape) and all(
        dtype is other_dtype and len(sizes) == len(others) and all(a >= b for a, b in zip(sizes, others, strict=True))
        for (sizes, dtype), (others, other_dtype) in zip(known, shape, strict=True)
    )
    return alike and all(
        math.prod(others) >= _LEAST_SHARE * math.prod(sizes)
        for (sizes, _), (others, _) in zip(known, shape, strict=True)
    )


# bytes freed so far, their cost, and how many members of each kind are chosen, the first kind first
_State = tuple[int, float, tuple[int, ...]]


def cheapest(freed: Sequence[int], costs: Sequence[float], needed: int) -> tuple[int, ...] | None:
    """Choose what to give up so that enough is freed at the least cost.

    Exact. Things that are equal in both are counted, not told apart, and what costs more and frees less than another choice
    is not followed any further; so dozens of blocks of a few kinds take next to no time.

    Returns:
        Positions of the chosen, in order; of equal things the first. None when all together free less than needed.

    Example:
        >>> cheapest([100, 100, 60], [5.0, 5.0, 2.0], 90), cheapest([100, 100, 60], [5.0, 5.0, 2.0], 150)
        ((0,), (0, 2))
        >>> cheapest([1, 2], [1.0, 1.0], 4) is None
        True
    """
    if needed <= 0:
        return ()
    kinds: dict[tuple[int, float], list[int]] = {}
    for position, kind in enumerate(zip(freed, costs, strict=True)):
        if kind[0] > 0:
            kinds.setdefault(kind, []).append(position)
    states: list[_State] = [(0, 0.0, ())]
    for (bytes_each, cost_each), members in kinds.items():
        more = (
            (done + count * bytes_each, cost + count * cost_each, (*counts, count))
            for done, cost, counts in states
            for count in range(len(members) + 1)
            if count == 0 or done + (count - 1) * bytes_each < needed
        )
        states = _undominated(more, needed)
    best = states[-1]
    if best[0] < needed:
        return None
    chosen = (member for members, count in zip(kinds.values(), best[2], strict=True) for member in members[:count])
    return tuple(sorted(chosen))


def _undominated(states: Iterable[_State], needed: int) -> list[_State]:
    """States that no other one beats in bytes and in cost, by bytes; more than what is needed counts as no more."""
    capped = [(min(done, needed), cost, counts) for done, cost, counts in states]
    kept: list[_State] = []
    cheapest_so_far = float("inf")
    for state in sorted(capped, key=lambda state: (-state[0], state[1])):
        if state[1] < cheapest_so_far:
            cheapest_so_far = state[1]
            kept.append(state)
    return kept[::-1]
