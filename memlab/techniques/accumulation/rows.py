"""Rows of a batch that tell most about it, where not all of them can be run together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from memlab.techniques.accumulation.split import Call, Layout, LossRule, counts_by

# rows among which unlike ones are looked for
FEW_ROWS = 8


def telling_rows(call: Call, layout: Layout, rules: list[LossRule]) -> list[int]:
    """Return up to three rows that differ most in their targets, so that they tell rules apart."""
    rows = [layout.take(call, row, row + 1) for row in range(min(layout.rows, 64))]
    # what may be weights of classes is any vector of the model, such as a table of frequencies
    for rule in sorted(rules, key=lambda rule: rule.name == "classes"):
        if rule.leaf < 0 or rule.counts_ones:
            continue
        counts = counts_by([rule], rows, layout)[0]
        order = sorted((row for row in range(len(rows)) if counts[row]), key=lambda row: counts[row])
        if len(order) == 1:  # the only row with a target, and any other
            return [order[0], 1 if order[0] == 0 else 0][: len(rows)]
        if len(order) >= 2 and counts[order[0]] != counts[order[-1]]:
            return [order[0], *order[-2:]] if len(order) >= 3 else order
        if 2 <= len(order) < len(rows):  # alike where they have targets, and some have none
            return [order[0], next(row for row in range(len(rows)) if not counts[row]), order[-1]]
    return list(range(min(layout.rows, 3)))


def separating_rows(call: Call, layout: Layout, rules: Sequence[LossRule], least: float = 0.0) -> list[int] | None:
    """Return two rows for which rules that are still open weigh most differently; None where that is by no more than `least`."""
    rows = [layout.take(call, row, row + 1) for row in range(layout.rows)]
    counts = [
        None if rule.name == "sum" else of_rows
        for rule, of_rows in zip(rules, counts_by(rules, rows, layout), strict=True)
    ]

    def spread(pair: tuple[int, int]) -> float:
        totals = [1.0 if each is None else each[pair[0]] + each[pair[1]] for each in counts]
        shares = [
            1.0 if each is None else each[pair[0]] / total if total else 0.0
            for each, total in zip(counts, totals, strict=True)
        ]
        return max(shares) - min(shares)

    best = max(combinations(_extreme_rows([each for each in counts if each is not None], len(rows)), 2), key=spread)
    return [*best] if spread(best) > least else None


def _extreme_rows(counts: Sequence[Sequence[float]], rows: int) -> Sequence[int]:
    """Return the first few rows, and those that two rules count most differently of all."""
    found = {*range(min(rows, 2 * FEW_ROWS))}
    for one, other in combinations(counts, 2) if rows > len(found) else ():
        shares = [a / (a + b) if a + b else 0.5 for a, b in zip(one, other, strict=True)]
        found |= {shares.index(min(shares)), shares.index(max(shares))}
    return sorted(found)


def unlike_rows(call: Call, layout: Layout, count: int) -> list[int]:
    """Return so many rows, in order: from the shortest to the longest where lengths or masks tell, else from first to last."""
    sizes = next((found for i in layout.split if (found := _lengths(call.leaves[i], layout.dim_of(i)))), [])
    order = sorted(range(layout.rows), key=sizes.__getitem__) if len(sizes) == layout.rows else range(layout.rows)
    return sorted(order[place * (layout.rows - 1) // max(1, count - 1)] for place in range(count))


def _lengths(leaf: object, dim: int) -> list[int]:
    """Return what says how long rows are, where they differ: sizes in a list, numbers, or how many places of a mask count; else nothing."""
    if isinstance(leaf, (list, tuple)):
        sizes = [item.numel() for item in leaf if isinstance(item, torch.Tensor)]
        return sizes if len({*sizes}) > 1 else []
    if not isinstance(leaf, torch.Tensor) or leaf.is_floating_point() or leaf.is_complex():
        return []
    if leaf.dim() > 1 and (leaf.dtype is torch.bool or bool(((leaf == 0) | (leaf == 1)).all())):
        leaf = leaf.transpose(0, dim).flatten(1).sum(1)
    sizes = leaf.tolist() if leaf.dim() == 1 else []
    return sizes if len({*sizes}) > 1 else []
