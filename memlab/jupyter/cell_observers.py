"""What a `CellWatch` has told to it of each step: the plan to choose, the largest batch, the plans in force, further models."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memlab.errors import MemlabError
from memlab.measuring.beside import Beside
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Batch, Workload, stale_in_step
from memlab.session import Session


class Chooser(Observer):
    """Chooses the plan at the first training forward of a cell, when the batch is known, and applies it to it.

    A session looks at its techniques after its observers were told of a forward, so the forward that begins
    runs under the new plan already.
    """

    def __init__(
        self, session: Session, choose: Callable[[Sequence[Workload]], Plan], choosers: Sequence[Chooser]
    ) -> None:
        self._session = session  # of the model that is trained
        # called with all workloads that have been called by then, each with its batch
        self._choose: Callable[[Sequence[Workload]], Plan] | None = choose
        self._choosers = choosers  # of the models so far, this one last; those before follow with their next step
        self.workload: Workload | None = None
        self._steps = 0

    def forward_begins(self, batch: Batch) -> None:
        choose, self._choose = self._choose, None
        if choose is None:
            return
        live = self._session.workload
        self.workload = Workload(live.model, live.optimizers, without_graph(batch), name=live.name)
        try:
            plan = choose([each.workload for each in self._choosers if each.workload is not None])
        except MemlabError as refusal:
            refusal.in_loop = True
            raise
        self._session.switch(plan, now=True)
        for each in self._session.companions:
            each.switching.ask(plan)

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        # a further model is called by then; the batch must not be kept for the whole cell
        self._steps += 1
        if self._steps > 1:
            self.workload = None


class Largest(Observer):
    """Notes the largest batch of a model, the last of several."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self._most_elements = 0

    def forward_begins(self, batch: Batch) -> None:
        elements = batch.elements
        if elements >= self._most_elements:
            self.batch, self._most_elements = batch, elements


class Notes(Largest):
    """Notes which plans were in force during a cell as well."""

    def __init__(self, step_ended: Callable[[], None], broke_off: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.plans: tuple[Plan, ...] = ()  # those, the last one last
        self._step_ended = step_ended
        self._broke_off = broke_off
        self.thread: int | None = None  # that the first model trains on; None before its first call

    def forward_begins(self, batch: Batch) -> None:
        self.thread = self.thread or threading.get_ident()
        super().forward_begins(batch)

    def plan_changed(self, plan: Plan) -> None:
        self.plans = (*(known for known in self.plans if known != plan), plan)

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        self._step_ended()

    def refused(self, refusal: MemlabError) -> None:
        self._broke_off(refusal)

    def interrupted(self) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self._broke_off(error)


class BesideInCell(Beside):
    """Tells the notes of a cell as well what happens to a further model."""

    def __init__(self, meter: Meter, number: int, notes: Notes) -> None:
        super().__init__(meter, number)
        self._notes = notes

    def plan_changed(self, plan: Plan) -> None:
        if plan not in self._notes.plans:
            self._meter.plan_changed(plan)
            self._notes.plan_changed(plan)

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        super().step_ended(optimizer, skipped)
        self._notes.step_ended(optimizer, skipped)

    def interrupted(self) -> None:
        super().interrupted()
        self._notes.interrupted()


def without_graph(batch: Batch) -> Batch:
    """The same batch, whose tensors keep no graph alive (that of a generator, say) and share their memory."""

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        return value.detach().requires_grad_()

    args, kwargs = tree_map(cut, (batch.args, dict(batch.kwargs)))
    return Batch(args, kwargs)


class StaleOptimizers:
    """Says where an optimizer steps that was made before layers, or the whole model, were made again."""

    def __init__(self, variables: Callable[[], Mapping[str, Any]]) -> None:
        self.is_silent = False  # whether it says nothing
        self._variables = variables
        self._judged: set[int] = set()

    def stepped(self, optimizer: torch.optim.Optimizer, workloads: Sequence[Workload]) -> None:
        """Look at an optimizer that steps, the first time it does."""
        if id(optimizer) in self._judged:
            return
        self._judged.add(id(optimizer))
        for each in () if self.is_silent else workloads:
            said = stale_in_step(optimizer, each.model, each.name, self._variables())
            if said is not None:
                print(f"memfit: {said}")  # noqa: T201 - it trains nothing, which nobody notices in a long cell
