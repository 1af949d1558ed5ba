"""Facts about objects as long as they live, and actions for when they have gone.

Python drops whatever is raised in a finalizer, and a Ctrl-C that happens to arrive in one is raised there: the loop would
go on. So nothing of Python's runs here when an object goes. It is forgotten or noted by C code alone.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

_T = TypeVar("_T")
# references to the storage of a tensor that nobody shares: the tensor's and the one made to count them
_UNSHARED = 2


class WhileAlive(Generic[_T]):
    """Values of objects that are told apart by identity, each kept as long as its object lives.

    Example:
        >>> names = WhileAlive()
        >>> thing = set
        >>> names.keep(thing, "a set")
        >>> names.of(thing), names.of(dict), len(names), names.alive
        ('a set', None, 1, [<class 'set'>])
    """

    def __init__(self) -> None:
        self._values: dict[weakref.ref[Any], _T] = {}

    def __len__(self) -> int:
        return len(self._values)

    @property
    def alive(self) -> list[Any]:
        """The objects, in the order in which they got their values."""
        return [thing for reference in [*self._values] if (thing := reference()) is not None]

    def keep(self, thing: Any, value: _T) -> None:
        """Note the value of an object, in place of the one it had."""
        self._values[weakref.ref(thing, self._values.pop)] = value

    def of(self, thing: Any) -> _T | None:
        """Return the value of an object; None when it has none."""
        return self._values.get(weakref.ref(thing))

    def forget(self, thing: Any) -> None:
        """Drop the value of an object; do nothing when it has none."""
        self._values.pop(weakref.ref(thing), None)


class Departures(Generic[_T]):
    """Objects that are watched until they have gone, each with a note for whoever asks next.

    Example:
        >>> class Thing: ...
        >>> thing, departures = Thing(), Departures()
        >>> departures.watch(thing, "seen")
        >>> list(departures.new())
        []
        >>> del thing
        >>> list(departures.new())
        ['seen']
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Any], _T]] = {}
        self._gone: deque[weakref.ref[Any]] = deque()

    def watch(self, thing: Any, note: _T) -> None:
        """Keep a note until an object has gone."""
        watching = weakref.ref(thing, self._gone.append)
        self._notes[id(watching)] = watching, note

    def new(self) -> Iterator[_T]:
        """Yield the notes of those that have gone since this was last asked, by one thread at a time."""
        while self._gone:
            yield self._notes.pop(id(self._gone.popleft()))[1]


def called_while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a method as long as its object lives, and keeps it no longer; afterwards nothing is done.

    Example:
        >>> class Listener:
        ...     def heard(self, what):
        ...         return f"heard {what}"
        >>> listener = Listener()
        >>> call = called_while_alive(listener.heard)
        >>> call("steps")
        'heard steps'
        >>> del listener
        >>> call("nothing") is None
        True
    """
    there = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = there()
        return None if alive is None else alive(*args)

    return call


def storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor, as long as it lives."""
    address: int = tensor.untyped_storage()._cdata
    return address


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether another tensor, a view or a saved one too, has the same storage.

    Example:
        >>> one = torch.ones(2)
        >>> is_shared(one), (view := one[:1]) is None, is_shared(one)
        (False, False, True)
    """
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _UNSHARED)


# what has leaves of memlab's own that share storage with weights (`memlab.runtime.aliases.Aliases`)
own_aliases: weakref.WeakSet[Any] = weakref.WeakSet()


def held_by_others(tensors: Iterable[torch.Tensor], aliases: int = 0) -> set[int]:
    """Return `id`s of the tensors whose values something else has as well: another one of them, in the same place, or anybody else.

    Parts of one storage that have nothing in common, and that nobody else has, are not among them.

    Args:
        tensors: all that may share a storage.
        aliases: how many of each are known, and do not count; nor do `own_aliases`.

    Example:
        >>> whole = torch.ones(4)
        >>> one, other, alone = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        >>> one.data, other.data = whole[:2], whole[2:]
        >>> len(held_by_others([one, other, alone]))
        2
        >>> del whole
        >>> len(held_by_others([one, other, alone])), len(held_by_others([one, other, one.detach()]))
        (0, 3)
    """
    known = Counter(alias.untyped_storage()._cdata for each in own_aliases for alias in each.aliases)
    return {
        id(each)
        for storage, together in _by_storage(tensors).items()
        if torch._C._storage_Use_Count(storage) > _UNSHARED - 1 + len(together) * (1 + aliases) + known[storage]
        or _overlap(together, {id(each) for each in together})
        for each in together
    }


def overlap(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()) -> bool:
    """Return whether some tensors have values in one place with one another, or with others.

    Example:
        >>> whole = torch.ones(4)
        >>> overlap([whole[:2], whole[2:]]), overlap([whole[:3], whole[2:]]), overlap([whole[:2]], [whole, whole])
        (False, True, True)
    """
    own = [*tensors]
    ids = {id(tensor) for tensor in own}
    return any(_overlap(together, ids) for together in _by_storage((*own, *others)).values())


def _by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel() and tensor.untyped_storage().nbytes():
            found.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    return found


def _overlap(together: Sequence[torch.Tensor], own: Collection[int]) -> bool:
    places = sorted((each.storage_offset(), _last_place(each), id(each) in own) for each in together)
    end, end_of_own = -1, -1  # of those that begin before
    for start, last, is_own in places:
        if start <= (end if is_own else end_of_own):
            return True
        end, end_of_own = max(end, last), max(end_of_own, last if is_own else -1)
    return False


def _last_place(tensor: torch.Tensor) -> int:
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + sum(steps))


def gradient_is_held(parameter: torch.Tensor) -> bool:
    """Return whether somebody else than the parameter has its gradient, or a view of it.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.square().sum().backward()
        >>> gradient_is_held(weight), (held := [weight.grad]) is None, gradient_is_held(weight)
        (False, False, True)
    """
    if parameter.grad is None:
        return False
    is_strided = parameter.grad.layout is torch.strided  # a sparse one has no storage of its own
    return _references(parameter) > _OWN_REFERENCES or (is_strided and is_shared(parameter.grad))


def _references(parameter: torch.Tensor) -> int:
    gradient = parameter.grad
    return sys.getrefcount(gradient)


_scratch = torch.nn.Parameter(torch.ones(1, device="cpu"))
_scratch.grad = torch.ones(1, device="cpu")
_OWN_REFERENCES = _references(_scratch)
del _scratch


def is_saved(parameter: torch.Tensor) -> bool:
    """Return whether autograd has saved a parameter itself, and is to read its values in a backward pass.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> is_saved(weight), (penalty := weight.square().sum()).item(), is_saved(weight)
        (False, 2.0, True)
    """
    # beside the tensor, the node that adds its gradient up holds it
    return bool(parameter._use_count() > 1 + parameter.requires_grad)  # type: ignore[attr-defined]
