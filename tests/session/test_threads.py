"""Loops that train in several threads, and threads that read what another one trains: as without memlab."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import Workload, fit

PLANS = {
    "": 0.0,
    "--accumulate 2": 1e-6,
    "--checkpoint": 0.0,
    "--offload activations,optimizer": 0.0,
    "--offload params": 0.0,
    "--release-grads": 0.0,
    "--bf16": 2e-2,
    "--fp16": 1e-2,
    "--accumulate 2 --checkpoint --fp16": 1e-2,
    "--precision pure-bf16": 3e-2,
    "--adam8bit": 2e-2,
    "--chunk-loss": 1e-6,
}
STEPS = 4
Do = Callable[[Callable[[], Any]], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(32, 2048, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(inputs)), targets)


def made(plan: str = "--adam8bit") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    if "adam" in plan:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    # which sees how large gradients are
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 32, generator=generator), torch.randint(0, 2048, (8,), generator=generator)


@contextmanager
def threads() -> Iterator[list[Do]]:
    """This thread, and two others that have made as many operators with a graph as they like."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def within(pool: ThreadPoolExecutor) -> Do:
            def do(work: Callable[[], Any]) -> Any:
                future: Future[Any] = pool.submit(work)
                return future.result()

            return do

        yield [lambda work: work(), within(one), within(other)]


def trained(plan: str, seed: int, *, whole: bool, loop: str = "") -> list[float]:
    """Losses of a loop whose forward passes, backward passes and updates are each in a thread that is drawn."""
    draw = random.Random(seed)
    model, optimizer = made(loop or plan)
    older = torch.ones(1, requires_grad=True)
    losses = []
    with threads() as each, fit(Workload(model, optimizer), plan):
        for _ in range(2000):
            older = older * 1  # numbers of operators differ from thread to thread
        for number in range(STEPS):
            inputs, targets = batch(number)
            forward, backward, step = [draw.choice(each)] * 3 if whole else draw.choices(each, k=3)
            loss = forward(lambda: model(inputs, targets))  # noqa: B023
            backward(loss.backward)
            step(optimizer.step)
            step(optimizer.zero_grad)
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", PLANS)
def test_losses_are_the_same_whatever_threads_the_steps_are_made_in(plan: str) -> None:
    for seed in range(4):
        ran = trained(plan, seed, whole=seed % 2 == 0)
        assert ran == pytest.approx(trained("", seed, whole=True, loop=plan), rel=PLANS[plan] or 1e-7), seed


READS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "counts": lambda _, optimizer: [state["step"] for state in [*optimizer.state.values()] if "step" in state],
    "moments": lambda _, optimizer: [state.get("exp_avg") for state in [*optimizer.state.values()]],
    "checkpoints": lambda model, optimizer: (model.state_dict(), optimizer.state_dict()),
}


@pytest.mark.parametrize("plan", ["--adam8bit", "--optim adafactor", "--precision pure-bf16", "--offload optimizer"])
def test_reading_state_while_another_thread_trains_changes_nothing(plan: str) -> None:
    def run(read: Callable[[nn.Module, torch.optim.Optimizer], Any] | None) -> tuple[dict[str, torch.Tensor], set[Any]]:
        model, optimizer = made()
        errors: list[BaseException] = []

        def train() -> None:
            try:
                for number in range(40):
                    optimizer.zero_grad()
                    model(*batch(number)).backward()
                    optimizer.step()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        with fit(Workload(model, optimizer), plan):
            training = threading.Thread(target=train)
            training.start()
            while training.is_alive():
                if read is not None:
                    read(model, optimizer)
            training.join()
            counts = {float(state["step"]) for state in optimizer.state.values()}
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        assert not errors
        return weights, counts

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        alone, _ = run(None)
        for name, read in READS.items():
            weights, counts = run(read)
            assert counts == {40.0}, name
            assert all(torch.equal(weights[key], value) for key, value in alone.items()), name
    finally:
        sys.setswitchinterval(interval)


class Failing(torch.optim.AdamW):
    """Fails where it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("no step")
        return super().step(closure)


@pytest.mark.parametrize("plan", ["--offload optimizer", "--precision pure-bf16"])
def test_a_step_that_fails_in_a_thread_that_ends_does_not_stop_the_others(plan: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = Failing(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(*batch(0)).backward()
        optimizer.step()

    def in_thread() -> BaseException | None:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(step).exception(timeout=60)

    with fit(Workload(model, optimizer), plan):
        step()
        optimizer.fails = True
        assert isinstance(in_thread(), ValueError)
        optimizer.fails = False
        assert in_thread() is None
        step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
