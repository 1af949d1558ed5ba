"""Short steps of which a session takes nothing over: what ends the rest, and what is known afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.measuring.device import Device
from memlab.measuring.steps import Meter
from memlab.rescue.rescuer import Rescuer
from memlab.runtime.observer import Observer
from memlab.runtime.stand_ins import CALL
from memlab.session import Session


class Counts(Observer):
    """Counts what it is told of."""

    def __init__(self) -> None:
        self.forwards = self.steps = self.passed = 0

    def forward_begins(self, batch: object) -> None:
        self.forwards += 1

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self.steps += 1

    def rested(self, steps: int) -> None:
        self.passed += steps


class Loop:
    """A small model in training, and a session that counts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.counts = Counts()
        self.session: Session = fit(Workload(self.model, self.optimizer), "", [self.counts])

    @property
    def is_taken_over(self) -> bool:
        return CALL in vars(self.model) and vars(self.model)[CALL] is not None

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.full((3, 4), float(step % 3))).square().mean()
            loss.backward()
            self.optimizer.step()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr("memlab.session.session._MOST_REST_SECONDS", 3600.0)  # on a busy machine a short step is long
    made = Loop()
    yield made
    made.session.undo()


def test_a_resting_session_takes_nothing_over_counts_the_steps_and_goes_on(loop: Loop) -> None:
    plain = Loop()
    plain.session.undo()
    loop.train(2)
    loop.session.rest(5)
    assert not loop.is_taken_over
    loop.train(4)
    assert (loop.counts.steps, loop.counts.passed, loop.is_taken_over) == (2, 0, False)
    loop.train(1)
    assert (loop.counts.steps, loop.counts.passed, loop.is_taken_over) == (2, 5, True)
    loop.train(1)
    assert (loop.counts.forwards, loop.counts.steps, loop.session.steps) == (3, 3, 8)
    for steps in (2, 4, 1, 1):
        plain.train(steps)
    for own, untouched in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(own, untouched)


def test_a_plan_that_is_asked_for_comes_with_the_next_step(loop: Loop) -> None:
    loop.train(1)
    loop.session.rest(100)
    loop.session.switching.ask(loop.session.plan.of("--accumulate 3"))
    loop.train(1)
    assert loop.session.plan.label == "as written"
    loop.train(1)
    assert loop.session.plan.label == "--accumulate 3"
    assert loop.session.steps == 3


def test_a_switch_in_the_middle_of_a_step_waits_for_its_end(loop: Loop) -> None:
    loop.train(1)
    loop.session.rest(100)
    loss = loop.model(torch.ones(3, 4)).square().mean()
    loop.session.switch("--precision bf16")
    assert loop.session.plan.label == "as written"
    loss.backward()
    loop.optimizer.step()
    loop.train(1)
    assert loop.session.plan.label == "--bf16"


@pytest.mark.parametrize("plan", ["--accumulate 2", "--adam8bit"])
def test_a_session_with_a_plan_does_not_rest(loop: Loop, plan: str) -> None:
    loop.session.undo()
    loop.session = fit(Workload(loop.model, torch.optim.AdamW(loop.model.parameters())), plan)
    loop.session.rest(10)
    assert loop.is_taken_over
    loop.session.switch("")
    loop.session.rest(10)
    assert not loop.is_taken_over


def test_a_session_that_rescues_does_not_rest(loop: Loop) -> None:
    loop.session.accept(Rescuer())
    loop.session.rest(10)
    assert loop.is_taken_over
    loop.session.dismiss()
    loop.session.rest(10)
    assert not loop.is_taken_over


def test_long_steps_end_a_rest(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.session.rest(1000)
    loop.train(1)
    assert not loop.is_taken_over
    monkeypatch.setattr("memlab.session.session._MOST_REST_SECONDS", 0.0)
    loop.train(1)
    assert loop.is_taken_over
    assert loop.counts.passed == 2


def test_undo_in_a_rest_leaves_nothing(loop: Loop) -> None:
    before = set(vars(nn.Linear(2, 2)))
    loop.session.rest(10)
    loop.train(1)
    loop.session.undo()
    assert not loop.is_taken_over
    assert set(vars(loop.model)) == before - {"in_features", "out_features"}
    assert not loop.optimizer._optimizer_step_post_hooks


def test_what_is_compiled_meanwhile_stays(loop: Loop) -> None:
    loop.session.rest(2)
    compiled = loop.model._call_impl
    vars(loop.model)[CALL] = compiled
    loop.train(2)
    assert loop.is_taken_over
    loop.train(1)
    assert loop.counts.steps == 1
    loop.session.undo()
    assert vars(loop.model)[CALL] is compiled


def test_a_class_with_a_call_of_its_own_is_not_let_alone() -> None:
    class Own(nn.Linear):
        def __call__(self, *args: torch.Tensor) -> torch.Tensor:
            return super().__call__(*args)

    model = Own(2, 2)
    with fit(Workload(model, torch.optim.SGD(model.parameters()))) as session:
        session.rest(10)
        assert vars(model)[CALL] is not None


def _meter_of(model: nn.Module, optimizer: torch.optim.Optimizer, **size: int) -> Meter:
    return Meter(model, [optimizer], Device(**size))


def _watched_steps(loop: Loop, meter: Meter, steps: int) -> None:
    """Train as a cell does: after each step the meter says whether some may pass."""
    loop.session.observers.add(meter)
    for _ in range(steps):
        loop.train(1)
        if loop.is_taken_over and (many := meter.steps_to_pass()):
            loop.session.rest(many)
    loop.session.wake()


def test_a_meter_lets_short_steps_pass_and_numbers_the_others_truly(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memlab.measuring.steps._SHORT_SECONDS", 3600.0)
    monkeypatch.setattr("memlab.session.session._MOST_REST_SECONDS", 3600.0)
    meter = _meter_of(loop.model, loop.optimizer)
    _watched_steps(loop, meter, 120)
    assert meter.times.steps_ended == loop.session.steps == 120
    numbers = [record.step for record in meter.steps]
    assert numbers[:20] == list(range(1, 21))
    assert numbers[20] == 51
    assert len(numbers) < 80
    # a step after a rest is timed from the end of the last one that passed
    assert all(record.seconds > 0 for record in meter.steps)
    assert len(meter.measurement(loop.session.plan).step_seconds) > 5


def test_a_meter_is_told_of_every_longer_step_and_of_all_under_a_capacity(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    capped = _meter_of(loop.model, loop.optimizer, capacity_bytes=2**30)
    monkeypatch.setattr("memlab.measuring.steps._SHORT_SECONDS", 0.0)
    _watched_steps(loop, meter := _meter_of(loop.model, loop.optimizer), 60)
    assert [record.step for record in meter.steps] == list(range(1, 61))
    loop.session.observers.remove(meter)
    monkeypatch.setattr("memlab.measuring.steps._SHORT_SECONDS", 3600.0)
    _watched_steps(loop, capped, 60)
    assert [record.step for record in capped.steps] == list(range(1, 61))
