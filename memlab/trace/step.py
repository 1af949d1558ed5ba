"""Training steps of the same `Session` on a twin."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memlab.measuring.holdings import gradients_of, inputs_of, parameters_of, state_of
from memlab.measuring.ledger import Observation
from memlab.measuring.runs import loss_of
from memlab.measuring.steps import samples_of, tokens_of
from memlab.plan import Plan
from memlab.records import Phase
from memlab.session import fit
from memlab.trace.recorder import HiddenBytes, Price, Priced, Recorder
from memlab.trace.twin import Twin, live_tensors
from memlab.workload import Batch, Workload

# optimizer state appears in the first step: the second one is like all that follow
_STEPS = 2


@dataclass(frozen=True)
class Trace:
    """What one step on the twin showed.

    Args:
        observation: births and deaths.
        priced: operators that did work, in order.
        samples: rows of the step's batches.
        tokens: tokens of the step's batches.
        host_bytes: bytes techniques would keep off the device.
        notes: what techniques had to say.
    """

    observation: Observation
    priced: tuple[Priced, ...]
    samples: int
    tokens: int
    host_bytes: int
    notes: tuple[str, ...]


def trace_steps(
    twin: Twin, workload: Workload, plan: Plan, price: Price, hidden_bytes: HiddenBytes | None = None
) -> Sequence[Trace]:
    """Run fake training steps under a plan, from fresh optimizer state.

    Args:
        twin: what to run; it is left without gradients and state.
        workload: what the twin was made from, which no operator may touch.
        plan: the plan, applied by the same `Session` as on live objects.
        price: tells the work of an operator.
        hidden_bytes: tells temporaries inside an operator.

    Returns:
        One trace per step: the first, which creates optimizer state, and one like all that follow.

    Raises:
        RefusalError: a technique of the plan does not apply.
        TraceError: what the model computes depends on values.
    """
    recorder = Recorder(twin.fake_mode, price, live_tensors(workload), hidden_bytes)
    try:
        with _random_state_kept(), _watched_model(twin.workload.model, recorder):
            return _traced(twin.workload, plan, recorder)
    finally:
        recorder.close()
        twin.forget()


def _traced(workload: Workload, plan: Plan, recorder: Recorder) -> list[Trace]:
    workload.model.train()
    seen = _Seen(recorder, workload.model)
    traces = []
    with fit(workload, plan) as session:
        session.observers = [seen]
        for _ in range(_STEPS):
            recorder.begin([*parameters_of(workload.model), *state_of(workload.optimizers)])
            recorder.start()
            seen.samples = seen.tokens = 0
            loss_of(workload).backward()  # type: ignore[no-untyped-call]
            for optimizer in workload.optimizers:
                optimizer.step()
            recorder.know([*state_of(workload.optimizers), *parameters_of(workload.model)])
            recorder.stop()
            traces.append(
                Trace(
                    recorder.finish(),
                    tuple(recorder.priced),
                    seen.samples,
                    seen.tokens,
                    session.host_bytes,
                    session.notes,
                )
            )
            for optimizer in workload.optimizers:
                optimizer.zero_grad(set_to_none=True)
    return traces


class _Seen:
    """Tells the recorder what runs; an observer of the session."""

    def __init__(self, recorder: Recorder, model: torch.nn.Module) -> None:
        self._recorder = recorder
        self._model = model
        self.samples = 0
        self.tokens = 0

    def forward_begins(self, batch: Batch) -> None:
        self._recorder.phase = Phase.FORWARD
        self._recorder.know(inputs_of(batch))
        self.samples += samples_of(batch)
        self.tokens += tokens_of(batch)

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        self._recorder.phase = Phase.OTHER

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._recorder.phase = Phase.STEP
        self._recorder.know(gradients_of(self._model))

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._recorder.phase = Phase.OTHER

    def plan_changed(self, plan: Plan) -> None: ...
    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None: ...
    def interrupted(self) -> None: ...


@contextmanager
def _watched_model(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Let the recorder know when the model's own forward runs, below all techniques."""
    original: Callable[..., Any] = model.forward
    had = "forward" in model.__dict__

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with recorder.model_runs():
            return original(*args, **kwargs)

    model.__dict__["forward"] = watched
    try:
        yield
    finally:
        if had:
            model.__dict__["forward"] = original
        else:
            del model.__dict__["forward"]


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Models draw numbers also from Python's generator (layer drop)."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
