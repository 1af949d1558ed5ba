"""What has become of settings that were asked for, in any order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.live.pending_changes import PendingChanges
from memlab.plan import FIELDS, Plan
from memlab.records.live_state import Asked

ASKS = st.one_of(*(st.tuples(st.just(spec.name), st.sampled_from(spec.choices)) for spec in FIELDS))
# what happens next: a setting asked for, the boundary of a step, or a refusal of what waits
HAPPENINGS = st.lists(st.one_of(ASKS, st.just("boundary"), st.just("refusal")), max_size=30)


@settings(deadline=None)
@given(HAPPENINGS)
def test_whatever_happens_the_state_is_one_of_four_and_true(happenings: list[object]) -> None:
    pending_changes, step = PendingChanges(), 0
    for happening in happenings:
        if isinstance(happening, tuple):
            pending_changes.ask(*happening)
        elif pending_changes.target is not None:
            step += 1
            if happening == "boundary":
                pending_changes.note_applied(pending_changes.target.lasting, step)
            else:
                pending_changes.note_refused(pending_changes.target, "it cannot be")
        wanted = pending_changes.target or pending_changes.plan
        for spec, toggle in zip(FIELDS, pending_changes.toggles, strict=True):
            assert spec.parse(toggle.value) == getattr(pending_changes.plan, spec.name)
            if toggle.asked is Asked.PENDING:
                assert spec.parse(toggle.wanted) == getattr(wanted, spec.name)
                assert toggle.wanted != toggle.value
            elif toggle.asked is not Asked.REFUSED:
                assert toggle.wanted == toggle.value
                assert getattr(wanted, spec.name) == getattr(pending_changes.plan, spec.name)
            assert (toggle.step is not None) == (toggle.asked is Asked.APPLIED)
            assert bool(toggle.reason) == (toggle.asked is Asked.REFUSED)


def test_a_plan_that_comes_unasked_is_told_as_well() -> None:
    pending_changes = PendingChanges()
    pending_changes.note_applied(Plan.parse("--accumulate 2"), 7)
    assert pending_changes.toggle("accumulation").text == "applied at step 7"


def test_what_is_done_once_waits_no_longer_when_it_is_done() -> None:
    changes = PendingChanges()
    for before in ("", "--lora"):
        changes.note_applied(Plan.parse(before), step=1)
        assert changes.ask("adapters", "off:merge") == changes.target == Plan.parse("--lora off:merge")
        changes.note_applied(Plan(), step=2)
        assert changes.target is None
        assert changes.toggle("adapters").text == "off since step 2"
        assert changes.ask("checkpointing", "full") == Plan.parse("--checkpoint")
        changes.ask("checkpointing", "off")


def test_what_was_asked_for_meanwhile_still_waits() -> None:
    pending_changes = PendingChanges()
    pending_changes.ask("checkpointing", "full")
    pending_changes.note_applied(Plan.parse("--accumulate 2"), 7)
    assert pending_changes.toggle("checkpointing").asked is Asked.PENDING
    assert pending_changes.target == Plan.parse("--checkpoint")


def test_what_was_asked_for_beside_a_plan_that_is_refused_stays_asked_for_without_it() -> None:
    pending_changes = PendingChanges()
    pending_changes.note_applied(Plan.parse("--accumulate 2"), step=3)
    pending_changes.ask("checkpointing", "full")
    # on trial, it turned out not to apply
    pending_changes.note_applied(Plan(), step=4)
    left = pending_changes.note_refused(Plan.parse("--accumulate 2"), "rows depend on each other")
    assert left == pending_changes.target == Plan.parse("--checkpoint")
    assert pending_changes.toggle("accumulation").asked is Asked.REFUSED
    assert pending_changes.toggle("checkpointing").asked is Asked.PENDING
