"""Finding models that a cell trains, by the calls it makes: `FirstCall` tells of calls, `ModelSearch` says which models count.

While a `FirstCall` is active, ``torch.nn.Module.__call__`` is replaced by a version that looks at outermost calls; hooks cannot serve
here, since they come after ``forward`` has been looked up. Calls within a trace, a transform of `torch.func` or code
that is being compiled are left alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import MemlabError
from memlab.jupyter.cell_observers import StaleOptimizers
from memlab.jupyter.cell_records import TakenModels
from memlab.jupyter.cells import CellErrors
from memlab.runtime.backward import is_in_backward
from memlab.runtime.buckets import is_separable
from memlab.runtime.hooks import calls_under_way
from memlab.runtime.lazy import requires_grad
from memlab.runtime.own_steps import is_own_step
from memlab.runtime.ownership import (
    WITHOUT_VALUES,
    is_made,
    live_optimizers,
    optimizers_of,
    stepped_by,
    steps_others,
    steps_some_of,
    unwrap_model,
    unwrap_optimizer,
)
from memlab.runtime.plain_step import standin
from memlab.runtime.workload import Workload
from memlab.session import session_of

# a loop that accumulates by hand calls its model several times before the first step; after so many, no other is expected
_MOST_CALLS_OF_A_STEP = 64
# a loop that makes a layer in every step makes no model each time
_MOST_LOOKS = 64

_PASSED_OVER = (
    "no model that trains was found: the cell called {} once, and no optimizer updates its parameters; name a model "
    "that trains without one with --model"
)
_IN_EVAL_MODE = "no model in train mode was found: the loop trains {} in eval mode only; call model.train() before"
_FROZEN = (
    "no model to train was found: all parameters of {} are frozen, and its gradients go to a tensor outside of it; make that a "
    "parameter of a module around both, and call this module"
)


class FirstCall:
    """Watches for calls of models, and tells of each until somebody has taken one."""

    def __init__(self, found: Callable[[nn.Module], bool], thread: int | None = None) -> None:
        # called with a model before its call runs; the watching is over when it returns True. What it raises ends the
        # call, and the next call is looked at again
        self._found = found
        self._thread = thread  # number of the thread whose calls count, where several may train; None for any
        self._depth = 0
        self._original: Any = None
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._original = original = nn.Module.__call__
        watcher = self

        @functools.wraps(original)
        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # first what Dynamo takes for a constant: the number of a thread would break the graph of what is compiled
            if _is_transformed() or watcher._original is None or watcher._thread not in (None, threading.get_ident()):
                return original(module, *args, **kwargs)
            if watcher._depth == 0 and watcher._counts(module, args, kwargs) and watcher._found(module):
                watcher.stop()
            watcher._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                watcher._depth -= 1

        nn.Module.__call__ = watched_call  # type: ignore[method-assign]
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Put ``torch.nn.Module.__call__`` back; harmless when done already."""
        original, self._original = self._original, None
        if original is not None:
            nn.Module.__call__ = original  # type: ignore[method-assign]
        self._undo.close()

    def _counts(self, module: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
        return next(module.parameters(), None) is not None


class FirstTrainingCall(FirstCall):
    """The same for calls that train.

    A loop may make its first call in the closure of an optimizer's step, and so in the middle of that step. Where the
    optimizer evaluates its closure once before it updates, whoever takes over the optimizer meanwhile does that very
    update; the optimizer's own then finds no parameters.
    """

    def __init__(
        self, found: Callable[[nn.Module], bool], thread: int | None = None, *, expects_closures: bool = True
    ) -> None:
        super().__init__(found, thread)
        self._expects_closures = expects_closures
        self.stepped: set[int] = set()  # numbers (`id`) of the optimizers that have stepped before any call that trains
        self.why_none = ""  # why a model that was called does not count; empty where none was
        self._is_evaluated = False  # whether one that was called in eval mode is updated by an optimizer
        self._in_eval_mode: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()
        # those whose layers had no values when they were called
        self.unmade: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()

    def __enter__(self) -> Self:
        if self._expects_closures:
            self._undo.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
            self._undo.callback(register_optimizer_step_post_hook(self._step_ended).remove)
        return super().__enter__()

    def _counts(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if is_in_backward():
            return False  # computed again in a backward pass
        if not torch.is_grad_enabled():
            return False
        if not any(p.requires_grad for p in module.parameters()):
            if not self.why_none and any(map(requires_grad, tree_leaves((args, kwargs)))):
                self.why_none = _FROZEN.format(type(module).__name__)
            return False
        if not is_made(module):
            self.why_none = WITHOUT_VALUES.format(type(module).__name__)
            self.unmade[module] = None
            return False
        if not module.training:
            self._in_eval_mode[module] = None
        return module.training

    def _step_ended(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.stepped.add(id(optimizer))
        for module in [] if self._is_evaluated else [*self._in_eval_mode]:
            if steps_some_of(optimizer, module):
                self._is_evaluated, self.why_none = True, _IN_EVAL_MODE.format(type(module).__name__)

    def _step_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        rest, named = list(args[1:]), dict(kwargs)
        closure = named.get("closure", rest[0] if rest else None)
        is_last = unwrap_optimizer(optimizer) is optimizer and is_separable(optimizer)
        if not callable(closure) or not is_last or self._thread not in (None, threading.get_ident()):
            return None
        acting = standin(optimizer)
        hooks = optimizer._optimizer_step_pre_hooks
        known = set(hooks)

        def evaluated() -> Any:
            loss = closure()
            new = [hook for key, hook in hooks.items() if key not in known]
            is_done = [hook(optimizer, (optimizer, lambda: loss), {}) is not None for hook in new]
            if not any(is_done):
                acting.param_groups, acting.state = optimizer.param_groups, optimizer.state
            return loss

        if "closure" in named:
            named["closure"] = evaluated
        else:
            rest[0] = evaluated
        return (acting, *rest), named


class ModelSearch:
    """Looks at what a cell calls, until every model of a step has been seen, and has those that train taken.

    It looks again where an optimizer steps that updates none of them, or where a model is made.
    """

    def __init__(
        self,
        models: TakenModels,
        errors: CellErrors,
        undo: ExitStack,  # ends what watches the cell
        take: Callable[[Workload], None],  # applies the plan to one, and measures it
        take_back: Callable[[], None],  # ends the sessions of those taken
        variables: Callable[[], Mapping[str, Any]],  # those of the notebook
    ) -> None:
        self.thread: int | None = None  # whose training counts; None for any
        self.has_trained_uncalled = False  # whether a model was updated before it was called
        self.stale = StaleOptimizers(variables)  # says where an optimizer steps whose model was made again
        self._models = models
        self._errors = errors
        self._undo = undo
        self._take = take
        self._take_back = take_back
        self._passed_over = ""  # says which model was called and is trained by no optimizer; empty for none
        self._looking: FirstTrainingCall | None = None
        # how often a model was called while models were looked for
        self._calls: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._put_off: MemlabError | None = None
        # optimizers that were there before, and those that have stepped
        self._known: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()
        self._looked_at: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()
        self._looks_left = _MOST_LOOKS
        self._missed: weakref.ref[torch.optim.Optimizer] | None = None  # the one whose model is looked for

    @property
    def is_over(self) -> bool:
        """Return whether no further model is expected, for now."""
        return self._looking is None

    @property
    def why_none(self) -> str:
        """Return why no model was found, as far as the cell has called one; else an empty text."""
        return (self._looking.why_none if self._looking is not None else "") or self._passed_over

    def begin(self) -> None:
        """Look for the models that the cell trains."""
        with self._errors.beside("looking for models", is_needed=self._errors.needs_plan):
            for one in live_optimizers():
                self._known[one] = None
            self._look_from_the_first()

    def _look_from_the_first(self) -> None:
        self._undo.callback(register_optimizer_step_pre_hook(self._refuse_put_off).remove)
        self._look()

    def _look(self, *, expects_closures: bool = True) -> None:
        if self._looking is None:
            looking = FirstTrainingCall(self._found, self.thread, expects_closures=expects_closures)
            self._looking = self._undo.enter_context(looking)

    @property
    def has_seen_steps(self) -> bool:
        """Return whether an optimizer has stepped, though nothing that trains was called."""
        return self._looking is not None and bool(self._looking.stepped)

    # -- when to look again --------------------------------------------------------------------

    def expect_more(self) -> None:
        """Look again at what is called, where there is a sign of a further model."""
        self._undo.callback(register_module_parameter_registration_hook(self._made).remove)
        self._undo.callback(register_optimizer_step_pre_hook(self._stepped).remove)

    @property
    def _is_of_loop(self) -> bool:
        """Return whether what goes on now is of the cell's loop: of a thread that counts, and no step of a measurement."""
        return self.thread in (None, threading.get_ident()) and not is_own_step()

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look for a further model when an optimizer steps that updates none of those found."""
        if self._errors.failure or not self._is_of_loop:
            return
        workloads = [each.workload for each in self._models.sessions]
        with self._errors.beside("looking for stale optimizers"):
            self.stale.stepped(optimizer, workloads)
        if optimizer in self._looked_at:
            return
        with self._errors.beside("looking for further models"):
            self._looked_at[optimizer] = None
            if not any(steps_some_of(optimizer, each.model) for each in workloads):
                # hooks of steps are being run: none can join them
                self._missed = weakref.ref(optimizer)
                self._calls.clear()
                self._look(expects_closures=False)

    def _made(self, _module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Look for a further model when one is made, so that the plan is on it in its first step."""
        can_look = self._looking is None and self._looks_left > 0 and not self._errors.failure
        if can_look and self._is_of_loop and not calls_under_way():
            with self._errors.beside("looking for further models"):
                self._looks_left -= 1
                self._calls.clear()
                self._look()

    # -- what is called ------------------------------------------------------------------------

    def _found(self, model: nn.Module) -> bool:
        """Take a model that is called; True when there is no other one to expect."""
        if is_own_step():
            return False
        is_over = True
        try:
            with self._errors.beside("taking up a model", is_needed=self._errors.needs_plan):
                is_over = self._takes(unwrap_model(model))
        except MemlabError as refusal:
            if not self._models.sessions and any(steps_others(one, model) for one in optimizers_of(model)):
                self._put_off = refusal  # of a part, where the whole may still be called
                return False
            self._errors.refused(refusal)
            raise
        self._put_off = None if self._models.sessions else self._put_off
        return is_over

    def _refuse_put_off(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Refuse at the step what the plan does not apply to, where nothing else was called before it."""
        if self._put_off is None or not self._is_of_loop:
            return
        refusal, self._put_off = self._put_off, None
        self._errors.refused(refusal)
        raise refusal

    def _takes(self, called: nn.Module) -> bool:
        calls = self._calls[called] = self._calls.get(called, 0) + 1
        holder = next((each for each in self._models.sessions if _holds(each.workload.model, called)), None)
        if holder is not None:
            has_all = holder.steps > 0 and self._missed is None
            is_over = holder.workload.model is called and (has_all or calls > _MOST_CALLS_OF_A_STEP)
            if is_over:
                self._looking = None
                if len(self._models.all) > 1:
                    self._models.forget_deleted()  # the graph of a loss may have kept one until now
            return is_over
        optimizers = optimizers_of(called)
        self._models.forget_deleted()
        if self._models.sessions and all(
            taken.is_fresh and not each.steps and _holds(called, each.workload.model)
            for each, taken in self._models.present
        ):
            self._begin_again()
        if self._models.sessions and self._is_another_form(called, optimizers):
            return False
        has_made_optimizers = any(one not in self._known for one in live_optimizers())
        if not optimizers and (self._models.sessions or (calls == 1 and has_made_optimizers)):
            # a teacher or a loss with weights, unless it is called again and nothing else trains
            self._passed_over = _PASSED_OVER.format(type(called).__name__)
            return False
        session = session_of(called)
        if self._missed is not None and self._missed() in optimizers:
            self._missed = None
        workload = session.workload if session is not None else Workload(called, optimizers)
        if self._looking is not None:
            self.has_trained_uncalled |= any(id(one) in self._looking.stepped for one in workload.optimizers)
        was_unmade = self._looking is not None and called in self._looking.unmade
        self._take(workload)
        if was_unmade and (session := session_of(called)) is not None:
            session.log.note(f"{workload.name} made its lazy layers in its first call, which was as written")
        return bool(self._errors.failure)

    def _is_another_form(self, called: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Return whether all that is updated of a module belongs to a model that is taken: an export of it, a parametrization."""
        taken = {id(each) for session in self._models.sessions for each in session.workload.model.parameters()}
        updated = {key for optimizer in optimizers for key in stepped_by(optimizer)}
        own = {id(parameter) for parameter in called.parameters()} & updated
        holds = any(_holds(called, session.workload.model) for session in self._models.sessions)
        return bool(own) and own <= taken and not holds

    def _begin_again(self) -> None:
        """Let go of what turns out to be parts of one model, which its making or a first look had called by themselves."""
        self._take_back()
        self._looking = self._put_off = None
        self._look_from_the_first()


def _holds(model: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in model.modules())


def _is_transformed() -> bool:
    """Return whether torch records or transforms what is called, so that parameters are not those of the model."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined] # not in __all__
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
