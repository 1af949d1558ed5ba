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

Where `Evidence` says that memory cannot run out, none of this is in place: the graph, the functions of torch and the
update are the loop's own, and only a forward pass that runs out all the same is rescued (rule 1); the rest
is from then on.

A plan that is reached stays. What was done is in `Rescuer.rescues` and in the session's log.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memlab.errors import MemlabError, first_line
from memlab.plan import Plan
from memlab.records import Prediction, Rescue
from memlab.rescue.evidence import Evidence
from memlab.rescue.fallback import Place
from memlab.rescue.guard import GuardedCall, _Guarded
from memlab.rescue.loop_code import LoopCode
from memlab.rescue.recovery import Recovery
from memlab.rescue.start import Start, Weights
from memlab.rescue.update import Update
from memlab.runtime import graphs, optimizer_step
from memlab.runtime.aliases import Aliases
from memlab.runtime.batch import Batch
from memlab.runtime.buckets import is_separable
from memlab.runtime.graphs import is_within_checkpoint, why_as_written
from memlab.runtime.lifetimes import WhileAlive
from memlab.runtime.loop_mode import has_compiled_code
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.stand_ins import is_ours

if TYPE_CHECKING:
    from memlab.session import Session


# what the loop asks of tensors within the model's one node is heard by a mode, which stays away from compiled code
_FEATURES = "the model leaves tensors with a graph beside its output, and something was compiled in this process"
_IN_BACKWARD = "memory that runs out in a call within a backward pass (of a hook, say) is not rescued"


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
        self._derives_itself = False  # the model runs a backward pass in its forward
        self._session: weakref.ref[Session] | None = None
        self._loop_code = LoopCode(self)
        self._leaves_features = False  # whether a call has left some beside its output
        self._aliases: Aliases | None = None
        self._calls: WhileAlive[None] = WhileAlive()
        self._stepped_at = -1  # number of the last operator before the last step ended
        self._done: list[GuardedCall] = []  # in the backward pass under way
        self._runs_code: dict[int, bool] = {}  # by the number of operators of a call
        self.recovery = Recovery(
            lambda: self._live_session,
            self._follow_parameters,
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

    def detach(self) -> None:
        """Let go of the session and of everything kept for its steps."""
        self.leave_own_code()
        self._aliases = None
        self._session = None

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a training forward so that it can be repeated; `run` goes through the techniques in force at the time.

        Raises:
            NothingFitsError: under no plan to fall back on there is memory for it.
        """
        way: Callable[..., Any] = _as_written
        with self._stepping_aside():
            way = self._way(args, kwargs)
        return way(run, args, kwargs)

    def _way(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """Return how a call is run."""
        self._loop_code.end()
        self.recovery.work_begins()
        if self._derives_itself or not _can_be_guarded(self._model):
            return _as_written
        if torch._C._current_graph_task_id() != -1:
            return self._call_in_backward
        self.is_armed = self._evidence is None or self._evidence.is_tight(Batch(args, kwargs).elements)
        unserved = ""
        if is_within_checkpoint():  # which counts what one run saves, and none that is begun again
            unserved = "within torch.utils.checkpoint"
        elif not all(map(_is_plain, self._model.parameters())):
            unserved = "with computed weights (functional_call)"
        if unserved:
            if self.is_armed:
                self._live_session.log.note_not_rescued(f"memory that runs out in a call {unserved} is not rescued")
            return _as_written
        if not self.is_armed:
            return self._call_unguarded
        why = ""
        if any(technique.updates_in_backward for technique in self._live_session.techniques):
            why = "it updates parameters"
        elif any(not is_ours(hook) for p in self._model.parameters() for hook in (p._backward_hooks or {}).values()):
            # which would be called with None by a backward pass that does not reach the parameter
            why = "parameters have hooks"
        elif self._leaves_features and has_compiled_code():
            why = _FEATURES
        return partial(self._call_openly, why) if why else self._call_guarded

    def _call_guarded(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward whose graph is memlab's."""
        guarded: GuardedCall | None = None

        def work() -> Any:
            nonlocal guarded
            guarded = guarded or self._guarded(run, args, kwargs)
            if guarded.unreadable:
                self._stand_down(guarded.unreadable)
                return run(*args, **kwargs)
            return guarded.outputs()

        def make_room(oom: BaseException) -> None:
            if guarded is not None and (guarded.unreadable or not guarded.can_start_over):
                raise oom
            self.recovery.make_room(oom, Place.FORWARD, guarded.start_over if guarded is not None else lambda: None)

        goes_on = False
        try:
            self._current_aliases().deliver()
            output = self.recovery.until_it_fits(work, make_room)
            if guarded is not None and guarded.leaves_features and has_compiled_code():
                self._leaves_features = goes_on = True
                self._live_session.log.note_not_rescued(
                    f"memory that runs out in a backward pass is not rescued while {_FEATURES}"
                )
            elif guarded is not None and guarded.goes_on:
                goes_on = True
                self._live_session.log.note_not_rescued(
                    f"a call of {type(self._model).__name__} goes on from the graph of an earlier one: memory that runs out in its "
                    "backward pass is not rescued"
                )
            elif self.is_idle:
                return output
            else:
                self._learn_of_own_backward()
                self._loop_code_begins()
                return output
        except Exception as error:
            if not (guarded.is_own(error) if guarded is not None else self.is_own(error)):
                raise
            self.steps_aside(error)
        if guarded is not None:
            guarded.start_over()
        output = run(*args, **kwargs)
        if goes_on:
            with self._stepping_aside():
                self._loop_code_begins()
        return output

    def _learn_of_own_backward(self) -> None:
        """Note where a model runs a backward pass in its forward, whose gradients are the parameters' from then on."""
        if self._current_aliases().deliver():
            self._derives_itself = True
            self._live_session.log.note_not_rescued(
                f"{type(self._model).__name__} runs a backward pass in its forward, which cannot be repeated: memory that runs "
                "out there is not rescued"
            )

    def _loop_code_begins(self) -> None:
        self.recovery.work_begins()
        self._loop_code.begin()

    def is_own(self, error: BaseException) -> bool:
        """Return whether an error that is none of the loop's is one of memlab's making: neither a refusal nor a lack of memory."""
        return isinstance(error, Exception) and not (isinstance(error, MemlabError) or is_out_of_memory(error))

    def steps_aside(self, error: Exception) -> None:
        """Guard no more after an error of memlab's own, which must not end the user's loop."""
        self._end()
        self._live_session.log.note_once(
            f"memlab's rescue failed and is off from here on: memory that runs out ends the cell ({first_line(error)})"
        )

    def _stand_down(self, unreadable: Sequence[str]) -> None:
        """Guard no more, as nothing may run twice."""
        self._end()
        self._live_session.log.note_not_rescued(
            f"{type(self._model).__name__} reads {unreadable[0]}, which cannot be put back: memory that runs out is not rescued"
        )

    def _end(self) -> None:
        self.is_idle, self.is_armed = True, False
        with suppress(Exception):
            self._loop_code.end()
        if self._aliases is not None:
            self._aliases.deliver()

    @contextmanager
    def _stepping_aside(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self.is_own(error):
                raise
            self.steps_aside(error)

    def _call_unguarded(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward as the loop wrote it; should memory run out against all evidence, guard it and what follows."""
        start, weights = Start(self._model, self._live_session.workload.device, None), Weights(self._model)
        oom: BaseException | None = None
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            if not (weights.are_untouched and self.recovery.can_rescue(error)) or self._reads_on():
                raise
            oom = error
        assert self._evidence is not None
        self._evidence.ran_out()
        self.recovery.rows = Batch(args, kwargs).rows or 1
        self.recovery.make_room(oom, Place.FORWARD, start.restore)
        return self.call(run, args, kwargs)

    def _reads_on(self) -> bool:
        """Return whether the model has read what cannot be put back, so that its call cannot be repeated."""
        unreadable = Start(self._model, self._live_session.workload.device).state.unreadable
        if unreadable:
            self._stand_down(unreadable)
        return bool(unreadable)

    def _call_openly(self, why: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward whose backward pass cannot be repeated: its graph is the loop's."""
        session = self._live_session
        session.log.note_not_rescued(f"memory that runs out in a backward pass is not rescued while {why}")
        self.recovery.rows = Batch(args, kwargs).rows or 1
        start, weights = Start(self._model, session.workload.device), Weights(self._model)

        def make_room(oom: BaseException) -> None:
            nonlocal weights
            if start.state.unreadable or not weights.are_untouched:
                raise oom
            self.recovery.make_room(oom, Place.FORWARD, start.restore)
            weights = Weights(self._model)

        return self.recovery.until_it_fits(lambda: run(*args, **kwargs), make_room)

    def _call_in_backward(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call that a hook of the loop's makes, or a recomputation: the pass around it cannot be repeated from here."""
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            if is_out_of_memory(error):
                self._live_session.log.note_not_rescued(_IN_BACKWARD)
            raise

    def _guarded(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GuardedCall:
        guarded = GuardedCall(self._model, run, args, kwargs, self._current_aliases(), self)
        self._calls.keep(guarded, None)
        self.recovery.rows = guarded.rows
        return guarded

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update parameters, in one go or in parts, under this plan or another.

        Returns:
            False when a gradient scaler told the optimizer to skip this step, else True.

        Raises:
            BrokenUpdateError: memory that was free is gone, in the middle of an update of which there is no copy.
        """
        self.leave_own_code()  # that of a closure, which has run by now
        if self._live_session.shares(optimizer) or not is_separable(optimizer):
            return optimizer_step.run_step(optimizer, self._live_session.techniques)
        update = Update(optimizer, lambda error: self.recovery.free(Place.STEP, error))
        return self.recovery.until_it_fits(
            lambda: update.run(self._live_session.techniques),
            lambda oom: self.recovery.make_room(oom, Place.STEP, is_as_before=not update.is_partly_done),
        )

    def leave_own_code(self) -> None:
        """The loop's own code is over: its optimizer steps, or its cell ends."""
        with self._stepping_aside():
            self._loop_code.end()
            self.backward_ended()
        session = self._session() if self._session is not None else None
        if session is not None and session.in_force.held_tensors:
            self._aliases = None  # the update replaces what they share with the parameters, and they would keep it
        self.recovery.work_begins()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step.

        Returns:
            Whether its update can be undone and done in parts, and so is to be done by `update`. The log says once per
            kind of optimizer when not.
        """
        with self._stepping_aside():
            return self._serves(optimizer)
        return False

    def _serves(self, optimizer: torch.optim.Optimizer) -> bool:
        self.leave_own_code()
        is_served = is_separable(optimizer)
        self.recovery.is_in_step = not is_served  # also for what is armed only when memory runs out in its closure
        if not self.is_armed or self._live_session.shares(optimizer):
            return False
        if not is_served:
            self._live_session.log.note_not_rescued(
                f"memory that runs out in the update of {type(optimizer).__name__} is not rescued, as it cannot be done in parts"
            )
        return is_served

    def step_ended(self) -> None:
        """An optimizer has stepped; a closure's own code is over with it."""
        with self._stepping_aside():
            self.leave_own_code()
            self.recovery.is_in_step = False
            self._stepped_at = graphs.sequence_nr()
            if self._evidence is not None:
                self._evidence.step_ended()

    # -- for guarded calls ---------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """Return whether this thread has made no graph since the last step that a call could go on from."""
        return self._stepped_at == graphs.sequence_nr()

    def runs_code(self, operators: int, outputs: Iterable[torch.Tensor]) -> bool:
        """Return whether a backward pass through a call runs code of the user's; calls of as many operators are alike."""
        if operators not in self._runs_code:
            self._runs_code[operators] = graphs.runs_code_of_the_users(outputs)
        return self._runs_code[operators]

    def backward_begins(self, call: GuardedCall) -> None:
        """The loop's own part of the backward pass is over as far as this call is concerned."""
        self._loop_code.model_begins(is_kept=self.keeps_graph())
        self.recovery.work_begins()

    def keeps_graph(self) -> bool:
        """Return whether the loop asked for its graph to be kept."""
        kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        return kept and not self._loop_code.graph_is_kept_for_itself

    def is_done(self, call: GuardedCall) -> None:
        """Let go of a call, unless the backward pass it is a part of may have to be run again."""
        if self._loop_code.graph_is_kept_for_itself:
            self._done.append(call)
        else:
            call.close()

    def makes_room(self, error: BaseException, call: GuardedCall, *, keeps_rows: bool) -> None:
        """Bring another plan into force for a call that is to be run again."""
        self.recovery.rows = call.rows
        self.recovery.make_room(error, Place.BACKWARD, keeps_rows=keeps_rows)

    # -- for the loop's own code ---------------------------------------------------------------

    def makes_room_for_loop(self, error: BaseException, attempt: int) -> None:
        """Drop graphs that can be made again, then let optimizer state leave the device."""
        if attempt == 1 and self.drop_graphs():
            self.recovery.free(Place.LOOP, error)
        else:
            self.recovery.make_room(error, Place.LOOP)

    def is_guarded(self, node: Any) -> bool:
        """Return whether a node of the autograd graph is a guarded call."""
        return isinstance(node, _Guarded._backward_cls)

    def backward_runs_again(self) -> None:
        """Guarded calls whose gradients were handed over in a backward pass that broke off are differentiated anew."""
        while self._done:
            self._done.pop().undo_backward()

    def backward_ended(self) -> None:
        """Hand over gradients that reached aliases past the node of their call."""
        while self._done:
            self._done.pop().close()
        if self._aliases is not None:
            self._aliases.deliver()
        self.recovery.settle()

    def _follow_parameters(self) -> None:
        """Drop aliases of what a plan has moved off the device."""
        if self._aliases is not None:
            self._aliases.follow()

    def drop_graphs(self) -> bool:
        """Drop graphs of calls that wait for their backward pass; whether there were any."""
        others = (each.rescuer for each in self._live_session.companions)
        rescuers = [self, *(each for each in others if each is not None)]
        waiting = [call for each in rescuers for call in each._calls.alive if call.has_graph]
        for call in waiting:
            call.drop_graph()
        return bool(waiting)

    # -- parts ---------------------------------------------------------------------------------

    @property
    def _live_session(self) -> Session:
        session = self._session() if self._session is not None else None
        assert session is not None
        return session

    @property
    def is_exact(self) -> bool:
        """Return whether the plan in force computes what the loop as written does."""
        return self._live_session.plan.is_exact

    @property
    def device(self) -> torch.device:
        """Return the device that the model is trained on."""
        return self._live_session.workload.device

    @property
    def _model(self) -> torch.nn.Module:
        return self._live_session.workload.model

    def _current_aliases(self) -> Aliases:
        if self._aliases is None or not self._aliases.serve(self._model):
            self._aliases = Aliases(self._model)
        return self._aliases


def _as_written(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return run(*args, **kwargs)


def _can_be_guarded(model: torch.nn.Module) -> bool:
    """Return whether a call is outside of function transforms, and trains the model."""
    return not why_as_written() and any(parameter.requires_grad for parameter in model.parameters())


def _is_plain(parameter: torch.nn.Parameter) -> bool:
    """Return whether gradients may come to a parameter from a node of memlab's.

    `functional_call` puts computed weights in the place of parameters, whose graph goes on behind the model.
    """
    return parameter.is_leaf
