"""Entries of `optimizer.state`: packed ones, and those that the loop holds or has tensors of.

An entry that the loop holds (`note_held`) is filled when a change of plans makes the state a plain dict again, and is the entry
then. Who holds it is told by its count of references: nothing else says so of a dict.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node
from torch.utils.weak import WeakIdKeyDictionary

from memlab.runtime.callers import is_memlab_code
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.ownership import parameters_in

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter
State = dict[str, Any]  # of one parameter

# one for each optimizer, held while its state is packed, updated or put back: another thread may read an entry meanwhile
_locks: MutableMapping[Optimizer, threading.RLock] = WeakIdKeyDictionary()
_PATIENCE_SECONDS = 1.0  # a step that raised may hold it for good


def changing(optimizer: Optimizer) -> threading.RLock:
    """Return the lock of who changes an optimizer's state."""
    return _locks.setdefault(optimizer, threading.RLock())


class PackedState(dict[str, Any]):
    """State of one parameter under other names than its optimizer's, which answers to those names too.

    Who asks for one of them, writes it, or goes through all of them, has all of the state put back in the user's own form, in this
    very dict; before the next update it is packed again (`pack_again`). memlab itself finds what is kept there (`kept_of`).

    Args:
        resident: what is kept.
        names: those of the user's own form.
        own_form: brings what is kept into that form; None while an update is under way.
        why: in words, where a name is gone.
        lock: is held while state is changed.

    Example:
        >>> state = PackedState({"half": 2.0}, frozenset({"whole"}), lambda state: {"whole": 2 * state["half"]}, "")
        >>> kept_of(state), "whole" in state
        ({'half': 2.0}, True)
        >>> state["whole"] += 1
        >>> state
        {'whole': 5.0}
    """

    __slots__ = ("_lock", "_names", "_own_form", "_why", "closed")

    def __init__(
        self,
        resident: State,
        names: frozenset[str],
        own_form: Callable[[State], State | None],
        why: str,
        lock: threading.RLock | None = None,
    ) -> None:
        super().__init__(resident)
        self._names, self._own_form, self._why, self._lock = names, own_form, why, lock or threading.RLock()
        self.closed: PackedState | None = None  # the state as it was kept, once it has been put back

    def __contains__(self, name: object) -> bool:
        return (self.closed is None and name in self._names) or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self._give_back(name)
        return super().__getitem__(name)

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name}: not kept {self._why}; `%memfit undo` brings the optimizer's own state back")

    def get(self, name: str, default: Any = None) -> Any:
        self._give_back(name)
        return super().get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        self._give_back(name)
        super().__setitem__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ((self._own_form(kept_of(self)) if self.closed is None else None) or kept_of(self),)

    def around(self, resident: State) -> PackedState:
        """The same, of what a layer above makes of it."""
        return PackedState(resident, self._names, self._own_form, self._why, self._lock)

    def _show(self, frame: FrameType) -> None:
        if self._names and self.closed is None and not is_memlab_code(frame):
            self._give_back(next(iter(self._names)))

    def _give_back(self, name: object) -> None:
        if self.closed is not None or name not in self._names:
            return
        with deferred_interrupts():
            is_alone = self._lock.acquire(timeout=_PATIENCE_SECONDS)
            try:
                own = self._own_form(kept_of(self)) if self.closed is None else None
                if own is not None:
                    self.closed = self.around(kept_of(self))
                    dict.clear(self)
                    dict.update(self, own)
            finally:
                if is_alone:
                    self._lock.release()


