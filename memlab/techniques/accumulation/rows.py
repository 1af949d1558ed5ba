"""Rows of a batch that tell most about how the losses of its parts add up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from memlab.techniques.accumulation.split import Call, Layout, LossRule, counts_by

# rows among which unlike ones are looked for
FEW_ROWS = 8
# how much the weights of two rows must differ to tell rules apart
_LEAST_SPREAD = 0.02


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


def separating_rows(call: Call, layout: Layout, rules: Sequence[LossRule]) -> list[int] | None:
    """Return two rows for which rules that are still open weigh most differently; None where they do nowhere."""
    rows = [layout.take(call, row, row + 1) for row in range(min(layout.rows, 2 * FEW_ROWS))]
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

    best = max(combinations(range(len(rows)), 2), key=spread)
    return [*best] if spread(best) > _LEAST_SPREAD else None
