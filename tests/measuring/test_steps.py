"""The meter on live loops: what a step record says, and loops that break off anywhere."""

import gc
import math
import weakref
from itertools import takewhile

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from memlab.errors import MemlabError
from memlab.measuring import times
from memlab.measuring.device import device_for
from memlab.measuring.steps import Meter
from memlab.measuring.times import steps_between_observations
from memlab.plan import Plan
from memlab.records import Category, Phase
from memlab.runtime.batch import Batch

CPU = torch.device("cpu")


class Loop:
    """A model, an optimizer and a meter, driven as a session drives them."""

    def __init__(self, width=64, capacity_bytes=None, optimizer=torch.optim.AdamW, rows=16):
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.batch = torch.randn(rows, width)
        self.meter = Meter(self.model, [self.optimizer], device_for(CPU, capacity_bytes))

    def forward(self):
        self.meter.forward_begins(Batch((self.batch,), {}))
        loss = self.model(self.batch).pow(2).mean()
        self.meter.forward_ended(loss)
        return loss

    def update(self, skipped=False):
        self.meter.step_begins(self.optimizer)
        if not skipped:
            self.optimizer.step()
        self.meter.step_ended(self.optimizer, skipped=skipped)
        self.optimizer.zero_grad()

    def step(self, count=1):
        for _ in range(count):
            self.forward().backward()
            self.update()


def test_a_step_is_recorded_with_its_samples_time_and_loss():
    loop = Loop(rows=5)
    loop.step(3)
    first, second, third = loop.meter.steps
    assert [first.step, second.step, third.step] == [1, 2, 3]
    assert first.samples == 5
    assert first.tokens == 0
    assert first.seconds > 0
    assert first.loss is not None
    assert second.loss is not None
    assert second.loss < first.loss
    assert first.plan == Plan().label
    assert not first.skipped
    loop.meter.close()


def test_two_observed_steps_then_none_for_a_while():
    loop = Loop()
    loop.step(120)
    # watching a model this small costs more than the step, so it is not done again so soon
    assert [r.step for r in loop.meter.steps if r.peak_allocated_bytes is not None] == [1, 2]
    loop.meter.close()


def test_a_larger_batch_than_any_before_is_observed():
    loop = Loop()
    loop.step(8)
    loop.batch, small = torch.randn(64, 64), loop.batch
    loop.step(2)
    loop.batch = small
    loop.step(2)
    assert [r.step for r in loop.meter.steps if r.peak_allocated_bytes is not None] == [1, 2, 9]
    loop.meter.close()


def test_observations_come_back_as_often_as_they_are_cheap(monkeypatch):
    monkeypatch.setattr(times, "steps_between_observations", lambda observed, plain: 100)
    loop = Loop()
    loop.step(210)
    assert [r.step for r in loop.meter.steps if r.peak_allocated_bytes is not None] == [1, 2, 101, 102, 201, 202]
    loop.meter.close()


def test_steps_between_observations_keep_their_share_of_the_time():
    assert steps_between_observations([], [1.0]) == 50
    assert steps_between_observations([1.0], []) == 50
    assert steps_between_observations([0.9], [1.0]) == 50
    assert steps_between_observations([1.5], [1.0]) == 200


def test_the_peak_includes_what_lived_before_the_step():
    loop = Loop()
    loop.step(2)
    count = sum(p.numel() for p in loop.model.parameters())
    peak = loop.meter.steps[1].peak_allocated_bytes
    assert peak is not None
    # parameters, gradients, two moments, the inputs and a saved activation
    assert peak >= 16 * count + 2 * 4 * 16 * 64
    loop.meter.close()


def test_a_measurement_has_categories_timeline_and_speed():
    loop = Loop(rows=4)
    loop.step(8)
    measured = loop.meter.measurement(Plan())
    count = sum(p.numel() for p in loop.model.parameters())
    assert measured.breakdown[Category.PARAMETERS] == 4 * count
    assert measured.breakdown[Category.OPTIMIZER_STATE] == 8 * count + 16
    assert max(point.live_bytes.get(Category.GRADIENTS, 0) for point in measured.timeline) == 4 * count
    assert sum(measured.breakdown.values()) == measured.peak_allocated_bytes
    assert measured.peak_reserved_bytes is None
    assert measured.phase_of_peak in set(Phase)
    assert len(measured.step_seconds) == 6
    assert measured.samples_per_step == 4
    assert len(measured.losses) == 8
    assert list(measured.losses) == [r.loss for r in loop.meter.steps]
    assert measured.device == "CPU ledger"
    loop.meter.close()


