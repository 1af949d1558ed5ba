"""`ModelCalls`: the model's call, taken over by a session."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memlab.errors import MemlabError, RefusalError
from memlab.rescue.evaluation import derives
from memlab.rescue.start import Start, Weights
from memlab.runtime import graphs
from memlab.runtime.batch import Batch
from memlab.runtime.dropped_graphs import free_dropped_graphs
from memlab.runtime.hooks import ForwardHandler, chained, loss_of
from memlab.runtime.interrupts import deferred_interrupts, interruptible
from memlab.runtime.mechanisms import LoopChecks, brought
from memlab.runtime.modules import signature_of
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.session.recording import recorder_here
from memlab.techniques.base import is_around_calls

if TYPE_CHECKING:
    from memlab.session.session import Session


class ModelCalls:
    """Calls of the model, run through the techniques in force."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def refuse_traced(self) -> None:
        """Ask the techniques in force whether a call of the model may be traced."""
        try:
            for each in brought(self._session.techniques, LoopChecks):
                each.check_traced()
        except RefusalError as refusal:
            tracing = torch._C._get_tracing_state()
            if tracing is not None:  # what the change of plans computes is no part of what is traced
                torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
                try:
                    if self._session.switching.falls_back(refusal):
                        return
                finally:
                    torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
            refusal.in_loop = True
            raise

    def refuse_replicas(self) -> None:
        """Refuse settings around calls and parts of the model, where copies of it on several GPUs are called."""
        session = self._session
        around = [t for t in session.techniques if t.traits.needs_uncompiled or is_around_calls(t)]
        if around:
            refusal = RefusalError(
                "session",
                f"DataParallel calls copies of {session.workload.name} on several GPUs, which {session.plan.label} does not reach",
                "use one GPU (CUDA_VISIBLE_DEVICES=0), or one process for each: %%memfit --nproc 2 --scale ddp",
            )
            refusal.in_loop = True
            raise refusal
        session.usage.was_replicated = True

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call; a training call may first bring another plan into force."""
        recorder = recorder_here()
        if recorder is not None:
            run = partial(self._run_wholly, original)
            return recorder.call(self._session.workload.model, run, args, kwargs)
        return self._run_wholly(original, *args, **kwargs)

    def _run_wholly(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._session.in_force.call():
            return self._run(original, args, kwargs)

    def _run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        free_dropped_graphs()
        session = self._session
        where, trains = graphs.why_as_written(), session.workload.model.training
        if where and session.techniques:
            session.log.note_once(f"calls {where} are left as they are: the plan does not apply there")
        if where or not (trains and torch.is_grad_enabled() and derives(session.workload.model, args, kwargs)):
            if session.growth is not None and (grown := session.growth.called()):
                session.log.note_once(grown)
            session.usage.was_evaluated |= torch.is_grad_enabled() and not (where or trains)
            if not session.observers.all:
                return self._evaluated(original, args, kwargs, is_served=not where)
            session.observers.tell("evaluation_begins", Batch(args, kwargs))
            try:
                return self._evaluated(original, args, kwargs, is_served=not where)
            finally:
                session.observers.tell("evaluation_ended")
        if session.growth is not None:
            session.growth.trained()
        session.switching.take_withdrawn_out()
        if session.position.is_within_step and not session.workload.optimizers:
            session.log.steps += 1  # as the meter counts steps of what is no optimizer of torch's
        session.usage.called(is_within_step=session.position.is_within_step)
        was_within_step = session.position.is_within_step
        own_step = session.position.own_step
        if own_step is None or session.position.own_step_around(sys._getframe()) is None:
            session.switching.enter_step()
        else:
            session.position.is_within_step = True
        session.observers.tell("forward_begins", Batch(args, kwargs))
        try:
            output = self._trained(original, args, kwargs)
        except BaseException:
            # where it was the first call of a step, none has begun: the loop may ask for another plan and go on
            session.position.is_within_step = was_within_step
            session.observers.tell("interrupted")
            raise
        if session.observers.all:
            loss = loss_of(output)
            session.observers.tell("forward_ended", loss)
        return output

    def _evaluated(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_served: bool
    ) -> Any:
        session = self._session

        def run(*args: Any, **kwargs: Any) -> Any:
            return _through([t.evaluate for t in session.techniques], original, args, kwargs)

        while True:
            rescuer = session.rescuing if is_served else None
            try:
                return run(*args, **kwargs) if rescuer is None else rescuer.evaluations.run(run, args, kwargs)
            except MemlabError as error:
                # within a step there is a graph of the plan
                if session.position.is_within_step or not session.switching.falls_back(error):
                    raise
            except Exception as error:
                session.usage.failed_evaluation = id(error)
                raise

    def generating(self) -> Callable[..., Any]:
        """Return what stands for the model's `generate`, and does not keep it alive."""
        model: Any = self._session.workload.model
        made: Any = functools.update_wrapper(partial(self._generated), type(model).generate)
        made.__signature__ = signature_of(model.generate)
        del made.__wrapped__
        return made  # type: ignore[no-any-return]

    def _generated(self, *args: Any, **kwargs: Any) -> Any:
        """Run a generation, whose passes are calls of the model."""
        model: Any = self._session.workload.model
        original = partial(type(model).generate, model)
        rescuer = None if self._session.is_in_call else self._session.rescuing
        return original(*args, **kwargs) if rescuer is None else rescuer.generations.generate(original, args, kwargs)

    def _trained(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        session = self._session

        def run(*args: Any, **kwargs: Any) -> Any:
            return _through([t.forward for t in session.techniques], original, args, kwargs)

        if not (session.switching.is_on_trial or session.techniques) and session.rescuing is None:
            return original(*args, **kwargs)
        while True:
            is_on_trial = session.switching.is_on_trial
            start = self._start() if is_on_trial else None
            weights = Weights(session.workload.model) if is_on_trial else None
            rescuer = session.rescuing
            try:
                if rescuer is not None:
                    return rescuer.calls.run(run, args, kwargs)
                output = run(*args, **kwargs)
                if start is not None and not graphs.is_transformed():
                    start.call_ended()
                return output
            except MemlabError as error:
                if not (start and weights and weights.are_untouched and session.switching.falls_back(error)):
                    raise
            start.begin_again()

    def _start(self) -> Start | None:
        """Return what a call begins with; None where memory does not suffice for copies. The call then runs out as well, and is rescued."""
        workload = self._session.workload
        try:
            return Start(workload.model, workload.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None


def _through(
    wrappers: Sequence[ForwardHandler], original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a model call through techniques: a Ctrl-C arises in the model's own code, or when they are done."""

    def own(*args: Any, **kwargs: Any) -> Any:
        with interruptible():
            return original(*args, **kwargs)

    if not wrappers:
        return own(*args, **kwargs)
    with deferred_interrupts():
        return chained(wrappers, own)(*args, **kwargs)
