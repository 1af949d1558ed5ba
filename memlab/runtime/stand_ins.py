"""Methods of single modules in place of their classes', and modules as they are without them.

1. A `stand_in` is an attribute of the instance, with an ``__getstate__`` beside it that leaves both out of pickles and copies.
2. `own_attributes` and `is_ours` tell what memlab has put on a module from what is the user's.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import nn

CALL = "_compiled_call_impl"  # where torch keeps what `model.compile()` makes; it leaves it out of pickles and copies
_STATE, _COPY = "__getstate__", "__deepcopy__"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


# modules of Python's whose frames say by local names which module they ask
_ASKING = ("torch.nn.modules.module", "copy")


class InPlace:
    """Something of memlab's in the place of an attribute of a module."""

    before: Any = None  # what stood there before, memlab's or the user's; None where nothing did
    owner: weakref.ref[nn.Module]  # the module that it was put on

    @property
    def users(self) -> Any:
        """The user's own attribute, or None."""
        return self.before.users if isinstance(self.before, InPlace) else self.before


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return what calls a method of a module as it then is: a loop may give the class another one, or the module another class.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> shown = method_of(module, "extra_repr")
        >>> module.__class__ = nn.Identity
        >>> shown()
        ''
    """
    now = getattr(module, name)
    if name in vars(module):
        return now  # type: ignore[no-any-return]

    @functools.wraps(now)
    def method(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(module), name)(module, *args, **kwargs)

    return method


def stand_in(module: nn.Module, name: str, replacement: Callable[..., Any], undo: ExitStack) -> None:
    """Give one module another method of a name, which its copies and pickles do not have, until undone.

    Example:
        >>> import copy
        >>> module = nn.Linear(2, 2)
        >>> with ExitStack() as undo:
        ...     stand_in(module, "forward", abs, undo)
        ...     "forward" in vars(module), "forward" in vars(copy.deepcopy(module))
        (True, False)
        >>> vars(module).keys() == vars(nn.Linear(2, 2)).keys()
        True
    """
    instance = module.__dict__
    standing = StandIn(replacement, instance.get(name), weakref.ref(module), name)

    def restore() -> None:
        above = instance.get(name)
        if above is standing:
            if standing.before is None:
                del instance[name]
            else:
                instance[name] = standing.before
            return
        # one that was put over it since, as where two models share the module, calls what was there before
        while isinstance(above, StandIn) and above.before is not standing:
            above = above.before
        if isinstance(above, StandIn):
            above.before = standing.before
            standing.step_aside()

    keep_out_of_copies(module, undo)
    undo.callback(restore)
    instance[name] = standing


def keep_out_of_copies(module: nn.Module, undo: ExitStack) -> None:
    """Leave stand-ins and hooks of memlab's on a module out of its copies and pickles, until undone.

    Call it before they are put there, so that it is undone after them.
    """
    instance, there = module.__dict__, weakref.ref(module)  # who undoes it does not keep the module

    def restore() -> None:
        alive = there()
        is_needed = (
            any(isinstance(value, StandIn) for value in instance.values())
            or any(is_ours(hook) for key in _HOOKS for hook in instance[key].values())
            or (alive is not None and copies_itself(alive) and isinstance(instance.get(CALL), InPlace))
        )
        if not is_needed:
            instance.pop(_STATE, None)
            if _is_answer(instance.get(_COPY)):
                del instance[_COPY]

    undo.callback(restore)
    instance[_STATE] = functools.partial(_state_without_stand_ins, there)
    # of parametrized layers, say: it does not ask for a state
    if hasattr(type(module), _COPY) and _COPY not in instance:
        instance[_COPY] = functools.partial(_copied_without_stand_ins, there)


def copies_itself(module: nn.Module) -> bool:
    """Return whether the class of a module says itself what its copies and pickles hold."""
    return type(module).__getstate__ is not nn.Module.__getstate__ or hasattr(type(module), _COPY)


def is_ours(hook: Any) -> bool:
    """Return whether a hook is memlab's own: no copy has it, and what is put back of a module leaves it alone."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).partition(".")[0] == "memlab"


def have_others(tables: Iterable[Mapping[Any, Any] | None]) -> bool:
    """Return whether tables of hooks have one that is not memlab's."""
    return any(not is_ours(hook) for table in tables if table for hook in table.values())


def copy_in(frame: FrameType, name: str, value: Any, owner: nn.Module | None) -> nn.Module | None:
    """Return the module that a frame of torch's, or of `copy`, asks for an attribute of memlab's, if it is not the one that has it.

    Args:
        frame: which asks.
        name: of the attribute.
        value: the attribute.
        owner: the module that memlab has put it on; None where it is gone.
    """
    if frame.f_globals.get("__name__") not in _ASKING:
        return None
    there = frame.f_locals
    found = (there.get(each) for each in ("module", "self", "x"))
    asked = next((each for each in found if isinstance(each, nn.Module) and vars(each).get(name) is value), owner)
    return None if asked is owner else asked