def _showing(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def shown(self: PackedState, *args: Any, **kwargs: Any) -> Any:
        self._show(sys._getframe(1))
        return method(self, *args, **kwargs)

    return shown


for _name in (
    "__delitem__", "__eq__", "__ior__", "__iter__", "__len__", "__or__", "__repr__", "__reversed__", "__ror__",
    "clear", "copy", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(PackedState, _name, _showing(_name))


def _flattened(state: PackedState) -> tuple[list[Any], list[str]]:
    state._show(sys._getframe(1))
    return [*dict.values(state)], [*dict.keys(state)]


# what goes through a tree of torch's goes through the optimizer's own form
register_pytree_node(PackedState, _flattened, lambda values, names: dict(zip(names, values, strict=True)))


def kept_of(state: Mapping[str, Any]) -> State:
    """Return what is kept of a parameter, whatever else its state answers to."""
    return dict(dict.items(state))  # type: ignore[arg-type]


@dataclass
class Followed:
    """State of one parameter, and tensors of the loop's that are to have its values.

    Args:
        current: as it is kept now; another one that the loop puts there is not followed.
        tensors: in the user's own form, by name.
    """

    current: State | None
    tensors: list[tuple[str, weakref.ref[torch.Tensor]]]


# by id of the parameter: a hook on one may know the optimizer, and would keep it here for good
followed_of: MutableMapping[Optimizer, dict[int, Followed]] = WeakIdKeyDictionary()


def held_states(optimizer: Optimizer) -> list[tuple[Any, State]]:
    """Parameters that have state, plain tensors too; optimizers may keep other things in the same dict."""
    items = optimizer.state.items()
    return [(key, state) for key, state in items if isinstance(key, torch.Tensor) and isinstance(state, dict) and state]


def set_state(optimizer: Optimizer, parameter: Parameter, state: State, *, is_stepping: bool = False) -> None:
    """Keep new state, or none: an empty entry would read as state that exists."""
    before = optimizer.state.get(parameter)
    held = held_of.get(optimizer, {}).get(id(parameter))
    if held is not None and held.is_of(before):
        state = held.followed_by(state) if is_stepping else held.filled(state)
    followed = followed_of.get(optimizer, {}).get(id(parameter))
    if followed is not None and before is followed.current:
        followed.current = state
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


@dataclass
class _Held:
    """Entries that the loop holds of one parameter.

    Args:
        entries: what it holds.
        current: the entry that is in `optimizer.state`; where the loop has put another one there, none of these is filled.
    """

    entries: list[State]
    current: State | None

    def is_of(self, state: State | None) -> bool:
        return self.current is state or not (self.current or state)

    def filled(self, state: State) -> State:
        """Give the entries what a plain state holds; return the one that is to be in its place."""
        if state and type(state) is dict:
            for entry in self.entries:
                if entry is not state:
                    entry.clear()
                    entry.update(state)
                if isinstance(entry, PackedState):
                    entry.closed = entry.closed or entry.around({})
            state = next((entry for entry in self.entries if type(entry) is dict), state)
        return self.followed_by(state)

    def followed_by(self, state: State) -> State:
        """Note the entry that is in `optimizer.state` from now on."""
        self.current = state or None
        return state


# by id of the parameter
held_of: MutableMapping[Optimizer, dict[int, _Held]] = WeakIdKeyDictionary()


def _references_to_unheld() -> int:
    """Return the references to an entry that nobody holds: from `optimizer.state`, from a variable here, and to count them."""
    table = {0: dict[str, Any]()}
    state = table[0]
    return sys.getrefcount(state)


_REFERENCES = _references_to_unheld()  # newer versions of Python do not count a variable


def note_held(optimizers: Sequence[Optimizer]) -> None:
    """Note entries of optimizers' state that the loop holds, before they are replaced; nothing else may hold them meanwhile."""
    for optimizer in optimizers:
        before, now = held_of.pop(optimizer, {}), {}
        for parameter in [*parameters_in(optimizer)]:
            state, known = optimizer.state.get(parameter), before.pop(id(parameter), None)
            entries = known.entries if known is not None and known.is_of(state) else []
            del known
            entries = [entry for entry in entries if entry is not state and sys.getrefcount(entry) > _REFERENCES]
            followed = followed_of.get(optimizer, {}).get(id(parameter))
            ours = _REFERENCES + (followed is not None and followed.current is state)
            if isinstance(state, dict) and state and sys.getrefcount(state) > ours:
                entries.append(state)
            if entries:
                now[id(parameter)] = _Held(entries, state)
        if now:
            held_of[optimizer] = now


def restored(optimizers: Sequence[Optimizer]) -> None:
    """Note that entries are those again that were in `optimizer.state` before something failed."""
    for optimizer in optimizers:
        parameters = {id(p): p for p in parameters_in(optimizer)}
        for known in (held_of.get(optimizer, {}), followed_of.get(optimizer, {})):
            for key, entry in known.items():
                entry.current = optimizer.state.get(parameters[key]) if key in parameters else None


def forget_dropped(optimizer: Optimizer) -> None:
    """Keep no entry that the loop has let go of: it may hold all that the plan saves."""
    now = {}
    for key, held in held_of.pop(optimizer, {}).items():
        entries = [e for e in held.entries if sys.getrefcount(e) > _REFERENCES + (e is held.current)]
        if entries:
            now[key] = _Held(entries, held.current)
    if now:
        held_of[optimizer] = now


def forget_held(optimizers: Sequence[Optimizer]) -> None:
    """Keep nothing for entries that the loop holds: they are in their places."""
    for optimizer in optimizers:
        held_of.pop(optimizer, None)
