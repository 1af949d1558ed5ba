"""The allocator's replay of two steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload
from memlab.allocator import Allocator, Settings
from memlab.allocator.sizes import MIN_BLOCK_BYTES
from memlab.plan import Plan
from memlab.predicting import predict, predict_all
from memlab.predicting.plan_predictor import Applied, Parts, PlanPredictor
from memlab.predicting.reserved import Known, Player, Script, play_steps, reserved_by, script_of
from memlab.predicting.segments import NOTHING, OUTSIDE
from tests.predicting.families import family

MIB = 2**20
PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES = range(5)
FORWARD, BACKWARD, STEP, OTHER = 0, 1, 3, 4

Event = tuple[int, int, int, int]

PASS: list[Event] = [
    (4 * MIB, 1, ACTIVATIONS, FORWARD),
    (8 * MIB, 2, TEMPORARIES, FORWARD),
    (-8 * MIB, 2, TEMPORARIES, FORWARD),
    (2 * MIB, 3, GRADIENTS, BACKWARD),
    (-4 * MIB, 1, ACTIVATIONS, BACKWARD),
]
UPDATE: list[Event] = [(2 * MIB, 9, TEMPORARIES, STEP), (-2 * MIB, 9, TEMPORARIES, STEP)]


def script(passes: Sequence[Sequence[Event]] = (PASS,), last: Sequence[Event] = UPDATE, **given: Any) -> Script:
    of_script = {name: given.pop(name) for name in ("workspaces", "look", "first") if name in given}
    lives = {"inputs": (MIB,), "owned": {1: 2 * MIB}, "state": {2: 4 * MIB}} | given
    return Script(Parts(NOTHING, (), 1, 0, 0, (), **lives), passes, last, **of_script)


def bare(passes: Sequence[Sequence[Event]], last: Sequence[Event] = (), **given: Any) -> Script:
    return script(passes, last, **{"inputs": (), "owned": {}, "state": {}} | given)


class Noted:
    """Storages by what they ask for."""

    def __init__(self, size_bytes: int) -> None:
        self.requested = size_bytes


class Noting(Player):
    """Notes what is live, the highest sum, and the categories of what is born outside of a stretch's events."""

    def __init__(self) -> None:
        self.live: list[Noted] = []
        self.peak_bytes = 0
        self.begun: list[tuple[int, int]] = []
        self.categories: list[tuple[int, int]] = []

    def begin(self, step: int, stretch: int) -> None:
        self.begun.append((step, stretch))

    def born(self, size_bytes: int, place: int, moment: int = OUTSIDE) -> Noted:
        if moment == OUTSIDE:
            self.categories.append((place, size_bytes))
        noted = Noted(size_bytes)
        self.live.append(noted)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return noted

    def died(self, storage: Noted) -> None:
        self.live.remove(storage)

    @property
    def live_bytes(self) -> int:
        return sum(noted.requested for noted in self.live)


def test_state_appears_in_the_first_update() -> None:
    noting = Noting()
    play_steps(script(), noting)
    assert noting.begun == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert noting.categories == [
        (PARAMETERS, 2 * MIB),
        (ACTIVATIONS, MIB),
        (STATE, 4 * MIB),
    ]
    # parameters, input, state, activations and the temporary of the second step
    assert noting.peak_bytes == (2 + 1 + 4 + 4 + 8) * MIB
    assert noting.live_bytes == (2 + 1 + 4) * MIB


def test_state_that_is_there_already_is_born_first() -> None:
    noting = Noting()
    play_steps(script(has_state=True), noting)
    assert [category for category, _ in noting.categories][-1] == STATE
    assert len(noting.categories) == 3
    assert noting.live_bytes == (2 + 1 + 4) * MIB


