"""`Calls`: a session's training calls, run so that each can be repeated where memory runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memlab.rescue.evidence import Evidence
from memlab.rescue.fallback import Place
from memlab.rescue.guard import GuardedCall
from memlab.rescue.start import Start, Weights
from memlab.runtime import graphs
from memlab.runtime.aliases import Aliases
from memlab.runtime.backward import is_in_backward
from memlab.runtime.batch import Batch
from memlab.runtime.graphs import is_within_checkpoint, why_as_written
from memlab.runtime.lifetimes import WhileAlive
from memlab.runtime.loop_mode import has_compiled_code
from memlab.runtime.mechanisms import EarlyUpdates, brought
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.stand_ins import have_others

if TYPE_CHECKING:
    from memlab.rescue.rescuer import Rescuer

# what the loop asks of tensors within the model's one node is heard by a mode, which stays away from compiled code
_FEATURES = "the model leaves tensors with a graph beside its output, and something was compiled in this process"
_OTHER_LEAVES = (
    "gradients go to tensors that are neither the model's parameters nor came with one (made in its forward pass, say)"
)
_IN_BACKWARD = "memory that runs out in a call within a backward pass (of a hook, say) is not rescued"

Run = Callable[..., Any]  # goes through the techniques in force at the time


class Calls:
    """Training calls of one session's model."""

    def __init__(self, rescuer: Rescuer, evidence: Evidence | None) -> None:
        self.rescuer = rescuer  # whose session it is
        self._evidence = evidence
        self._derives_itself = False  # the model runs a backward pass in its forward
        self._why_openly = ""  # why the model's graph must be the loop's, where it must
        self._aliases: Aliases | None = None
        self._alive: WhileAlive[None] = WhileAlive()
        self._stepped_at = (0, -1)  # the thread and the number of its last operator before the last step ended
        self._done: list[GuardedCall] = []  # in the backward pass under way
        # by the number of operators of a call; calls of as many are alike
        self._runs_code: dict[int, bool] = {}
        self._has_other_leaves: dict[int, bool] = {}

    @property
    def _model(self) -> nn.Module:
        return self.rescuer.session.workload.model

    # -- how a call is run ---------------------------------------------------------------------

    def run(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a training forward so that it can be repeated. Raises `NothingFitsError`: under no plan to fall back on there is memory for it."""
        way: Callable[..., Any] = _as_written
        with self.rescuer.stepping_aside():
            way = self._way(args, kwargs)
        return way(run, args, kwargs)

    def _way(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """Return how a call is run."""
        rescuer = self.rescuer
        rescuer.loop_code.end()
        rescuer.evaluations.trained()
        rescuer.recovery.work_begins()
        if self._derives_itself or not _can_be_guarded(self._model):
            return _as_written
        if is_in_backward():
            return self._call_in_backward
        # what a rescue has come to may turn out not to apply in a later backward pass
        rescuer.is_armed = (
            self._evidence is None or self._evidence.is_tight(Batch(args, kwargs).elements) or bool(rescuer.rescues)
        )
        unserved = ""
        if is_within_checkpoint():  # which counts what one run saves, and none that is begun again
            unserved = "within torch.utils.checkpoint"
        elif not all(map(_is_plain, self._model.parameters())):
            unserved = "with computed weights (functional_call)"
        if unserved:
            if rescuer.is_armed:
                self._note_not_rescued(f"memory that runs out in a call {unserved} is not rescued")
            return _as_written
        if not rescuer.is_armed:
            return self._call_unguarded
        why = ""
        if any(each.updates_in_backward for each in brought(rescuer.session.techniques, EarlyUpdates)):
            why = "it updates parameters"
        elif have_others(parameter._backward_hooks for parameter in self._model.parameters()):
            # which would be called with None by a backward pass that does not reach the parameter
            why = "parameters have hooks"
        else:
            why = self._why_openly
        return partial(self._call_openly, why) if why else self._call_guarded

    def _call_guarded(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward whose graph is memlab's."""
        rescuer = self.rescuer
        guarded: GuardedCall | None = None

        def work() -> Any:
            nonlocal guarded
            guarded = guarded or self._guarded(run, args, kwargs)
            if guarded.unreadable:
                rescuer.stand_down(guarded.unreadable)
                return run(*args, **kwargs)
            return guarded.outputs()

        def make_room(oom: BaseException) -> None:
            if guarded is not None and (guarded.unreadable or not guarded.can_start_over):
                raise oom
            rescuer.recovery.make_room(oom, Place.FORWARD, guarded.start_over if guarded is not None else lambda: None)

        goes_on, output = False, None
        try:
            self._current_aliases().deliver()
            output = rescuer.recovery.until_it_fits(work, make_room)
            self._why_openly = self._why_openly or (_why_openly(guarded) if guarded is not None else "")
            if self._why_openly:
                goes_on = True
                self._note_no_backward(self._why_openly)
            elif guarded is not None and guarded.goes_on:
                goes_on = True
                self._note_not_rescued(
                    f"a call of {type(self._model).__name__} goes on from the graph of an earlier one: memory that runs out in its "
                    "backward pass is not rescued"
                )
            elif rescuer.is_idle:
                return output
            else:
                self._learn_of_own_backward()
                rescuer.loop_code_begins()
                return output
        except Exception as error:
            if not (guarded.is_own(error) if guarded is not None else rescuer.is_own(error)):
                raise
            rescuer.steps_aside(error)
        output = None  # with the graph, which takes the memory of the run that follows
        if guarded is not None:
            guarded.start_over()
            guarded.drop_graph()
        if not goes_on:
            return run(*args, **kwargs)
        output = self._until_it_fits(run, args, kwargs)
        if not self._why_openly:  # else a backward pass that can be run again would keep what the model has saved
            with rescuer.stepping_aside():
                rescuer.loop_code_begins()
        return output

    def _guarded(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GuardedCall:
        guarded = GuardedCall(self._model, run, args, kwargs, self._current_aliases(), self)
        self._alive.keep(guarded, None)
        self.rescuer.recovery.rows = guarded.rows
        return guarded

    def _learn_of_own_backward(self) -> None:
        """Note where a model runs a backward pass in its forward, whose gradients are the parameters' from then on."""
        if self._current_aliases().deliver():
            self._derives_itself = True
            self._note_not_rescued(
                f"{type(self._model).__name__} runs a backward pass in its forward, which cannot be repeated: memory that runs "
                "out there is not rescued"
            )

    def _call_unguarded(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward as the loop wrote it; should memory run out against all evidence, guard it and what follows."""
        recovery = self.rescuer.recovery
        weights = Weights(self._model)
        start: Start | None = None
        oom: BaseException | None = None
        try:
            start = Start(self._model, self.rescuer.device, None)  # for whose copies memory may run out as well
            return run(*args, **kwargs)
        except BaseException as error:
            if not (weights.are_untouched and recovery.can_rescue(error)) or (start is not None and self._reads_on()):
                raise
            oom = error
        assert self._evidence is not None
        self._evidence.ran_out()
        recovery.rows = Batch(args, kwargs).rows or 1
        recovery.make_room(oom, Place.FORWARD, start.begin_again if start is not None else lambda: None)
        return self.run(run, args, kwargs)

    def _reads_on(self) -> bool:
        """Return whether the model has read what cannot be put back, so that its call cannot be repeated."""
        unreadable = Start(self._model, self.rescuer.device).state.unreadable
        if unreadable:
            self.rescuer.stand_down(unreadable)
        return bool(unreadable)

    def _call_openly(self, why: str, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward whose backward pass cannot be repeated: its graph is the loop's."""
        self._note_no_backward(why)
        return self._until_it_fits(run, args, kwargs)

    def _until_it_fits(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a forward, again under other plans where memory runs out."""
        recovery = self.rescuer.recovery
        recovery.rows = Batch(args, kwargs).rows or 1
        weights = Weights(self._model)
        start: Start | None = None

        def work() -> Any:
            nonlocal start
            start = start or Start(self._model, self.rescuer.device)
            return run(*args, **kwargs)

        def make_room(oom: BaseException) -> None:
            nonlocal weights
            if start is not None and (start.state.unreadable or not weights.are_untouched):
                raise oom
            recovery.make_room(oom, Place.FORWARD, start.begin_again if start is not None else lambda: None)
            weights = Weights(self._model)

        return recovery.until_it_fits(work, make_room)

    def _call_in_backward(self, run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call that a hook of the loop's makes, or a recomputation: the pass around it cannot be repeated from here."""
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            if is_out_of_memory(error):
                self._note_not_rescued(_IN_BACKWARD)
            raise

    def _note_no_backward(self, why: str) -> None:
        self._note_not_rescued(f"memory that runs out in a backward pass is not rescued while {why}")

    def _note_not_rescued(self, text: str) -> None:
        self.rescuer.session.log.note_not_rescued(text)

    # -- for guarded calls ---------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """Return whether this thread has made no graph since the last step that a call could go on from."""
        return self._stepped_at == (threading.get_ident(), graphs.sequence_nr())

    @property
    def are_exact(self) -> bool:
        """Return whether the plan in force computes what the loop as written does."""
        return self.rescuer.session.plan.is_exact

    def runs_code(self, operators: int, outputs: Iterable[torch.Tensor]) -> bool:
        """Return whether a backward pass through a call runs code of the user's."""
        if operators not in self._runs_code:
            self._runs_code[operators] = graphs.runs_code_of_the_users(outputs)
        return self._runs_code[operators]

    def has_other_leaves(self, operators: int, outputs: Iterable[torch.Tensor], known: Iterable[torch.Tensor]) -> bool:
        """Return whether gradients of a call go to leaves that are not among the known ones; likewise."""
        if operators not in self._has_other_leaves:
            own = {id(each) for each in known}
            self._has_other_leaves[operators] = any(id(leaf) not in own for leaf in graphs.leaves_of(outputs))
        return self._has_other_leaves[operators]

    def backward_begins(self) -> None:
        """The loop's own part of the backward pass is over as far as a call is concerned."""
        self.rescuer.loop_code.model_begins(is_kept=self.keeps_graph())
        self.rescuer.recovery.work_begins()

    def keeps_graph(self) -> bool:
        """Return whether the loop asked for its graph to be kept."""
        kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        return kept and not self.rescuer.loop_code.graph_is_kept_for_itself

    def is_done(self, call: GuardedCall) -> None:
        """Let go of a call, unless the backward pass it is a part of may have to be run again."""
        if self.rescuer.loop_code.graph_is_kept_for_itself:
            self._done.append(call)
        else:
            call.close()

    def note_changed(self) -> None:
        """Note that a call cannot be run again in its backward pass."""
        self._note_no_backward("weights or inputs are written to in the forward pass, or between the two")

    def makes_room(self, error: BaseException, call: GuardedCall, *, keeps_rows: bool) -> None:
        """Bring another plan into force for a call that is to be run again."""
        self.rescuer.recovery.rows = call.rows
        self.rescuer.recovery.make_room(error, Place.BACKWARD, keeps_rows=keeps_rows)

    # -- what happens meanwhile ----------------------------------------------------------------

    @property
    def waiting(self) -> list[GuardedCall]:
        """Calls that wait for their backward pass, with a graph that can be made again."""
        return [call for call in self._alive.alive if call.has_graph and call.can_run_again]

    def backward_runs_again(self) -> None:
        """Guarded calls whose gradients were handed over in a backward pass that broke off are differentiated anew."""
        while self._done:
            self._done.pop().undo_backward()

    def backward_ended(self) -> None:
        """Hand over gradients that reached aliases past the node of their call."""
        while self._done:
            self._done.pop().close()
        self.deliver()
        self.rescuer.recovery.settle()

    def step_ended(self) -> None:
        """An optimizer has stepped."""
        self._stepped_at = (threading.get_ident(), graphs.sequence_nr())

    # -- aliases of the parameters -------------------------------------------------------------

    def _current_aliases(self) -> Aliases:
        if self._aliases is None or not self._aliases.serve(self._model):
            self._aliases = Aliases(self._model)
        return self._aliases

    def deliver(self) -> None:
        """Hand gradients that are on aliases to the parameters."""
        if self._aliases is not None:
            self._aliases.deliver()

    def follow_parameters(self) -> None:
        """Drop aliases of what a plan has moved off the device."""
        if self._aliases is not None:
            self._aliases.follow()

    def drop_aliases(self) -> None:
        """Drop all of them, which share memory with the parameters."""
        self._aliases = None


def _why_openly(call: GuardedCall) -> str:
    if call.has_other_leaves:
        return _OTHER_LEAVES
    return _FEATURES if call.leaves_features and has_compiled_code() else ""


def _as_written(run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return run(*args, **kwargs)


def _can_be_guarded(model: nn.Module) -> bool:
    """Return whether a call is outside of function transforms, and trains the model."""
    return not why_as_written() and any(parameter.requires_grad for parameter in model.parameters())


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether gradients may come to a parameter from a node of memlab's.

    `functional_call` puts computed weights in the place of parameters, whose graph goes on behind the model.
    """
    return parameter.is_leaf
