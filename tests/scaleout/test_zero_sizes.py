"""How much DeepSpeed holds at once, for models of every size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memlab.scaleout.sharding.zero import ZeroSizes


@given(st.integers(min_value=1, max_value=10**12))
def test_what_is_held_at_once_is_a_small_part_of_the_model(elements: int) -> None:
    sizes = ZeroSizes.of(elements)
    assert sizes.bucket % 2 == 0
    assert sizes.bucket == sizes.prefetch == sizes.max_reuse <= max(2, elements / 8 + 1)
    assert sizes.bucket >= 2
    assert sizes.bucket <= 50_000_000
    assert sizes.persistence_threshold <= min(elements / 100, 100_000)


def test_stages_that_gather_nothing_are_not_told_how_much_to_gather() -> None:
    assert set(ZeroSizes.of(800).configuration(2)) == {"reduce_bucket_size", "allgather_bucket_size"}
    assert ZeroSizes.of(800).configuration(3)["stage3_max_reuse_distance"] == 100
