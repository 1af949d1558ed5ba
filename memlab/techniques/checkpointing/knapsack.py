"""The cheapest set of things that frees enough: integers and floats in, positions out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# bytes freed so far, their cost, and how many members of each kind are chosen, the first kind first
_State = tuple[int, float, tuple[int, ...]]


def cheapest(freed: Sequence[int], costs: Sequence[float], needed: int) -> tuple[int, ...] | None:
    """Choose what to give up so that enough is freed at the least cost.

    Exact. Things that are equal in both are counted, not told apart, and of what is both dearer and frees less nothing
    is followed any further; so dozens of blocks of a few kinds take no time worth a word.

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