def test_gradients_stay_until_the_update_is_over() -> None:
    seen: list[int] = []

    class Looking(Noting):
        def begin(self, step: int, stretch: int) -> None:
            super().begin(step, stretch)
            seen.append(self.live_bytes // MIB)

    play_steps(script(has_state=True), Looking())
    # 2 parameters + 1 input + 4 state; the gradient's 2 live when an update begins
    assert seen == [7, 9, 7, 9]


@pytest.mark.parametrize("passes", [(PASS, PASS), ()])
def test_workspaces_are_taken_once_where_matrices_are_first_multiplied(passes: Sequence[Sequence[Event]]) -> None:
    played: list[list[int]] = []

    class Looking(Noting):
        def play(self, events: Sequence[Event], live: dict[int, Noted]) -> None:
            played.append([size_bytes // MIB for size_bytes, *_ in events])
            super().play(events, live)

    noting = Looking()
    play_steps(script(passes=passes, last=PASS, workspaces={0: [(3, 5 * MIB), (None, 3 * MIB)]}), noting)
    assert played[0] == [3, 4, 8, -8, 2, 5, -4]
    assert all(sizes == [4, 8, -8, 2, -4] for sizes in played[1:])
    assert noting.live_bytes == (2 + 1 + 4 + 5 + 3) * MIB


def test_threads_take_their_workspaces_at_their_first_products() -> None:
    workload = family("masked bert")
    parts = PlanPredictor(workload, "A100 80GB").parts(Plan.parse("--accumulate 2"))
    assert parts.probe is not None
    of_forward, of_backward = 7 * MIB, 9 * MIB
    taken = script_of(parts, (of_forward, of_backward)).workspaces
    [(in_look, sizes), (in_pass, others)] = [
        (after, size_bytes) for place in sorted(taken) for after, size_bytes in taken[place]
    ]
    assert sorted(taken) == [-1, 0]
    assert (sizes, others) == (of_forward, of_backward)
    assert in_look in {number for size_bytes, number, _, _ in parts.probe.events if size_bytes > 0}
    moments = {number: moment for size_bytes, number, _, moment in parts.segments[0].events if size_bytes > 0}
    assert moments[in_pass] == BACKWARD


def test_the_look_at_rows_fills_no_key_value_cache() -> None:
    def looked(*, uses_cache: bool) -> list[int]:
        workload = family("gpt2")
        workload.model.config.use_cache = uses_cache
        look = PlanPredictor(workload, "T4").parts(Plan.parse("--accumulate 2")).probe
        assert look is not None
        return [size_bytes for size_bytes, *_ in look.events]

    assert looked(uses_cache=True) == looked(uses_cache=False)


def test_the_look_at_rows_comes_before_the_first_step_and_leaves_nothing() -> None:
    look = [(16 * MIB, 1, ACTIVATIONS, FORWARD)]
    noting = Noting()
    play_steps(script(look=look), noting)
    assert noting.begun[0] == (0, -1)
    assert noting.peak_bytes == max(2 + 1 + 16, 19) * MIB
    assert noting.live_bytes == 7 * MIB


def test_what_a_look_has_reserved_is_given_back_where_the_cache_is_emptied() -> None:
    look = [(30 * MIB, 1, ACTIVATIONS, FORWARD)]
    events = [(22 * MIB, number, ACTIVATIONS, FORWARD) for number in range(3)]
    kept, given = (
        reserved_by(bare([events], look=look, empties_cache=empties), Settings()).reserved_bytes
        for empties in (False, True)
    )

    assert (kept, given) == (30 * MIB + 2 * 22 * MIB, 3 * 22 * MIB)  # one of the three would lie where the look was
    assert PlanPredictor(family("gpt2"), "T4").parts(Plan.parse("--accumulate 2")).empties_cache


def test_reserved_holds_allocated_in_whole_segments() -> None:
    reserved = reserved_by(script(), Settings())
    assert reserved.allocated_bytes == 19 * MIB
    assert reserved.reserved_bytes >= reserved.allocated_bytes
    assert reserved.reserved_bytes % (2 * MIB) == 0


def test_a_storage_that_changes_its_size_is_given_other_memory() -> None:
    events = [
        (4 * MIB, 1, TEMPORARIES, FORWARD),
        (4 * MIB, 1, TEMPORARIES, FORWARD),
        (-8 * MIB, 1, TEMPORARIES, FORWARD),
    ]
    reserved = reserved_by(bare([events]), Settings())
    assert reserved.allocated_bytes == 12 * MIB


# a pass that adds its gradient to the one that is there
ADDING: list[Event] = [*PASS[:3], (2 * MIB, 3, TEMPORARIES, BACKWARD), (-2 * MIB, 3, TEMPORARIES, BACKWARD), PASS[-1]]


@pytest.mark.parametrize("count", [4, 8, 16])
def test_many_equal_passes_need_what_three_need(count: int) -> None:
    three, many = (reserved_by(script([PASS, *[ADDING] * (passes - 1)]), Settings()) for passes in (3, count))
    assert three == many


@pytest.mark.parametrize("count", [3, 4, 8, 16])
@pytest.mark.parametrize("size", [2 * MIB, MIB // 2])
def test_what_every_pass_leaves_is_there_until_the_update(size: int, count: int) -> None:
    keeping = [*ADDING, (size, 7, ACTIVATIONS, FORWARD)]
    reserved = reserved_by(script([[*PASS, keeping[-1]], *[keeping] * (count - 1)], has_state=True), Settings())
    noting = Noting()
    play_steps(script([[*PASS, keeping[-1]], *[keeping] * (count - 1)], has_state=True), noting)
    assert reserved.allocated_bytes == noting.peak_bytes


SMALL: list[Event] = [
    (9_000, 20, TEMPORARIES, FORWARD),
    (700, 21, ACTIVATIONS, FORWARD),
    (-9_000, 20, TEMPORARIES, FORWARD),
]
LARGER: list[Event] = [(600_000, 30, TEMPORARIES, FORWARD), (3 * MIB, 30, TEMPORARIES, FORWARD)]  # and smaller again
SMALLER: list[Event] = [(-3 * MIB, 30, TEMPORARIES, BACKWARD), (-600_000, 30, TEMPORARIES, BACKWARD)]


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "roundup_power2_divisions:4"])
def test_what_is_known_of_passes_changes_nothing(text: str) -> None:
    """Small storages among large ones, one that grows, several passes and optimizers, with and without workspaces."""
    known: Known = {}
    first = [*SMALL, *PASS[:2], *LARGER, PASS[2], *SMALLER, *PASS[3:]]
    passes, settings = [first, *[[*SMALL[::2], *LARGER, *ADDING, *SMALLER]] * 3], Settings.parse(text)
    for state in ({}, {2: 4 * MIB}, {2: 900_000}):
        for count in (1, 2, 4):
            for workspaces in ({}, {0: [(1, 8 * MIB)]}):
                one = script(passes[:count], state=state, workspaces=workspaces)
                assert reserved_by(one, settings, known) == reserved_by(one, settings)


def test_a_pass_that_meets_what_it_has_met_is_not_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    original = Allocator.malloc
    monkeypatch.setattr(Allocator, "malloc", lambda *args: served.append(args[1]) or original(*args))
    known: Known = {}
    for _ in range(2):
        reserved_by(script(has_state=True), Settings(), known)
    # the pass in the first of four steps; the state that lives before, whose 4 MiB the pass asks for as well, in both replays
    assert (served.count(8 * MIB), served.count(4 * MIB)) == (1, 3)


def test_the_order_of_peaks_on_a_gpu() -> None:
    """More micro-batches need no more but a loss each, and every reserved peak holds the allocated one."""
    workload = family("masked bert")
    plans = ["", "--accumulate 2", "--accumulate 4", "--accumulate 8"]
    for gpu in ("T4", "A100 40GB", "H100 SXM"):
        predictions = predict_all(workload, gpu, plans=plans)
        allocated = [each.peak_allocated_bytes for each in predictions]
        assert all(more <= fewer + 8 * MIN_BLOCK_BYTES for fewer, more in pairwise(allocated))
        for each in predictions:
            assert each.peak_reserved_bytes is not None
            assert each.peak_reserved_bytes >= each.peak_allocated_bytes


def test_the_cpu_has_no_reserved_bytes() -> None:
    assert predict(family("mlp")).peak_reserved_bytes is None


def test_a_plan_that_replaces_tensors_leaves_holes_and_no_peak() -> None:
    # of the two large tensors in each segment one becomes small
    before = dict.fromkeys(range(8), 8 * MIB)
    events = [(90 * MIB, 8, TEMPORARIES, OTHER), (-90 * MIB, 8, TEMPORARIES, OTHER)]
    for number in range(0, 8, 2):
        events += [(-8 * MIB, number, PARAMETERS, OTHER), (2 * MIB, 10 + number, PARAMETERS, OTHER)]
    applied = Applied(before, events, (10, 1, 12, 3, 14, 5, 16, 7))
    owned = {20 + number: (8 if number % 2 else 2) * MIB for number in range(8)}
    found = [reserved_by(bare([[]], owned=owned, applied=each), Settings()).reserved_bytes for each in (None, applied)]
    assert found == [40 * MIB, 80 * MIB]


def test_pure_bf16_is_applied_to_weights_in_fp32() -> None:
    model = nn.Linear(1024, 1024)
    workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(2, 1024),), loss_fn=None)
    predictor = PlanPredictor(workload, "T4")
    assert predictor.parts(Plan()).applied is None
    parts = predictor.parts(Plan.parse("--precision pure-bf16"))
    assert parts.applied is not None
    assert sorted(parts.applied.before.values()) == [4096, 4 * MIB]
    assert len(parts.applied.after) == len(parts.owned) == 4  # upper and lower halves
    numbers = [number for _, number, _, _ in parts.applied.events]
    # what was there goes when all is done: until then a change can be taken back
    assert {*numbers[-len(parts.applied.before) :]} == {*parts.applied.before}
    live = dict(parts.applied.before)
    for size_bytes, number, _, _ in parts.applied.events:
        live[number] = live.get(number, 0) + size_bytes
    assert [live[number] for number in parts.applied.after] == [*parts.owned.values()]
    assert sum(live.values()) == 4 * MIB + 4096


def test_the_first_update_makes_state_beside_its_temporaries() -> None:
    first = [(20 * MIB, 3, TEMPORARIES, STEP), (4 * MIB, 2, STATE, STEP), (-20 * MIB, 3, TEMPORARIES, STEP)]
    last = [(-4 * MIB, 2, STATE, STEP), (4 * MIB, 5, STATE, STEP)]
    alone, beside = (
        reserved_by(bare([[]], last, state={2: 4 * MIB}, first=each), Settings()) for each in (None, first)
    )
    assert alone.allocated_bytes == 4 * MIB
    assert beside.allocated_bytes == 24 * MIB
    there = reserved_by(bare([[]], last, state={2: 4 * MIB}, first=first, has_state=True), Settings())
    assert there.allocated_bytes == alone.allocated_bytes
