"""The two hooks between a training loop and memlab: the model call and the optimizer step.

How each is taken over, and given back:

1. *Model call.* `CallHook` stands in the model's ``_compiled_call_impl``, where torch keeps what ``model.compile()``
   makes. ``model(...)`` looks there first, and torch leaves it out of every pickle and deep copy: what is saved or
   copied is what it would be without memlab. ``model.forward`` and its signature stay as they are. Hooks of the model
   run around the hook, once per call, as they run around ``forward``.
2. A call that something else looks through is left alone: one that is traced (``torch.jit``), one inside a compiled
   function (unless the model cannot run without), and a model's call of itself.
3. ``forward`` gets a `stand_in` where a class has a ``__call__`` of its own, which may pass torch's by.
4. *Optimizer step.* A step pre-hook, torch's own registration, does the update; it then hands the
   original ``step`` a stand-in of the optimizer that has no parameters. So it works below LR
   schedulers, ``GradScaler``, Accelerate and Fabric, which all keep their own references to
   ``optimizer.step``; an instance attribute would be bypassed by some of them.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import nn

from memlab.runtime.dispatch import never_compile
from memlab.runtime.interrupts import Caller
from memlab.runtime.plain_step import is_updating, unhooked_step
from memlab.runtime.stand_ins import (
    CALL,
    InPlace,
    copies_itself,
    copy_in,
    keep_out_of_copies,
    made_the_users,
    method_of,
    own_attributes,
    stand_in,
)

ForwardHandler = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class CallHook(InPlace):
    """Stands in for a model's call while a session is attached.

    Args:
        model: the model whose call is taken over; held weakly.
        handler: called with the original forward, its positional and its keyword arguments.
        traced: called before a call that is traced (`torch.export`, `torch.jit.trace`); what it raises ends that.
        replicated: likewise, before a call of a copy that `torch.nn.DataParallel` makes for another GPU.
        breaks_graphs: whether compiled functions leave its calls to the handler too.
    """

    def __init__(
        self,
        model: nn.Module,
        handler: ForwardHandler,
        traced: Callable[[], object] = bool,
        replicated: Callable[[], object] = bool,
        *,
        breaks_graphs: bool = False,
    ) -> None:
        self.owner = weakref.ref(model)
        self._traced, self._replicated = traced, replicated
        self._breaks_graphs = breaks_graphs
        self._handler: ForwardHandler | None = handler
        self._is_in_place = False
        # calls that the handler is at, by thread; a Ctrl-C may end one before it has taken itself out of here
        self._calls: dict[int, Caller] = {}
        _call_hooks.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.owner()
        if torch.compiler.is_compiling():
            # `is_exporting()` is true in everything that Dynamo compiles before torch 2.12
            if torch.compiler._is_exporting_flag:
                self._traced()
            if not self._breaks_graphs:
                return model._call_impl(*args, **kwargs)
        return self._uncompiled(model, args, kwargs)

    @never_compile
    def _uncompiled(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch._C._get_tracing_state() is not None:
            self._traced()
        called: Any = copy_in(sys._getframe(2), CALL, self, model)
        if called is not None:
            if getattr(called, "_is_replica", False):
                self._replicated()
            made_the_users(called)
            return called._call_impl(*args, **kwargs)
        call = self.before or model._call_impl
        if not self._takes_over():
            return call(*args, **kwargs)
        if self.before is not None:
            return self._handled(call, args, kwargs)
        if not _has_hooks(model):
            return self._handled(model.forward, args, kwargs)
        # torch looks `forward` up before the first hook, and calls what it found between the hooks
        with ExitStack() as undo:
            found = _BetweenHooks(self, model.forward, undo.close)
            stand_in(model, "forward", found, undo)
            return call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # where something else than `__getstate__` reads the attributes of a module: nothing
        return type(None), ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        return None

    def _takes_over(self) -> bool:
        is_free = self._handler is not None and self._is_free(sys._getframe(1))
        return is_free and torch._C._get_tracing_state() is None

    def _is_free(self, frame: FrameType) -> bool:
        call = self._calls.get(threading.get_ident())
        return call is None or call.is_over(frame)

    @property
    def is_under_way(self) -> bool:
        """Return whether this thread is in a call of the model."""
        return self._handler is not None and not self._is_free(sys._getframe(1))

    def handle(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Have the handler run one call; what the model calls of itself meanwhile is not taken over."""
        if not self._takes_over():
            return original(*args, **kwargs)
        return self._handled(original, args, kwargs)

    def _handled(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._handler is not None
        thread = threading.get_ident()
        self._calls[thread] = Caller(sys._getframe())
        try:
            return self._handler(original, args, kwargs)
        finally:
            self._calls.pop(thread, None)

    def install(self, undo: ExitStack) -> None:
        """Put the hook in place; `undo` takes it out again."""
        model = self.owner()
        assert model is not None
        instance = model.__dict__
        self.before = instance.get(CALL)
        if copies_itself(model):  # torch's own state leaves the hook out
            keep_out_of_copies(model, undo)
        undo.callback(self._remove, instance)
        instance[CALL] = self
        self._is_in_place = True
        _notice_compiling(undo)
        if _has_own_call(type(model)):
            original = method_of(model, "forward")
            handled = functools.wraps(original)(lambda *args, **kwargs: self.handle(original, args, kwargs))
            stand_in(model, "forward", handled, undo)

    def set_aside(self) -> bool:
        """Take the hook out for a while; False where it stays, under something put over it or where the class has a call of its own."""
        model = self.owner()
        if model is None or model.__dict__.get(CALL) is not self or _has_own_call(type(model)):
            return False
        self._leave(model.__dict__)
        self._is_in_place = False
        return True

    def put_back(self) -> None:
        """Put the hook back in place, around what stands there by now."""
        model = self.owner()
        if model is not None and self._handler is not None and model.__dict__.get(CALL) is not self:
            self.before = model.__dict__.get(CALL)
            model.__dict__[CALL] = self
            self._is_in_place = True

    def compiled(self, model: nn.Module) -> None:
        """Go around what `model.compile()` has put in the place of the hook."""
        if self._is_in_place and self.owner() is model:
            self.put_back()

    def _remove(self, instance: dict[str, Any]) -> None:
        # one that was put over it since goes on calling it, as if it were not there
        self._handler = None
        if instance.get(CALL) is self:
            self._leave(instance)

    def _leave(self, instance: dict[str, Any]) -> None:
        if self.before is None:
            del instance[CALL]
        else:
            instance[CALL] = self.before


_call_hooks: weakref.WeakSet[CallHook] = weakref.WeakSet()
_compile = nn.Module.compile
_noticing = 0  # hooks that are told


@functools.wraps(_compile)
def _compile_within(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    _compile(self, *args, **kwargs)
    for hook in [*_call_hooks]:
        hook.compiled(self)


def _notice_compiling(undo: ExitStack) -> None:
    """Have `model.compile()` leave the hook of the model in place, until undone."""
    global _noticing
    if nn.Module.compile is _compile:
        nn.Module.compile = _compile_within  # type: ignore[method-assign]
    _noticing += 1
    undo.callback(_notice_no_longer)


def _notice_no_longer() -> None:
    global _noticing
    _noticing -= 1
    if not _noticing and nn.Module.compile is _compile_within:
        nn.Module.compile = _compile  # type: ignore[method-assign]


def calls_under_way() -> list[weakref.ref[CallHook]]:
    """Return the hooks of the models whose calls this thread is in."""
    return [weakref.ref(hook) for hook in _call_hooks if hook.is_under_way]


@contextmanager
def within(hooks: Sequence[weakref.ref[CallHook]]) -> Iterator[None]:
    """Context of calls that are run again, in part or as a whole: what their models call of themselves is not taken over."""
    thread, here = threading.get_ident(), sys._getframe(2)
    entered = [hook for ref in hooks if (hook := ref()) is not None and hook._is_free(here)]
    try:
        for hook in entered:
            hook._calls[thread] = Caller(here)
        yield
    finally:
        for hook in entered:
            hook._calls.pop(thread, None)


class _BetweenHooks:
    """The function that torch calls as ``forward`` between the hooks of a model."""

    def __init__(self, hook: CallHook, original: Callable[..., Any], found: Callable[[], None]) -> None:
        self._hook = hook
        self._original = original
        self._found = found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._found()
        return self._hook.handle(self._original, args, kwargs)


def _has_hooks(model: nn.Module) -> bool:
    return bool(
        model._forward_hooks
        or model._forward_pre_hooks
        or model._backward_hooks
        or model._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _has_own_call(kind: type) -> bool:
    """Return whether a class of the user's says itself what calling it does."""
    definer = next(base for base in kind.__mro__ if "__call__" in vars(base))
    return not definer.__module__.startswith("torch.")


def is_compiled(model: nn.Module) -> bool:
    """Return whether calls of a model run code that ``torch.compile`` has made, which looks into modules no more.

    Example:
        >>> is_compiled(nn.Linear(2, 2)), is_compiled(torch.compile(nn.Linear(2, 2)))
        (False, True)
    """
    return any(type(part).__name__ == "OptimizedModule" or own_attributes(part).get(CALL) for part in model.modules())


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
    """The loss in what a model call returned: what is called so, else the one scalar in a tuple, the first one if it is one.

    Returns:
        The loss; None when there is none, or no telling which of several scalars it is.

    Example:
        >>> loss_of({"loss": torch.tensor(1.0), "logits": torch.ones(2, 3)})
        tensor(1.)
        >>> loss_of((torch.ones(2, 3), torch.tensor(2.0)))
        tensor(2.)
        >>> loss_of(torch.ones(2, 3)) is None
        True
    """
    if isinstance(output, Mapping):
        named = output.get("loss")
    else:
        # a property of an object of the user's own is not asked for: it may do anything
        named = (
            getattr(output, "loss", None) if isinstance(output, tuple) else getattr(output, "__dict__", {}).get("loss")
        )
    if _is_scalar(named):
        return named
    items = output if isinstance(output, tuple | list) else [output]
    scalars = [item for item in items if _is_scalar(item)]
    return scalars[0] if scalars and (scalars[0] is items[0] or len(scalars) == 1) else None


def _is_scalar(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


StepHandler = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], tuple[Any, Any] | None]


def install_step_hooks(
    optimizer: torch.optim.Optimizer,  # the user's optimizer; it stays the same object
    before: StepHandler,  # step pre-hook; returns replaced arguments, or None to let the step run
    after: Callable[[torch.optim.Optimizer], None],  # called when the step is over
    undo: ExitStack,  # takes both hooks out again
) -> None:
    """Take over ``optimizer.step()``; `keep_last` is to be called at each step."""
    unhooked_step(optimizer)  # which is known from then on
    undo.callback(optimizer.register_step_pre_hook(before).remove)
    undo.callback(optimizer.register_step_post_hook(never_compile(lambda opt, _args, _kwargs: after(opt))).remove)


def keep_last(optimizer: torch.optim.Optimizer, before: StepHandler) -> bool:
    """Have a pre-hook come after those that the loop has registered since: what they do to gradients is in the update.

    To be called from a hook of all optimizers: those come first, and among an optimizer's own none may be moved
    any more.

    Returns:
        Whether `install_step_hooks` has put the pre-hook there, and it has not been dropped since.
    """
    hooks: Any = optimizer._optimizer_step_pre_hooks
    key = next((key for key, hook in hooks.items() if hook == before), None)
    if key is None:
        return False
    hooks.move_to_end(key)
    return True


def on_each_step(found: Callable[[torch.optim.Optimizer], None], undo: ExitStack) -> None:
    """Call a method with every optimizer that steps, before it does, until undone; torch's registry keeps its object no longer than others do."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    method = weakref.WeakMethod(found)

    @never_compile
    def hook(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        alive = method()
        if alive is not None and not is_updating():
            alive(optimizer)

    remove = register_optimizer_step_pre_hook(hook).remove
    undo.callback(remove)
    weakref.finalize(found.__self__, remove).atexit = False  # type: ignore[attr-defined] # a bound method