def test_with_a_capacity_every_step_is_observed_and_timed():
    loop = Loop(capacity_bytes=2**30)
    loop.step(5)
    assert all(r.peak_allocated_bytes for r in loop.meter.steps)
    assert len(loop.meter.measurement(Plan()).step_seconds) == 4
    loop.meter.close()


def test_each_plan_has_its_own_period_and_a_plan_run_again_its_latest():
    loop = Loop()
    loop.step(3)
    loop.meter.plan_changed(Plan.parse("--accumulate 2"))
    loop.step(4)
    loop.meter.plan_changed(Plan())
    loop.step(5)
    as_written = loop.meter.measurement(Plan())
    assert len(as_written.losses) == 5
    # its times go on from those of its first period: one settled step there, three here
    assert (len(as_written.step_seconds), as_written.is_warm) == (4, True)
    assert len(loop.meter.measurement(Plan.parse("--accumulate 2")).losses) == 4
    assert loop.meter.measurement(Plan.parse("--accumulate 2")).timeline
    assert [r.peak_allocated_bytes is not None for r in loop.meter.steps] == [
        *(True, True, False),
        *(True, True, False, False),
        *(True, True, False, False, False),
    ]
    with pytest.raises(MemlabError, match="no step has ended under the plan '--bf16'"):
        loop.meter.measurement(Plan.parse("--bf16"))
    loop.meter.close()


def test_a_plan_changed_within_a_step_forgets_the_peak_of_the_failed_try():
    loop = Loop()
    loop.meter.forward_begins(Batch((loop.batch,), {}))
    failed = torch.zeros(10**6)
    del failed
    loop.meter.plan_changed(Plan.parse("--accumulate 2"))
    loss = loop.model(loop.batch).mean()
    loop.meter.forward_ended(loss)
    loss.backward()
    loop.update()
    (record,) = loop.meter.steps
    assert record.peak_allocated_bytes is not None
    assert record.peak_allocated_bytes < 10**6
    assert record.plan == Plan.parse("--accumulate 2").label
    loop.meter.close()


@pytest.mark.parametrize("change", ["anew", "back"])
def test_the_peak_of_a_plan_that_begins_within_a_step_that_nobody_observes_is_that_of_before(change):
    loop = Loop()
    loop.step(2)
    known = loop.meter.measurement(Plan())
    if change == "back":  # from a plan on trial, which turns out not to apply in its third step
        loop.meter.plan_changed(Plan.parse("--accumulate 2"))
        loop.step(2)
    loss = loop.forward()
    if change == "back":
        loop.meter.plan_changed(Plan())
    else:
        loop.meter.only_watched()
    loss.backward()
    loop.update()
    assert loop.meter.steps[-1].peak_allocated_bytes is None
    for measured in (loop.meter.times.so_far("as written"), loop.meter.measurement(Plan())):
        assert measured.peak_allocated_bytes == known.peak_allocated_bytes > 0
        assert measured.breakdown == known.breakdown
    loop.step()  # is observed, and counts from here on
    assert loop.meter.steps[-1].peak_allocated_bytes == loop.meter.measurement(Plan()).peak_allocated_bytes
    loop.meter.close()


def test_several_forwards_before_a_step_are_summed():
    loop = Loop(rows=3)
    for _ in range(4):
        loop.forward().backward()
    loop.update()
    (record,) = loop.meter.steps
    assert record.samples == 12
    loop.meter.close()


def test_a_skipped_update_is_marked():
    loop = Loop()
    loop.forward().backward()
    loop.update(skipped=True)
    assert loop.meter.steps[0].skipped
    loop.meter.close()


