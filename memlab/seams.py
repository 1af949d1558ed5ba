"""The two seams between a training loop and memlab: the model call and the optimizer step.

How each is taken over, and given back:

1. *Model call.* The model gets an instance attribute ``forward`` that stands in for the original.
   It keeps the signature (Trainer reads it), survives ``deepcopy`` and pickling as the original
   method of the copy, and passes everything through once the session is over, should another
   wrapper (Accelerate's, say) still hold it.
2. *Optimizer step.* A step pre-hook, torch's own registration, does the update; it then hands the
   original ``step`` a stand-in of the optimizer that has no parameters. So it works below LR
   schedulers, ``GradScaler``, Accelerate and Fabric, which all keep their own references to
   ``optimizer.step``; an instance attribute would be bypassed by some of them.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

ForwardHandler = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class ForwardSeam:
    """Stands in for ``model.forward`` while a session is attached.

    Args:
        model: the model whose call is taken over.
        handler: called with the original forward, its positional and its keyword arguments.
        name: of the method, where it is another one (``generate``).
    """

    def __init__(self, model: nn.Module, handler: ForwardHandler, name: str = "forward") -> None:
        # first: it takes over the attributes of what it stands in for, which may be another seam
        functools.update_wrapper(self, getattr(model, name))
        self._original = getattr(model, name)
        self._name = name
        self._model = model
        self._handler: ForwardHandler | None = handler
        self.__signature__ = inspect.signature(self._original)

    @property
    def original(self) -> Any:
        """What it stands in for."""
        return self._original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._handler is None:
            return self._original(*args, **kwargs)
        return self._handler(self._original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._model))
        return self._original if copied is None else class_forward(copied, self._name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Module, str]]:
        return class_forward, (self._model, self._name)

    def install(self, undo: ExitStack) -> None:
        """Put the seam in place; `undo` takes it out again."""
        instance = self._model.__dict__
        before = instance.get(self._name)
        undo.callback(self._remove, before)
        instance[self._name] = self

    def _remove(self, before: Any) -> None:
        self._handler = None
        instance = self._model.__dict__
        # somebody may have wrapped the seam since; then it stays inside as a pass-through
        if instance.get(self._name) is self:
            if before is None:
                del instance[self._name]
            else:
                instance[self._name] = before


def class_forward(model: nn.Module, name: str = "forward") -> Any:
    """The forward a module has by its class; what copies of a patched module get."""
    return functools.partial(getattr(type(model), name), model)


def chained(wrappers: Sequence[ForwardHandler], innermost: Callable[..., Any]) -> Callable[..., Any]:
    """A model call within others.

    Args:
        wrappers: each called with the call it surrounds, its positional and its keyword arguments; the last one is
            the outermost.
        innermost: what they surround.

    Example:
        >>> doubled = chained([lambda call, args, kwargs: 2 * call(*args, **kwargs)], abs)
        >>> doubled(-3)
        6
    """
    call = innermost
    for wrapper in wrappers:
        call = functools.partial(_surrounded, wrapper, call)
    return call


def _surrounded(wrapper: ForwardHandler, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return wrapper(inner, args, kwargs)


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a model call returned, or None when it returns none.

    Example:
        >>> loss_of({"loss": torch.tensor(1.0), "logits": torch.ones(2, 3)})
        tensor(1.)
        >>> loss_of(torch.ones(2, 3)) is None
        True
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, tuple) and loss:
        loss = loss[0]
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else None


StepHandler = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], tuple[Any, Any] | None]


def install_step_seam(
    optimizer: torch.optim.Optimizer,
    before: StepHandler,
    after: Callable[[torch.optim.Optimizer], None],
    undo: ExitStack,
) -> None:
    """Take over ``optimizer.step()``.

    Args:
        optimizer: the user's optimizer; it stays the same object.
        before: step pre-hook; returns replaced arguments, or None to let the step run.
        after: called when the step is over.
        undo: takes both hooks out again.
    """
    undo.callback(optimizer.register_step_pre_hook(before).remove)
    undo.callback(optimizer.register_step_post_hook(lambda opt, _args, _kwargs: after(opt)).remove)


def on_first_step(found: Callable[[torch.optim.Optimizer], None], undo: ExitStack) -> None:
    """Call `found` with every optimizer that steps, before it does, until undone.

    Args:
        found: a method. Torch's registry is global, so it keeps the method's object no longer than others do.
        undo: takes the hook out again.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    method = weakref.WeakMethod(found)

    def hook(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        alive = method()
        if alive is not None:
            alive(optimizer)

    remove = register_optimizer_step_pre_hook(hook).remove
    undo.callback(remove)
    weakref.finalize(found.__self__, remove).atexit = False  # type: ignore[attr-defined] # a bound method


class FirstTrainingCall:
    """Watches for the first call of a trainable model, to find one that is made inside a cell.

    While active, ``torch.nn.Module.__call__`` is replaced by a version that looks at outermost calls;
    hooks cannot serve here, since they come after ``forward`` has been looked up.

    Args:
        found: called once with the model, just before its first training call runs.
        thread: number of the thread whose calls count, where several may train; None for any.
    """

    def __init__(self, found: Callable[[nn.Module], None], thread: int | None = None) -> None:
        self._found = found
        self._thread = thread
        self._depth = 0
        self._original: Any = None

    def __enter__(self) -> Self:
        self._original = original = nn.Module.__call__
        watcher = self

        @functools.wraps(original)
        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if watcher._thread not in (None, threading.get_ident()):
                return original(module, *args, **kwargs)
            watcher._look_at(module)
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
        if self._original is not None:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None

    def _look_at(self, module: nn.Module) -> None:
        if self._depth == 0 and self._original is not None and self._counts(module):
            self.stop()
            self._found(module)

    def _counts(self, module: nn.Module) -> bool:
        is_training = module.training and torch.is_grad_enabled()
        return is_training and any(p.requires_grad for p in module.parameters())


class FirstCall(FirstTrainingCall):
    """The same for the first call of any model, trained or not."""

    def _counts(self, module: nn.Module) -> bool:
        return next(module.parameters(), None) is not None
