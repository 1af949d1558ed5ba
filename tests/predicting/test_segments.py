"""Stretches of a step: composed from few traces, they are the ones that a trace of each would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memlab import Workload
from memlab.hardware.roofline import Bill, Rates
from memlab.measuring.observation import PHASES
from memlab.plan import Plan
from memlab.predicting.passes import Passes
from memlab.predicting.segments import (
    NOTHING,
    Segment,
    TracedPass,
    added,
    by_name,
    laid_beside,
    levels,
    segment_of,
    timeline_of,
    without_state,
)
from memlab.predicting.targets import target_for
from memlab.records import Category, Phase
from memlab.trace.hidden_memory import Held
from memlab.trace.tracer import Tracer
from tests.predicting.families import family

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES = range(5)
FORWARD, BACKWARD, STEP = 0, 1, 3


@pytest.fixture
def rates() -> Rates:
    return target_for(family("mlp"), "T4").rates


@pytest.fixture(scope="module")
def tracers() -> dict[str, Tracer]:
    return {name: Tracer(family(name)) for name in ("gpt2 with dropout", "bert classifier", "tied", "vit", "t5")}


# -- levels ------------------------------------------------------------------------------------


def test_levels_are_in_the_order_of_categories() -> None:
    total = levels({Category.GRADIENTS: 2, Category.PARAMETERS: 1})
    assert total[:2] == (1, 2)
    assert added(total, total)[:2] == (2, 4)
    assert by_name(total) == {"parameters": 1, "gradients": 2}
    assert sum(without_state(levels({Category.OPTIMIZER_STATE: 5, Category.TEMPORARIES: 1}))) == 1
    assert sum(NOTHING) == 0


# -- the shape of a stretch --------------------------------------------------------------------


def test_a_shape_is_the_running_sum(rates: Rates) -> None:
    events = [
        (100, 1, ACTIVATIONS, FORWARD),
        (50, 2, TEMPORARIES, FORWARD),
        (-50, 2, TEMPORARIES, FORWARD),
        (80, 3, GRADIENTS, BACKWARD),
        (-100, 1, ACTIVATIONS, BACKWARD),
    ]
    shape = Segment(events, Bill.of([]), rates).shape
    assert shape.peak_bytes == 180
    assert by_name(shape.peak) == {"gradients": 80, "activations": 100}
    assert shape.phase is Phase.BACKWARD
    assert by_name(shape.end) == {"gradients": 80}


def test_a_stretch_without_events_is_empty(rates: Rates) -> None:
    shape = Segment([], Bill.of([]), rates).shape
    assert (shape.peak_bytes, shape.peak, shape.end) == (0, NOTHING, NOTHING)
    assert Segment([], Bill.of([]), rates).seconds == 0


def test_no_peak_is_lost_among_the_points(rates: Rates) -> None:
    events = []
    for number in range(1000):
        size_bytes = 10_000 if number == 617 else 1 + number % 7
        events += [(size_bytes, number, TEMPORARIES, FORWARD), (-size_bytes, number, TEMPORARIES, FORWARD)]
    segment = Segment(events, Bill.of([]), rates)
    points = timeline_of(segment.points(2.0, levels({Category.PARAMETERS: 5})))
    assert len(points) <= 101
    assert max(point.total_bytes for point in points) == 10_005
    assert all(point.live_bytes["parameters"] == 5 for point in points)
    assert all(point.seconds >= 2.0 for point in points)


def test_a_trace_as_it_is(tracers: dict[str, Tracer], rates: Rates) -> None:
    trace = tracers["tied"].one_pass(Plan())
    segment = segment_of(trace, rates)
    baseline_bytes = sum(trace.observation.baseline_bytes.values())
    assert baseline_bytes + segment.shape.peak_bytes == trace.observation.peak_bytes
    assert segment.seconds > 0


def test_what_lives_inside_operators_counts_and_leaves_nothing() -> None:
    target = target_for(family("masked bert"), "T4")
    trace = Tracer(family("masked bert"), target.device, target.choices).one_pass(Plan.parse("--fp16"))
    assert trace.hidden
    plain, full = (TracedPass(target.rates, each, 8).segment(8) for each in (replace(trace, hidden=()), trace))
    inside = [event for event in full.events if event[1] < 0]
    assert len(inside) == 2 * sum(len(group) for hidden in trace.hidden for group in hidden.inside.groups)
    assert sum(size_bytes for size_bytes, *_ in inside) == 0
    assert [event for event in full.events if event[1] >= 0] == list(plain.events)
    assert full.shape.end == plain.shape.end
    assert full.shape.peak_bytes >= plain.shape.peak_bytes


def test_no_operator_runs_when_a_gradient_that_was_added_is_freed() -> None:
    target = target_for(family("vit"), "T4")
    trace = Tracer(family("vit"), target.device, target.choices).one_pass(Plan())
    assert any(isinstance(group, Held) for hidden in trace.hidden for group in hidden.inside.groups)
    within: set[int] = set()
    freed = 0
    for size_bytes, number, *_ in (
        TracedPass(target.rates, trace, trace.samples).segment(trace.samples, accumulating=True).events
    ):
        if number < 0:
            (within.add if size_bytes > 0 else within.discard)(number)
        elif size_bytes < 0 and number in trace.settled:
            freed += 1
            assert not within
    assert freed


# -- other numbers of rows ---------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gpt2 with dropout", "bert classifier", "tied", "vit", "t5"])
@pytest.mark.parametrize("flags", ["", "--checkpoint", "--bf16"])
def test_two_traces_give_all_numbers_of_rows(tracers: dict[str, Tracer], rates: Rates, name: str, flags: str) -> None:
    tracer, plan = tracers[name], Plan.parse(flags)
    whole, half = tracer.one_pass(plan), tracer.one_pass(plan, 4)
    beside = laid_beside(whole, half)
    assert beside is not None
    both = TracedPass(rates, whole, 8, beside)
    for rows in (2, 3, 6):
        direct = segment_of(tracer.one_pass(plan, rows), rates)
        told = both.segment(rows)
        assert told.shape.peak_bytes == pytest.approx(direct.shape.peak_bytes, rel=2e-3)
        assert sum(told.shape.end) == pytest.approx(sum(direct.shape.end), abs=64)
        assert told.seconds == pytest.approx(direct.seconds, rel=0.1)


def test_traces_of_other_operators_are_not_laid_beside(tracers: dict[str, Tracer]) -> None:
    tracer = tracers["tied"]
    assert laid_beside(tracer.one_pass(Plan()), tracer.one_pass(Plan.parse("--checkpoint"), 4)) is None


# -- accumulation ------------------------------------------------------------------------------


def test_passes_after_the_first_add_to_gradients(tracers: dict[str, Tracer], rates: Rates) -> None:
    trace = tracers["tied"].one_pass(Plan(), 4)
    traced = TracedPass(rates, trace, 4)
    first, next_one = traced.segment(4), traced.segment(4, accumulating=True)
    place = list(Category).index(Category.GRADIENTS)
    assert first.shape.end[place] > 0
    assert next_one.shape.end[place] == 0
    assert next_one.shape.peak_bytes <= first.shape.peak_bytes
    assert sum(size for size, *_ in next_one.events) == sum(first.shape.end) - first.shape.end[place]


def test_every_storage_of_a_pass_dies_once(tracers: dict[str, Tracer], rates: Rates) -> None:
    traced = TracedPass(rates, tracers["vit"].one_pass(Plan()), 8)
    for accumulating in (False, True):
        live: dict[int, int] = {}
        for size_bytes, number, _, _ in traced.segment(8, accumulating=accumulating).events:
            live[number] = live.get(number, 0) + size_bytes
            assert live[number] >= 0


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_passes_of_a_split_batch_hold_all_rows(parts: int, rates: Rates) -> None:
    workload = family("bert classifier")
    passes = Passes(Tracer(workload), lambda _: rates)
    sizes = [8 // parts + (place < 8 % parts) for place in range(parts)]
    segments = passes.segments(Plan(), sizes)
    assert len(segments) in (parts, parts + 1)  # small outputs are put together at the end
    whole = passes.segments(Plan(), [8])[0]
    assert segments[0].shape.peak_bytes < whole.shape.peak_bytes
    assert sum(segment.seconds for segment in segments) > whole.seconds


def test_a_loss_outside_of_the_model_is_in_the_pass() -> None:
    model = torch.nn.Linear(16, 4)
    batch = ((torch.randn(8, 16),), torch.arange(8) % 4)
    given = {"batch": batch, "loss_fn": torch.nn.functional.cross_entropy}
    trace = Tracer(Workload(model, torch.optim.SGD(model.parameters()), **given)).one_pass(Plan())
    assert not trace.has_surrogate_loss
    assert any("log_softmax" in str(priced.work) or priced.work for priced in trace.priced)


class _Masked(nn.Module):
    """Multiplies by a mask that it makes from nothing, which a backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.layer(rows) * torch.full((2048, 512), 0.5)).square().mean()


def _held_by_the_device(flags: str, size_bytes: int) -> int:
    """How many storages of a size are born in the forward pass and die in the backward pass."""
    model = _Masked()
    workload = Workload(model, torch.optim.SGD(model.parameters(), 0.1), batch=torch.zeros(2048, 512))
    target = target_for(workload, "T4")
    raw = Tracer(workload, target.device, target.choices).one_pass(Plan.parse(flags)).observation.raw
    forward, backward = PHASES.index(Phase.FORWARD), PHASES.index(Phase.BACKWARD)
    born = {number for _, size, number, moment in raw if (size, moment) == (size_bytes, forward)}
    return sum(number in born and size < 0 and moment == backward for _, size, number, moment in raw)


def test_a_mask_from_nothing_that_goes_to_the_host_has_no_copy_on_the_device() -> None:
    mask_bytes = 2048 * 512 * 4

    assert _held_by_the_device("--offload activations", mask_bytes) <= _held_by_the_device("", mask_bytes)