def test_steps_are_watched_until_the_first_updates():
    """As under fp16, which skips some: moments are not there before."""
    plain, late = Loop(), Loop()
    for loop in (plain, late):
        for _ in range(3 if loop is late else 0):
            loop.forward().backward()
            loop.update(skipped=True)
        loop.step(4)
    peaks = [loop.meter.measurement(Plan()).peak_allocated_bytes for loop in (plain, late)]
    assert peaks[0] == peaks[1]
    plain.meter.close()
    late.meter.close()


def test_a_step_of_two_optimizers_is_one_step():
    loop = Loop()
    head = torch.nn.Parameter(torch.zeros(3))
    other = torch.optim.SGD([head], lr=0.1)
    loop.meter.optimizer_found(other)
    loop.meter.optimizer_found(other)
    for _ in range(2):
        loop.forward().backward()
        loop.update()
        assert _get_current_dispatch_mode() is not None
        loop.meter.step_begins(other)
        loop.meter.step_ended(other)
        assert _get_current_dispatch_mode() is None
    assert len(loop.meter.steps) == 2
    loop.step(2)
    assert len(loop.meter.steps) == 3
    loop.meter.close()
    assert len(loop.meter.steps) == 4


def test_an_optimizer_first_seen_when_it_steps_is_taken_in():
    loop = Loop()
    loop.meter = Meter(loop.model, [], device_for(CPU))
    loop.step(2)
    assert len(loop.meter.steps) == 2
    assert loop.meter.measurement(Plan()).breakdown[Category.OPTIMIZER_STATE] > 0
    loop.meter.close()


def test_a_model_without_optimizer_makes_a_step_of_each_forward():
    loop = Loop()
    loop.meter = Meter(loop.model, [], device_for(CPU))
    for _ in range(3):
        loop.forward().backward()
    loop.meter.close()
    assert [r.samples for r in loop.meter.steps] == [16, 16, 16]


def test_an_optimizer_that_calls_the_model_itself():
    loop = Loop(optimizer=torch.optim.LBFGS)

    def closure():
        loop.optimizer.zero_grad()
        loss = loop.forward()
        loss.backward()
        return loss

    for _ in range(2):
        loop.meter.step_begins(loop.optimizer)
        loop.optimizer.step(closure)
        loop.meter.step_ended(loop.optimizer)
    assert len(loop.meter.steps) == 2
    assert loop.meter.measurement(Plan()).breakdown[Category.OPTIMIZER_STATE] > 0
    loop.meter.close()


def test_a_forward_that_raises_is_forgotten_by_the_next():
    loop = Loop(rows=3)
    loop.meter.forward_begins(Batch((loop.batch,), {}))
    assert _get_current_dispatch_mode() is not None
    loop.step(2)
    assert [r.samples for r in loop.meter.steps] == [3, 3]
    assert _get_current_dispatch_mode() is None
    loop.meter.close()


def test_a_loop_that_breaks_off_leaves_no_mode_and_no_step():
    loop = Loop(rows=3)
    loop.forward()
    loop.meter.interrupted()
    assert _get_current_dispatch_mode() is None
    loop.step()
    assert [r.samples for r in loop.meter.steps] == [3]
    loop.meter.close()


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_out_of_memory_leaves_no_mode_after_close(where):
    free = Loop()
    free.step()
    before = takewhile(lambda point: point.phase != where, free.meter.measurement(Plan()).timeline)
    free.meter.close()

    small = Loop(capacity_bytes=max(point.total_bytes for point in before))
    reached = ["forward"]

    def run():
        loss = small.forward()
        reached.append("backward")
        loss.backward()
        reached.append("step")
        small.update()

    with pytest.raises(torch.OutOfMemoryError, match="memlab CPU device out of memory"):
        run()
    assert reached[-1] == where
    small.meter.close()
    small.meter.close()
    assert _get_current_dispatch_mode() is None


def test_a_batch_can_be_done_again_smaller_after_out_of_memory():
    loop = Loop(rows=4096, capacity_bytes=2**20)
    with pytest.raises(torch.OutOfMemoryError):
        loop.step()
    loop.meter.interrupted()
    loop.batch = loop.batch[:8].clone()
    loop.step(2)
    assert [r.samples for r in loop.meter.steps] == [8, 8]
    loop.meter.close()


