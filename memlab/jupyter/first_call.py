"""Finding models that are made inside a cell, by the calls the cell makes.

While active, ``torch.nn.Module.__call__`` is replaced by a version that looks at outermost calls; hooks cannot serve
here, since they come after ``forward`` has been looked up. Calls within a trace, a transform of `torch.func` or code
that is being compiled are left alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memlab.runtime.buckets import is_separable
from memlab.runtime.optimizer_step import standin
from memlab.runtime.ownership import is_made, steps_some_of, unwrap_optimizer


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
            if watcher._depth == 0 and watcher._counts(module) and watcher._found(module):
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

    def _counts(self, module: nn.Module) -> bool:
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
        self.evaluated = ""  # class of a model that an optimizer has updated and that was called in eval mode
        self._in_eval_mode: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __enter__(self) -> Self:
        if self._expects_closures:
            self._undo.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
            self._undo.callback(register_optimizer_step_post_hook(self._step_ended).remove)
        return super().__enter__()

    def _counts(self, module: nn.Module) -> bool:
        if torch._C._current_graph_task_id() >= 0:
            return False  # computed again in a backward pass
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()) and is_made(module)):
            return False
        if not module.training:
            self._in_eval_mode.add(module)
        return module.training

    def _step_ended(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.stepped.add(id(optimizer))
        for module in [] if self.evaluated else [*self._in_eval_mode]:
            if steps_some_of(optimizer, module):
                self.evaluated = type(module).__name__

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


def _is_transformed() -> bool:
    """Return whether torch records or transforms what is called, so that parameters are not those of the model."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined] # not in __all__
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