class StandIn(InPlace):
    """A method of one module instance, which memlab has put there."""

    def __init__(self, replacement: Callable[..., Any], before: Any, module: weakref.ref[nn.Module], name: str) -> None:
        # first: it takes over the attributes of what it wraps, which may be another of these
        functools.update_wrapper(self, replacement)
        self._replacement = replacement  # what is called
        self.before = before  # the attribute of the instance that it stands in for; None where there was none
        self.owner, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            copied = copy_in(sys._getframe(1), self._name, self, self.owner())
            if copied is not None:
                made_the_users(copied)
                return getattr(copied, self._name)(*args, **kwargs)
        return self._replacement(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return getattr, (self.owner(), self._name)  # as of a method; what the module is in a file has no stand-ins

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return getattr(copy.deepcopy(self.owner(), memo), self._name)

    def __getattr__(self, name: str) -> Any:
        if name in ("__self__", "__func__"):  # of a method, as code asks that gives it to another module
            bound = self.before or getattr(type(self.owner()), self._name).__get__(self.owner())
            return getattr(bound, name)
        # as of a function: `torch.export` looks at its code
        return getattr(vars(self).get("__wrapped__"), name)

    def step_aside(self) -> None:
        """Call what was there before, from now on."""
        self._replacement = self.before or (
            lambda *args, **kwargs: getattr(type(self.owner()), self._name)(self.owner(), *args, **kwargs)
        )


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module instance that memlab has not put there.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> with ExitStack() as undo:
        ...     stand_in(module, "forward", abs, undo)
        ...     own_attributes(module).keys() == vars(nn.Linear(2, 2)).keys()
        True
    """
    return _cleaned(vars(module))


def made_the_users(copied: nn.Module) -> None:
    """Take off what is memlab's from a module that got all attributes of another (`clone.__dict__ = module.__dict__.copy()`).

    Its parts as well, where they are such copies.
    """
    for part in [*copied.modules()]:
        attributes = vars(part)
        owners = [value.owner for value in attributes.values() if isinstance(value, InPlace)]
        owners += [attributes[_STATE].args[0]] if _is_answer(attributes.get(_STATE)) else []
        if any(owner() is not part for owner in owners):
            own = own_attributes(part)
            for key in [*attributes]:
                if key not in own:
                    del attributes[key]
                elif attributes[key] is not own[key]:
                    attributes[key] = own[key]


def _cleaned(attributes: Mapping[str, Any]) -> dict[str, Any]:
    own = {}
    for key, value in attributes.items():
        users = None if _is_answer(value) else value.users if isinstance(value, InPlace) else value
        if users is value or users is not None:
            own[key] = users
    ours = {number for key in _HOOKS for number, hook in own.get(key, {}).items() if is_ours(hook)}
    for key in (*_HOOKS, *HOOK_OPTIONS) if ours else ():
        if key in own:
            own[key] = type(own[key])((number, hook) for number, hook in own[key].items() if number not in ours)
    return own


def _state_without_stand_ins(module: weakref.ref[nn.Module]) -> Any:
    """The state of a module for a pickle or a copy, as it would be without memlab."""
    alive: Any = _asked(module, _STATE)
    kind: Any = type(alive)
    state = kind.__getstate__(alive)
    return _cleaned(state) if isinstance(state, dict) else state


def _copied_without_stand_ins(module: weakref.ref[nn.Module], memo: dict[int, Any]) -> Any:
    """A copy as the class of a module makes it, as it would be without memlab."""
    alive: Any = _asked(module, _COPY)
    own = _cleaned(vars(alive))
    for key, value in vars(alive).items():
        if own.get(key, memo) is not value:
            memo[id(value)] = copy.deepcopy(own.get(key), memo)
    made = type(alive).__deepcopy__(alive, memo)
    for key in vars(alive).keys() - own.keys():
        vars(made).pop(key, None)
    return made


def _asked(module: weakref.ref[nn.Module], name: str) -> nn.Module | None:
    """Return the module that a copy or a pickle is asked of: the one that memlab has put the answer on, or a copy of that."""
    owner = module()
    return copy_in(sys._getframe(2), name, vars(owner).get(name), owner) or owner


def _is_answer(value: Any) -> bool:
    answers = (_state_without_stand_ins, _copied_without_stand_ins)
    return isinstance(value, functools.partial) and value.func in answers