def test_a_users_mode_around_the_forward_survives():
    class Quiet(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    loop = Loop()
    with Quiet():
        loss = loop.forward()
    loss.backward()
    loop.update()
    assert _get_current_dispatch_mode_stack() == []
    assert len(loop.meter.steps) == 1
    loop.meter.close()


def test_two_meters_one_after_the_other_measure_the_same():
    peaks = []
    for _ in range(2):
        loop = Loop()
        loop.step(2)
        loop.meter.close()
        peaks.append([r.peak_allocated_bytes for r in loop.meter.steps])
    assert peaks[0] == peaks[1]


def test_a_closed_meter_keeps_its_numbers_and_not_the_model():
    loop = Loop()
    loop.step(3)
    loop.forward()
    meter, model, optimizer = loop.meter, weakref.ref(loop.model), weakref.ref(loop.optimizer)
    meter.close()
    del loop
    gc.collect()
    assert model() is None
    assert optimizer() is None
    assert len(meter.steps) == 3
    assert meter.measurement(Plan()).breakdown


def test_records_are_bounded(monkeypatch):
    monkeypatch.setattr("memlab.measuring.times._MOST_RECORDS", 10)
    loop = Loop(width=2)
    loop.step(30)
    assert [r.step for r in loop.meter.steps] == list(range(21, 31))
    loop.meter.close()


def test_a_forward_without_a_scalar_loss_has_no_loss():
    loop = Loop()
    loop.meter.forward_begins(Batch((loop.batch,), {}))
    out = loop.model(loop.batch)
    loop.meter.forward_ended(out)
    out.sum().backward()
    loop.update()
    assert loop.meter.steps[0].loss is None
    loop.meter.close()


def test_a_loss_changed_in_place_later_is_recorded_as_it_was():
    loop = Loop()
    loss = loop.forward()
    loss.backward()
    was = float(loss.detach())
    loop.update()
    with torch.no_grad():
        loss.mul_(0)
    assert math.isclose(loop.meter.steps[0].loss or 0, was)
    loop.meter.close()


def test_host_bytes_are_asked_of_the_session():
    loop = Loop()
    loop.meter = Meter(loop.model, [loop.optimizer], device_for(CPU), host_bytes=lambda: 123)
    loop.step(2)
    assert loop.meter.measurement(Plan()).host_bytes == 123
    loop.meter.close()


def test_samples_and_tokens_of_batches():
    ids = torch.zeros(2, 7, dtype=torch.long)
    images = torch.zeros(3, 1, 8, 8)
    assert Batch((), {"input_ids": ids, "labels": ids}).rows == 2
    assert Batch((), {"input_ids": ids, "labels": ids}).tokens == 14
    assert Batch(({"input_ids": ids},), {}).tokens == 14
    assert Batch((ids,), {}).tokens == 14
    assert Batch((images,), {}).rows == 3
    assert Batch((images, torch.zeros(3, dtype=torch.long)), {}).tokens == 0
    assert Batch((torch.zeros(3, 3, dtype=torch.bool),), {}).tokens == 0
    assert Batch((), {}).rows == 0


@pytest.mark.parametrize("judged", [1, 2, 3])
def test_a_judge_that_is_updated_several_times_is_in_one_step_with_its_generator(judged: int) -> None:
    loop = Loop()
    head = torch.nn.Parameter(torch.zeros(3))
    other = torch.optim.SGD([head], lr=0.1)
    loop.meter.optimizer_found(other)

    def turn(times: int) -> None:
        for _ in range(times):
            loop.step(1)
        loop.forward()
        loop.meter.step_begins(other)
        loop.meter.step_ended(other)

    for _ in range(6):
        turn(judged)
    # in the first turn nobody knows how often the judge is updated
    assert [record.samples for record in loop.meter.steps][-3:] == [16 * (judged + 1)] * 3
    loop.step(2 * judged + 3)
    assert len(loop.meter.steps) > 6, "a generator that is trained no more is not waited for"
    loop.meter.close()
