"""What has become of settings that were asked for, in any order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.live.wishes import Wishes
from memlab.moment import Asked
from memlab.plan import FIELDS, Plan

ASKS = st.one_of(*(st.tuples(st.just(spec.name), st.sampled_from(spec.choices)) for spec in FIELDS))
# what happens next: a wish, the boundary of a step, or a refusal of what waits
HAPPENINGS = st.lists(st.one_of(ASKS, st.just("boundary"), st.just("refusal")), max_size=30)


@settings(deadline=None)
@given(HAPPENINGS)
def test_whatever_happens_the_state_is_one_of_four_and_true(happenings: list[object]) -> None:
    wishes, step = Wishes(), 0
    for happening in happenings:
        if isinstance(happening, tuple):
            wishes.ask(*happening)
        elif wishes.target is not None:
            step += 1
            if happening == "boundary":
                wishes.came_true(wishes.target, step)
            else:
                wishes.came_to_nothing(wishes.target, "it cannot be")
        wanted = wishes.target or wishes.plan
        for spec, toggle in zip(FIELDS, wishes.toggles, strict=True):
            assert spec.parse(toggle.value) == getattr(wishes.plan, spec.name)
            if toggle.asked is Asked.PENDING:
                assert spec.parse(toggle.wanted) == getattr(wanted, spec.name)
                assert toggle.wanted != toggle.value
            elif toggle.asked is not Asked.REFUSED:
                assert toggle.wanted == toggle.value
                assert getattr(wanted, spec.name) == getattr(wishes.plan, spec.name)
            assert (toggle.step is not None) == (toggle.asked is Asked.APPLIED)
            assert bool(toggle.reason) == (toggle.asked is Asked.REFUSED)


def test_a_plan_that_comes_unasked_is_told_as_well() -> None:
    wishes = Wishes()
    wishes.came_true(Plan.parse("--accumulate 2"), 7)
    assert wishes.toggle("accumulation").text == "applied at step 7"


def test_what_was_asked_for_meanwhile_still_waits() -> None:
    wishes = Wishes()
    wishes.ask("checkpointing", "full")
    wishes.came_true(Plan.parse("--accumulate 2"), 7)
    assert wishes.toggle("checkpointing").asked is Asked.PENDING
    assert wishes.target == Plan.parse("--checkpoint")
