"""`Rescuer`: keeps a session's loop running when memory runs out.

What it does, by the place where memory ran out:

1. *In the model's forward*: everything the call made is dropped, random state and buffers go back, the next plan comes
   into force, the same batch runs again.
2. *In its backward*: the same, and the call is run again for the gradients the loop has sent (`guard`).
3. *In the loop's own code*: graphs of the model that wait for their backward pass are dropped (they are made again),
   then optimizer state leaves the device; the function is called again (`loop_code`).
   A plan that updates inside the backward pass (gradient release) leaves nothing to run again from: there the graph is
   the loop's, and only its forward is rescued (rule 1).
4. *In the optimizer's update*: the bucket that failed is as it was, buckets before it are done; the next plan comes
   into force and the others follow (`optimizer_step.run_step`).
5. *Where several models train*: those that are not in trouble follow with their next step. Where that of the model in
   trouble has no further plan, they come to it at once.

6. *In a call without gradients*: its rows are run in parts (`evaluation`).

Where `Evidence` says that memory cannot run out, none of this is in place: the graph, the functions of torch and the
update are the loop's own, and only a forward pass that runs out all the same is rescued (rule 1); the rest
is from then on.

A plan that is reached stays. What was done is in `Rescuer.rescues` and in the session's log.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from memlab.errors import MemlabError, first_line
from memlab.plan import Plan
from memlab.records import Prediction, Rescue
from memlab.rescue.calls import Calls
from memlab.rescue.evaluation import Evaluations
from memlab.rescue.evidence import Evidence
from memlab.rescue.fallback import Place
from memlab.rescue.generation import Generations
from memlab.rescue.loop_code import LoopCode
from memlab.rescue.recovery import Recovery
from memlab.rescue.update import Update
from memlab.runtime import optimizer_step
from memlab.runtime.buckets import is_separable
from memlab.runtime.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from memlab.session import Session


class Rescuer:
    """Rescues the loop of one session.

    Example:
        >>> from memlab import Workload, fit
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        >>> workload = Workload(model, torch.optim.AdamW(model.parameters()))
        >>> with fit(workload, rescue=True) as session:
        ...     loss = model(torch.randn(4, 8)).mean()
        ...     loss.backward()
        >>> session.rescuer.rescues
        []
    """

    def __init__(
        self,
        keep: Collection[str] = (),  # names of plan fields that must not change
        # of plans for this workload and device; order the fallbacks where they are known
        predictions: Mapping[Plan, Prediction] | None = None,
        capacity_bytes: int | None = None,  # size of the device, to tell which predictions fit; None when unknown
        say: Callable[[str], None] | None = None,  # told in words about each rescue, when it has succeeded
        evidence: Evidence | None = None,  # says whether memory can run out in a step; None guards every step
    ) -> None:
        self._evidence = evidence
        self.is_armed = evidence is None  # whether the step under way is guarded
        # whether memory cannot run out on this device, so that there is nothing to do
        self.is_idle = evidence is not None and not evidence.is_limited
        self._session: weakref.ref[Session] | None = None
        self.calls = Calls(self, evidence)
        self.evaluations, self.generations = Evaluations(self), Generations(self)
        self.loop_code = LoopCode(self)
        self.recovery = Recovery(
            lambda: self.session,
            self.calls.follow_parameters,
            self.drop_graphs,
            keep,
            predictions,
            capacity_bytes,
            say,
        )

    @property
    def rescues(self) -> list[Rescue]:
        """Rescues so far, in order."""
        return self.recovery.rescues

    # -- for the session -----------------------------------------------------------------------

    def attach(self, session: Session) -> None:
        """Begin to answer for a session."""
        self._session = weakref.ref(session)
        session.in_force.host.is_guarded = lambda: self.is_armed

    def detach(self) -> None:
        """Let go of the session and of everything kept for its steps."""
        self.leave_loop_code()
        self.calls.drop_aliases()
        self._session = None

    @property
    def is_attached(self) -> bool:
        """Return whether it answers for a session; a graph may outlive that."""
        return self._session is not None and self._session() is not None

    # -- what ends it --------------------------------------------------------------------------

    def is_own(self, error: BaseException) -> bool:
        """Return whether an error that is none of the loop's is one of memlab's making: neither a refusal nor a lack of memory."""
        return isinstance(error, Exception) and not (isinstance(error, MemlabError) or is_out_of_memory(error))

    def steps_aside(self, error: Exception) -> None:
        """Guard no more after an error of memlab's own, which must not end the user's loop."""
        self._end()
        self.session.log.note_once(
            f"memlab's rescue failed and is off from here on: memory that runs out ends the cell ({first_line(error)})"
        )

    def stand_down(self, unreadable: Sequence[str]) -> None:
        """Guard no more, as nothing may run twice."""
        self._end()
        self.session.log.note_not_rescued(
            f"{type(self.session.workload.model).__name__} reads {unreadable[0]}, which cannot be put back: memory that runs out is not rescued"
        )

    def _end(self) -> None:
        self.is_idle, self.is_armed = True, False
        with suppress(Exception):
            self.loop_code.end()
        self.calls.deliver()

    @contextmanager
    def stepping_aside(self) -> Iterator[None]:
        """Context in which an error of memlab's own ends the rescue, and not the loop."""
        try:
            yield
        except Exception as error:
            if not self.is_own(error):
                raise
            self.steps_aside(error)

    # -- the update ----------------------------------------------------------------------------

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update parameters, in one go or in parts, under this plan or another.

        Returns:
            False when a gradient scaler told the optimizer to skip this step, else True.

        Raises:
            BrokenUpdateError: memory that was free is gone, in the middle of an update of which there is no copy.
        """
        self.leave_loop_code()  # that of a closure, which has run by now
        if self.session.shares(optimizer) or not is_separable(optimizer):
            return optimizer_step.run_step(optimizer, self.session.techniques)
        update = Update(optimizer, lambda error: self.recovery.free(Place.STEP, error))
        return self.recovery.until_it_fits(
            lambda: update.run(self.session.techniques),
            lambda oom: self.recovery.make_room(oom, Place.STEP, is_as_before=not update.is_partly_done),
        )

    def loop_code_begins(self) -> None:
        """A guarded call is over, and the loop goes on."""
        self.recovery.work_begins()
        self.loop_code.begin()

    @property
    def is_in_other_call(self) -> bool:
        """Return whether another model of the loop is being called, whose own rescuer sees to that."""
        return any(each.is_in_call for each in self.session.companions)

    def leave_loop_code(self) -> None:
        """The loop's own code is over: its optimizer steps, or its cell ends."""
        with self.stepping_aside():
            self.loop_code.end()
            self.calls.backward_ended()
        session = self._session() if self._session is not None else None
        if session is not None and session.in_force.held_tensors:
            self.calls.drop_aliases()  # the update replaces what they share with the parameters, and they would keep it
        self.recovery.work_begins()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step.

        Returns:
            Whether its update can be undone and done in parts, and so is to be done by `update`. The log says once per
            kind of optimizer when not.
        """
        with self.stepping_aside():
            return self._serves(optimizer)
        return False

    def _serves(self, optimizer: torch.optim.Optimizer) -> bool:
        self.leave_loop_code()
        is_served = is_separable(optimizer)
        self.recovery.is_in_step = not is_served  # also for what is armed only when memory runs out in its closure
        if not self.is_armed or self.session.shares(optimizer):
            return False
        if not is_served:
            self.session.log.note_not_rescued(
                f"memory that runs out in the update of {type(optimizer).__name__} is not rescued, as it cannot be done in parts"
            )
        return is_served

    def step_ended(self) -> None:
        """An optimizer has stepped; a closure's own code is over with it."""
        with self.stepping_aside():
            self.leave_loop_code()
            self.recovery.is_in_step = False
            self.calls.step_ended()
            if self._evidence is not None:
                self._evidence.step_ended()

    # -- for the loop's own code ---------------------------------------------------------------

    def makes_room_for_loop(self, error: BaseException, attempt: int) -> None:
        """Drop graphs that can be made again, then let optimizer state leave the device."""
        if attempt == 1 and self.drop_graphs():
            self.recovery.free(Place.LOOP, error)
        else:
            self.recovery.make_room(error, Place.LOOP)

    def drop_graphs(self) -> bool:
        """Drop graphs of calls that wait for their backward pass; whether there were any."""
        others = (each.rescuer for each in self.session.companions)
        rescuers = [self, *(each for each in others if each is not None)]
        waiting = [call for each in rescuers for call in each.calls.waiting]
        for call in waiting:
            call.drop_graph()
        return bool(waiting)

    # -- parts ---------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session it answers for."""
        session = self._session() if self._session is not None else None
        assert session is not None
        return session

    @property
    def device(self) -> torch.device:
        """Return the device that the model is trained on."""
        return self.session.workload.device
