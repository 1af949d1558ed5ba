"""`Masters`: the fp32 values of tensors that are kept in bf16."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memlab.runtime.homes import home_of
from memlab.runtime.lifetimes import is_shared, storage_of
from memlab.runtime.mechanisms import ChangedParameters, OwnMemory
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.techniques.precision.moments import join_master, split_master

_Method = TypeVar("_Method", bound=Callable[..., Any])
_of: MutableMapping[torch.Tensor, weakref.ref[Masters]] = WeakIdKeyDictionary()


def masters_of(tensor: torch.Tensor) -> Masters | None:
    """Return who has the fp32 values of a tensor that is kept in bf16; None for any other tensor."""
    there = _of.get(tensor)
    found = None if there is None else there()
    return found if found is not None and tensor in found else None


def _alone(method: _Method) -> _Method:
    """Have a method run while no other thread changes what is kept."""

    @functools.wraps(method)
    def locked(self: Masters, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast("_Method", locked)


class Masters(ChangedParameters, OwnMemory):
    """Tensors in bf16, each with what it lacks of its fp32 master.

    That is the lower half of the bits, or, while somebody holds values that were shown or has written to them, the master
    itself: what a loop holds of a weight is the weight, over as many steps as it holds it.

    Example:
        >>> weight, masters = torch.nn.Parameter(torch.tensor([0.1])), Masters()
        >>> masters.split(weight, whole=False)
        >>> weight.data, masters.values(weight)
        (tensor([0.1001], dtype=torch.bfloat16), tensor([0.1000]))
        >>> masters.show(weight).fill_(0.3), masters.settle()
        (tensor([0.3000]), None)
        >>> weight.data, masters.values(weight)
        (tensor([0.3008], dtype=torch.bfloat16), tensor([0.3000]))
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []  # all that were split
        self._rest: dict[int, torch.Tensor] = {}  # by id: the lower half in int16, or the master
        self.lock = threading.RLock()  # held while any of that is changed: another thread may save the model meanwhile

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._rest

    def __bool__(self) -> bool:
        return bool(self._rest)

    @property
    def held_tensors(self) -> tuple[torch.Tensor, ...]:
        """Copies that are kept beside the tensors."""
        return tuple(self._rest.values())

    def canonical_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return fp32 for what is kept in bf16 here."""
        return torch.float32 if tensor in self else tensor.dtype

    @_alone
    def split(self, tensor: torch.Tensor, *, whole: bool) -> None:
        """Keep a tensor in bf16 from now on, its gradient along with it; its data stay whole beside that where others have them as well."""
        self.tensors.append(tensor)
        _of[tensor] = weakref.ref(self)
        high, low = split_master(tensor.data)
        self._rest[id(tensor)] = tensor.data if whole else low
        _set_data(tensor, high)

    @_alone
    def join(self, tensor: torch.Tensor) -> None:
        """Give a tensor its master back for good; harmless when done."""
        if tensor in self:
            _set_data(tensor, self._joined(tensor))
            del self._rest[id(tensor)]
            # the last first, as they are taken back
            del self.tensors[next(i for i in reversed(range(len(self.tensors))) if self.tensors[i] is tensor)]

    # -- looked at -----------------------------------------------------------------------------

    @_alone
    def values(self, tensor: torch.Tensor, *, on_host: bool = False) -> torch.Tensor | None:
        """The master of a tensor, where it rests; None when it is in its place. Who writes to it shows it first.

        Args:
            tensor: the tensor.
            on_host: make it in host memory, where it rests nowhere.
        """
        rest = self._rest.get(id(tensor))
        # what becomes of it may outlive an inference
        with torch._C.DisableTorchFunctionSubclass(), _for_training():
            if rest is None or tensor.dtype is torch.float32:
                return None
            if rest.dtype is torch.float32:
                return rest
            # past its base, a view of other bits, by which it would seem to be held
            rest, home = (rest.cpu(), torch.device("cpu")) if on_host else (rest, home_of(tensor))
            return join_master(tensor.data.to(rest.device), rest).to(home).data

    @_alone
    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor's values, wherever they are."""
        values = self.values(tensor)
        if values is None:
            return tensor.detach().clone()
        return values.clone() if self._is_whole(tensor) else values

    @_alone
    def keep(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Take `values` for the master from now on: somebody holds them, or has written to them."""
        self._rest[id(tensor)] = values

    @_alone
    def show(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what `values` does, for somebody who will hold them."""
        values = self.values(tensor)
        if values is not None:
            self.keep(tensor, values)
        return values

    @_alone
    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a tensor other values in fp32, in place of those it has, wherever they are."""
        rest = self._rest[id(tensor)]
        if tensor.dtype is torch.float32:
            tensor.copy_(values)
        elif rest.dtype is torch.float32:
            rest.copy_(values)
            self._settle(tensor)
        else:
            high, low = split_master(values.to(rest.device))
            tensor.copy_(high)
            rest.copy_(low)

    @_alone
    def replace(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Take other values for the master, as for ``tensor.data = values``; False where they are not for that."""
        is_like = values.shape == tensor.shape and values.device == home_of(tensor) and values.is_floating_point()
        if is_like and tensor in self and tensor.dtype is torch.bfloat16:
            self.keep(tensor, values.data.float())
            self._settle(tensor)
            return True
        return False

    @_alone
    def settle(self) -> None:
        """Bring bf16 values in line with masters that were shown, and let those go that nobody holds any more."""
        with _for_training():
            for tensor in self.tensors:
                if tensor in self and (tensor.dtype is not torch.bfloat16 or self._is_whole(tensor)):
                    self._settle(tensor)

    def _settle(self, tensor: torch.Tensor) -> None:
        if tensor.dtype is torch.bfloat16:
            self._lower(tensor, self._rest[id(tensor)], tensor.data)
        else:  # the loop has given it data of its own
            self._lower(tensor, tensor.data.float())

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        return self._rest[id(tensor)].dtype is torch.float32

    # -- in their places -----------------------------------------------------------------------

    @contextmanager
    def in_place(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which tensors are their masters, with gradients in fp32; what is written or dropped there stays so."""
        split = [tensor for tensor in tensors if tensor in self]
        gradients = [tensor.grad for tensor in split]
        before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        storages = {}
        shown: dict[int, torch.Tensor | None] = {}  # gradients in fp32
        try:
            with self.lock, _for_training():
                # written to again: new ones at every step would end up in ever other places, and break up the allocator's segments
                before |= {
                    id(tensor): (tensor.data, self._rest[id(tensor)]) for tensor in split if self._belongs(tensor)
                }
                for tensor, gradient in zip(split, gradients, strict=True):
                    tensor.grad = None
                    tensor.data = self._joined(tensor)
                    storages[id(tensor)] = storage_of(tensor)
                    tensor.grad = shown[id(tensor)] = None if gradient is None else gradient.float()
            yield
        finally:
            with self.lock, _for_training():
                joined = [tensor for tensor in split if tensor.dtype is torch.float32]
                for at, tensor in enumerate(split):
                    if id(tensor) in shown:
                        gradients[at] = _gradient_after(tensor, gradients[at], shown.pop(id(tensor)))
                # all gradients first: what they give free is what splitting needs
                for tensor in joined:
                    tensor.grad = None
                for tensor in joined:
                    high, rest = before.pop(id(tensor), (None, None))
                    if high is not None and high.device != tensor.device:  # the loop has moved the model
                        high = rest = None
                    is_same = storage_of(tensor) == storages.get(id(tensor))
                    if rest is None or rest.dtype is torch.int16:
                        self._lower(tensor, tensor.data, high, rest)
                    elif is_same and rest.device == tensor.device:
                        self._lower(tensor, rest, high)
                    else:  # on a visit to the device; or it was given other data
                        self._lower(tensor, rest.copy_(tensor.data) if is_same else tensor.data, high)
                for tensor, gradient in zip(split, gradients, strict=True):
                    tensor.grad = None if gradient is None else gradient.to(tensor)

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        rest = self._rest[id(tensor)]
        if not self._belongs(tensor):
            return tensor.data.float()
        rest = rest.detach().to(tensor.device)
        return rest if self._is_whole(tensor) else join_master(tensor.data, rest)

    def _belongs(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is still what was split, and the loop has not given it other data."""
        return tensor.dtype is torch.bfloat16 and tensor.shape == self._rest[id(tensor)].shape

    def _lower(
        self,
        tensor: torch.Tensor,
        master: torch.Tensor,
        high: torch.Tensor | None = None,
        low: torch.Tensor | None = None,
    ) -> None:
        """Split a master again, in two given tensors or new ones; one that somebody else holds stays beside its upper half."""
        try:
            halves = _halves(master, high, low)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # an update is done, and must not be repeated because its last step failed; half of this has been freed
            halves = _halves(master, high, low)
        tensor.data = halves[0]
        self._rest[id(tensor)] = master if is_shared(master) else halves[1]


def _gradient_after(
    tensor: torch.Tensor, before: torch.Tensor | None, shown: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradient that a tensor has after an update of the user's own, which may drop it, write to it or put another in its place."""
    now = tensor.grad
    if now is None or before is None or now is not shown or now.device != before.device or before.is_inference():
        return None if now is None else now.to(torch.bfloat16)
    if now is not before and now.layout is torch.strided:
        # its counter, which was 0, does not tell of what was written through `.data`, and that of `before` tells of no more
        (before if now._version else before.data).copy_(now)
    return before


@contextmanager
def _for_training() -> Iterator[None]:
    """Context in which what is made serves training, whatever mode the loop is in."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _halves(
    master: torch.Tensor, high: torch.Tensor | None, low: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    # a buffer may have been given another size
    if high is None or high.shape != master.shape:
        high = torch.empty_like(master, dtype=torch.bfloat16, requires_grad=False)
    if low is None or low.shape != master.shape:
        low = torch.empty_like(master, dtype=torch.int16, requires_grad=False)
    return split_master(master, (high, low))


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Swap a tensor's data for another dtype's, its gradient along with it."""
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None
    tensor.data = data
    if gradient is not None:
        tensor.grad = gradient.to(data.dtype)
