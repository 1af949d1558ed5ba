"""The cheapest set that frees enough, against trying all of them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from memlab.techniques.checkpointing.budget import cheapest

_things = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=8)


def by_trying(freed: list[int], costs: list[int], needed: int) -> int | None:
    sets = (chosen for count in range(len(freed) + 1) for chosen in combinations(range(len(freed)), count))
    enough = [sum(costs[i] for i in chosen) for chosen in sets if sum(freed[i] for i in chosen) >= needed]
    return min(enough, default=None)


@given(_things, st.integers(-3, 60))
def test_no_other_set_is_cheaper(things: list[tuple[int, int]], needed: int) -> None:
    freed, costs = [each[0] for each in things], [each[1] for each in things]
    chosen = cheapest(freed, [float(cost) for cost in costs], needed)
    best = by_trying(freed, costs, needed)
    if chosen is None:
        assert best is None
        return
    assert sum(freed[i] for i in chosen) >= needed
    assert sum(costs[i] for i in chosen) == best
    assert list(chosen) == sorted(set(chosen))


def test_of_equal_things_the_first_are_chosen() -> None:
    assert cheapest([10] * 12, [1.0] * 12, 35) == (0, 1, 2, 3)


def test_a_hundred_and_twenty_layers_of_sixty_kinds() -> None:
    freed = [1000 + 37 * (number % 60) for number in range(120)]
    costs = [500.0 + 11 * ((number * 7) % 60) for number in range(120)]
    chosen = cheapest(freed, costs, sum(freed) // 2)
    assert chosen is not None
    assert sum(freed[i] for i in chosen) >= sum(freed) // 2
    # no exchange of two makes it cheaper
    spare = sum(freed[i] for i in chosen) - sum(freed) // 2
    others = set(range(120)) - set(chosen)
    assert not any(costs[j] < costs[i] and freed[i] - freed[j] <= spare for i in chosen for j in others)
