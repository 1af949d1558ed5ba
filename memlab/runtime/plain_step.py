"""The step of the user's optimizer itself: taken over by a hook, or made of some parameters alone, without its hooks.

A step pre-hook performs the update and hands the original `step` a stand-in that holds no parameters (`take_over`). Schedulers,
scalers and wrappers sit above the hook and notice nothing.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.mechanisms import Stepper
from memlab.runtime.state_entries import Optimizer, Parameter

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKED = torch.optim.Optimizer.profile_hook_step(abs).__code__  # of torch's wrapper, whatever it wraps
_thread = threading.local()
_steps: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()  # the own steps of classes, without hooks
# optimizers that treat all parameters of a group alike
_WITHOUT_PLACES = "torch.optim."


def take_over(update: Callable[[Optimizer], object]) -> StepHook:
    """A step pre-hook that runs `update` in place of the optimizer's own step.

    A closure is evaluated once, before the update, with gradients enabled; `step` returns its loss.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> handle = optimizer.register_step_pre_hook(take_over(lambda optimizer: None))
        >>> parameter.grad = torch.ones(1)
        >>> optimizer.step()
        >>> parameter.item()
        1.0
    """

    def hook(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _, *rest = args
        rest, kwargs = _evaluated(rest, kwargs)
        with deferred_interrupts():
            update(optimizer)
        return (standin(optimizer), *rest), kwargs

    return hook


def _evaluated(rest: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Step arguments in which a closure is replaced by one that returns the loss it gave."""
    if rest and callable(rest[0]):
        return [_already(rest[0]), *rest[1:]], dict(kwargs)
    if callable(kwargs.get("closure")):
        return list(rest), {**kwargs, "closure": _already(kwargs["closure"])}
    return list(rest), dict(kwargs)


def _already(closure: Callable[[], Any]) -> Callable[[], Any]:
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def second_of(optimizer: Optimizer) -> Optimizer:
    """A second optimizer with the settings of the first, no state and no hooks, whose `param_groups` are to be set."""
    second = standin(optimizer)
    # a scheduler's wrapper, say, that belongs to the first one
    for name in [name for name in vars(second) if hasattr(type(second), name)]:
        del second.__dict__[name]
    second.state = defaultdict(dict)
    return second


def standin(optimizer: Optimizer) -> Optimizer:
    """A copy of an optimizer with no parameters, no state and no hooks: stepping it does nothing."""
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    # a subclass that calls super().step() passes a second hooked step, with the stand-in as optimizer
    copy.__dict__.update({name: OrderedDict() for name in _HOOKS}, param_groups=[], state={})
    return copy


def unhooked_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step of an optimizer's class without torch's wrapper that runs the step hooks.

    Where the loop has given the class another step meanwhile, as one that counts, the one whose hooks run: the other has been called.
    """
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is _HOOKED:
        _steps[type(optimizer)] = step.__wrapped__
        return step.__wrapped__  # type: ignore[no-any-return]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _HOOKED:
        frame = frame.f_back
    # one of a parameter alone is made in a backward pass
    return _steps.get(type(optimizer), step) if frame is None else frame.f_locals["func"]  # type: ignore[no-any-return]


def is_updating() -> bool:
    """Return whether what steps on this thread is called by memlab, for a step of the loop's that is under way."""
    return getattr(_thread, "is_updating", False)


def plain_stepper(optimizer: Optimizer) -> Stepper:
    """The user's own update, of the given parameters only."""
    step = unhooked_step(optimizer)
    only = _for_these if type(optimizer).__module__.startswith(_WITHOUT_PLACES) else _without_gradients_of_others

    def update(parameters: Sequence[Parameter]) -> None:
        with only(optimizer, parameters) as acting, torch.no_grad():
            outer, _thread.is_updating = is_updating(), True
            try:
                step(acting)
            finally:
                _thread.is_updating = outer

    return update


@contextmanager
def _for_these(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Iterator[Optimizer]:
    """Have torch's step update these parameters alone: yields an optimizer that finds no others in its groups.

    The user's own keeps whole groups: another thread may save its state meanwhile.
    """
    chosen = {id(parameter) for parameter in parameters}
    acting = standin(optimizer)
    acting.state = optimizer.state
    acting.param_groups = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in chosen]}
        for group in optimizer.param_groups
    ]
    before = dict(vars(acting))
    try:
        yield acting
    finally:
        # what a step notes of itself, as that it has warned
        noted = {name: value for name, value in vars(acting).items() if before.get(name, before) is not value}
        optimizer.__dict__.update(noted)


@contextmanager
def _without_gradients_of_others(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Iterator[Optimizer]:
    """Have a step update these parameters alone; afterwards gradients are the very same.

    The others stay in their groups: an optimizer may tell parameters apart by their places there, as those of bitsandbytes do
    for which settings were overridden.
    """
    chosen = {id(parameter) for parameter in parameters}
    hooks = {name: getattr(optimizer, name) for name in _HOOKS}
    hidden: list[tuple[Parameter, torch.Tensor]] = []
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in chosen and (gradient := parameter.grad) is not None:
                    hidden.append((parameter, gradient))
                    parameter.grad = None
        optimizer.__dict__.update({name: OrderedDict() for name in _HOOKS})
        yield optimizer
    finally:
        optimizer.__dict__.update(hooks)
        for parameter, gradient in hidden:
            parameter.grad = gradient
