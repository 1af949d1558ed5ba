"""Observers of the steps of a cell, for a `CellWatch`: the plan to choose, the largest batch, optimizers of models that are gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MemlabError, RefusalError
from memlab.jupyter.display import tell
from memlab.plan import Plan
from memlab.runtime.batch import Batch
from memlab.runtime.namespace import stale_in_step
from memlab.runtime.observer import Observer
from memlab.runtime.workload import Workload
from memlab.session import Session
from memlab.session.tape import Tape, tape_of

# after so many steps of several models one was recorded, if that can be
_MOST_STEPS_UNTIL_CHOSEN = 8


class Chooser(Observer):
    """Chooses the plan at the first training forward of a cell, when the batch is known, and applies it to it.

    A session looks at its techniques after its observers were told of a forward, so the forward that begins
    runs under the new plan already. It is chosen again once a step of the loop is recorded, where that says more.
    """

    def __init__(
        self,
        session: Session,
        choose: Callable[[Sequence[Workload]], Plan],
        choosers: Sequence[Chooser],
        tape: Callable[[], Tape | None],
    ) -> None:
        self._session = session  # of the model that is trained
        # called with all workloads that have been called by then, each with its batch
        self._choose = choose
        self._choosers = choosers  # of the models so far; those before follow with their next step
        self._tape = tape
        self._steps = 0
        self.workload: Workload | None = None
        self.is_final = False

    def forward_begins(self, batch: Batch) -> None:
        if self.is_final:
            return
        is_first = self.workload is None
        if is_first:
            live = self._session.workload
            self.workload = Workload(live.model, live.optimizers, without_graph(batch), name=live.name)
        known = [each.workload for each in self._choosers if each.workload is not None]
        tape = self._tape()
        if len(self._choosers) == 1:
            known[0].tape = tape
            if is_first:
                self._session.switch(self._chosen(known), now=True)
            elif tape_of(known) is not None:
                self._choose_again(known)
                self.close()
            return
        if tape is None or tape.problem:
            if is_first:
                self._follow(self._choosers[0]._session)
                for each in known:  # until a step is recorded; what it was given may be of the loop's own making
                    each.batch = _in_shape(each.batch)
            return
        for each in known:
            each.tape = tape
        plan = self._chosen(known)
        # a judge is called once more after its own step: by the loop's steps this is between two
        for session in (self._session, *self._session.companions):
            session.switch(plan, now=True)
        for chooser in self._choosers:
            chooser.close()

    def _follow(self, first: Session) -> None:
        """Take over the plan that was chosen for another model alone; the other leaves it after its step if this one refuses it."""
        try:
            self._session.switch(first.plan, now=True)
        except RefusalError as refusal:
            self._session.log.note(f"refused {first.plan.label}: {refusal}")
            first.switch(self._session.plan, now=False)

    def _choose_again(self, known: Sequence[Workload]) -> None:
        """Choose with what is known of the loop by now; it trains already, and where nothing is found its plan stays."""
        try:
            self._session.switch(self._choose(known), now=True)
        except MemlabError as refusal:
            self._session.log.note(f"the plan stays, though with the loop's own loss counted: {refusal}")

    def _chosen(self, known: Sequence[Workload]) -> Plan:
        try:
            return self._choose(known)
        except MemlabError as refusal:
            refusal.in_loop = True
            raise

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        # a further model is called by then, and a step was recorded; the batch must not be kept for the whole cell
        self._steps += 1
        if self.is_final or self._steps < (3 if len(self._choosers) == 1 else _MOST_STEPS_UNTIL_CHOSEN):
            return
        if len(self._choosers) > 1:
            tape = self._tape()
            why = "none was recorded" if tape is None else tape.problem
            self._session.log.note(f"no plan is chosen for several models without a step of their loop: {why}")
        for chooser in self._choosers:
            chooser.close()

    def close(self) -> None:
        """Choose no more."""
        self.workload, self.is_final = None, True


class Largest(Observer):
    """Notes the largest batch of a model, the last of several."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self._most_elements = 0

    def forward_begins(self, batch: Batch) -> None:
        elements = batch.elements
        if elements >= self._most_elements:
            self.batch, self._most_elements = batch.copied, elements


def without_graph(batch: Batch) -> Batch:
    """The same batch, whose tensors keep no graph alive (that of a generator, say) and share their memory."""

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.grad_fn is None:
            return value
        return value.detach().requires_grad_()

    return Batch(*tree_map(cut, (batch.args, dict(batch.kwargs))))


def _in_shape(batch: Batch) -> Batch:
    """The same batch without the memory of its floats, which is enough for predictions."""

    def shaped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return made.requires_grad_(value.requires_grad)

    return Batch(*tree_map(shaped, (batch.args, dict(batch.kwargs))))


class StaleOptimizers:
    """Says where an optimizer steps that was made before layers, or the whole model, were made again."""

    def __init__(self, variables: Callable[[], Mapping[str, Any]]) -> None:
        self.were_named = False  # whether the user was told
        self._variables = variables
        self._judged: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()

    def stepped(self, optimizer: torch.optim.Optimizer, workloads: Sequence[Workload]) -> None:
        """Look at an optimizer that steps, the first time it does."""
        if optimizer in self._judged:
            return
        self._judged[optimizer] = None
        for each in () if self.were_named else workloads:
            said = stale_in_step(optimizer, each.model, each.name, self._variables())
            if said is not None:
                tell(said)  # it trains nothing, which nobody notices in a long cell
                self.were_named = True
