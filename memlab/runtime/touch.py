"""Reads and writes by a loop of tensors that are kept in another form than the user's.

While `Touch` is on, tensors have a class under which torch asks before any of its functions is run on them. One that only asks
for a shape or a gradient is run as it is, and so is memlab's own code. Others are run on values in the user's form, whose
gradients are the tensor's. Where something holds these values afterwards (a view, a graph, a list of ``.data``), or has written
to them, they are kept.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from memlab.runtime.callers import handed_over, is_memlab_code
from memlab.runtime.dispatch import never_compile
from memlab.runtime.lifetimes import is_shared
from memlab.runtime.tree import flatten, tensors_in

_READ = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # attributes
_ASKS = frozenset(
    [
        "grad",  # of torch.autograd: for these very tensors
        "backward",
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_same_size",
        "get_device",
        "has_names",
        "untyped_storage",
        "storage",
        "data_ptr",
        "requires_grad_",
        "retain_grad",
        "register_hook",
        "_is_view",
        "__len__",
        "register_post_accumulate_grad_hook",
        "__hash__",
        "__reduce_ex__",
        "__deepcopy__",
        "is_tensor",
        "is_pinned",
        "is_shared",
    ]
)
_CONVERTS = frozenset({"to", "type_as"})  # to the dtype of another
_OWN = "_memlab_own_class"
_MAKES_PARAMETERS = nn.Parameter.__new__.__code__
_IN_PLACE = frozenset(
    {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"))}
)  # fmt: skip
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_GET_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_Values = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by id: tensors, and what they are in the user's form


class WatchedTensors(ABC):
    """Tensors with a class under which torch asks before any of its functions is run on them."""

    def __init__(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._tensors = tensors  # gives the tensors
        self._classes = {kind: self._watched_class(kind) for kind in (nn.Parameter, torch.Tensor)}

    def watch(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Look after the tensors, or some of them; those of a class of the user's are left alone."""
        for tensor in self._tensors() if tensors is None else tensors:
            watched = self._classes.get(type(tensor))
            if watched is not None:
                tensor.__class__ = watched

    def leave(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Give the tensors, or some of them, their own classes back; harmless when they have them."""
        # their classes say which are watched: a list of them would be another after a change that is taken back
        for tensor in self._tensors() if tensors is None else tensors:
            if self._is_watched(tensor):
                tensor.__class__ = own_class(tensor)

    @abstractmethod
    def _asked(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        """Run a function on watched tensors, for the code in a frame."""

    def _methods(self, kind: type[torch.Tensor]) -> dict[str, Any]:
        """Return what the class of watched tensors has beside torch's: of functions that write, only `set_` does not ask."""
        return {"set_": _set}

    def _watched_class(self, kind: type[torch.Tensor]) -> type[torch.Tensor]:
        def __torch_function__(  # noqa: N807 - torch's name
            _class: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            frame, function = sys._getframe(1), handed_over(function)
            result = self._asked(function, types, args, kwargs or {}, frame)
            if frame.f_code is _MAKES_PARAMETERS:  # which wants the class that it has been given
                self.leave(tensors_in(args))
                return result.as_subclass(kind)
            return result

        never_compile(__torch_function__)
        own = {
            "__torch_function__": classmethod(__torch_function__),
            **self._methods(kind),
            "__module__": kind.__module__,
            _OWN: kind,
        }
        metaclass: Any = type(kind)
        watched: type[torch.Tensor] = metaclass(kind.__name__, (kind,), own)
        return watched

    @contextmanager
    def _left(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        watched = self._watched_in(args, kwargs)
        self.leave(watched)
        try:
            yield
        finally:
            self.watch(watched)

    def _watched_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_in((args, kwargs)) if self._is_watched(tensor)]

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in self._classes.values()

    def _are_own(self, types: Sequence[type]) -> bool:
        # torch's functions in Python name plain tensors, too
        return all(kind in self._classes or kind in self._classes.values() for kind in types)


class Touch(WatchedTensors):
    """Runs functions that read or write some tensors on their values in the user's form.

    Example:
        >>> kept = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> touch = Touch(lambda: [kept], lambda tensor, frame: tensor.data.float() + 2**-10)
        >>> touch.watch()
        >>> kept.shape, kept.grad, torch.zeros(2).lerp(kept.detach(), 0.5)
        (torch.Size([2]), None, tensor([0.5005, 0.5005]))
        >>> touch.leave()
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[torch.Tensor]],
        read: Callable[[torch.Tensor, FrameType], torch.Tensor | None],
        keep: Callable[[torch.Tensor, torch.Tensor], None] = lambda _tensor, _values: None,
        replace: Callable[[torch.Tensor, torch.Tensor], bool] = lambda _tensor, _values: False,
        gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda tensor, given: given.to(tensor.dtype),
    ) -> None:
        super().__init__(tensors)
        # gives a tensor's values in the user's form, and who asks for them; None to use the tensor as it is kept
        self._read = read
        self._keep = keep  # called where something holds what `read` gave, or has written to it
        self._replace = replace  # called for ``tensor.data = values``; False to do as torch does
        self._gradient = gradient  # gives what ``tensor.grad`` becomes: made like what was read
        self._is_read = False  # since they are watched

    def leave(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        if tensors is None:
            self._is_read = False
        super().leave(tensors)

    def say_own_dtype(self) -> None:
        """Tell others the dtype of the user's form from now on, as once one of the tensors has been read."""
        self._is_read = True

    def _asked(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if (not uses_values(function) or is_memlab_code(frame)) and self._are_own(types):
                if function == _GET_DTYPE:
                    return self._dtype_of(args[0], frame)
                if function == SET_GRAD and isinstance(args[1], torch.Tensor):
                    args = args[0], self._gradient(args[0], args[1])
                return function(*args, **kwargs)
            values = self._values_of(args, kwargs, frame)
            if function == SET_DATA and id(args[0]) in values:
                return self._set_data(args[0], args[1], values)
            is_as_kept = not values or _is_for_kept(function, args, kwargs, values)
        if is_as_kept:
            with self._left(args, kwargs):  # a class of somebody else's is asked as well
                return function(*args, **kwargs)
        return self._run(function, types, args, kwargs, values)

    def _dtype_of(self, tensor: torch.Tensor, frame: FrameType) -> torch.dtype:
        """Return the dtype of the user's form, also for what the loop has read before."""
        return torch.float32 if self._is_read and not is_memlab_code(frame) else tensor.dtype

    def _values_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType) -> _Values:
        """Tensors that are watched, each with its values, by id."""
        watched = {id(tensor): tensor for tensor in self._watched_in(args, kwargs)}
        read = {key: (tensor, self._read(tensor, frame)) for key, tensor in watched.items()}
        found = {key: (tensor, values) for key, (tensor, values) in read.items() if values is not None}
        self._is_read |= bool(found)
        return found

    def _run(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        values: _Values,
    ) -> Any:
        versions = {key: read._version for key, (_, read) in values.items()}
        try:
            return _run_on(values, function, args, kwargs, is_asked=not self._are_own(types))
        finally:
            for key, (tensor, read) in values.items():
                if read._version != versions[key] or is_shared(read):
                    self._keep(tensor, read)

    def _set_data(self, tensor: torch.Tensor, value: Any, values: _Values) -> None:
        if id(value) in values:
            self._keep(*values[id(value)])
            value = values[id(value)][1]
        if not self._replace(tensor, value):
            tensor.data = value


def own_class(tensor: torch.Tensor) -> type[Any]:
    """The class that a tensor has while it is not watched."""
    return getattr(type(tensor), _OWN, type(tensor))


def _set(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        tensor.data = args[0]
        return tensor
    return torch.Tensor.set_(tensor, *args, **kwargs)


def uses_values(function: Any) -> bool:
    """Return whether a function of torch looks at the values of a tensor that it is given."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(function.__self__, "__name__", "") in _READ
    return name not in _ASKS and (name != "__set__" or function == SET_DATA) and name != "__delete__"


def written_in_place(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """Return the tensors that a function of torch writes to, by its name and arguments; operators are `dispatch.written_by`'s."""
    name = getattr(function, "__name__", "")
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return tensors_in((args[:1] if is_in_place else (), kwargs.get("out"))) if is_in_place or "out" in kwargs else ()


def _is_for_kept(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: _Values) -> bool:
    """Return whether a function writes to something in the form of the tensors as they are kept (their gradients, say).

    Or to a leaf, which torch refuses.
    """
    kept = {tensor.dtype for tensor, _ in values.values()}
    # torch's functions in Python (`nn.init`) may see to that themselves
    refuses_leaves = torch.is_grad_enabled() and not isinstance(function, FunctionType)
    return any(
        tensor.is_leaf and tensor.requires_grad and refuses_leaves if id(tensor) in values else tensor.dtype in kept
        for tensor in written_in_place(function, args, kwargs)
    )


def _run_on(values: _Values, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_asked: bool) -> Any:
    """Run a function on values."""
    with torch._C.DisableTorchFunctionSubclass():
        leaves, structure = flatten((args, dict(kwargs)))
        given = {key: _given(tensor, read) for key, (tensor, read) in values.items()}
        if getattr(function, "__name__", "") not in _CONVERTS:
            # what is in the kept form beside them, gradients say: torch wants one dtype in many functions
            dtypes = {tensor.dtype: read.dtype for tensor, read in values.values()}
            lower = [each for each in tensors_in(leaves) if id(each) not in given and each.dtype in dtypes]
            given |= {id(each): each.to(dtypes[each.dtype]) for each in lower}
        own_args, own_kwargs = structure.put([given.get(id(leaf), leaf) for leaf in leaves])
    with nullcontext() if is_asked else torch._C.DisableTorchFunctionSubclass():
        result = function(*own_args, **own_kwargs)
    own = {id(given[id(leaf)]): leaf for leaf in leaves if id(leaf) in given}
    if type(result) in (list, tuple):
        return type(result)(own.get(id(each), each) for each in result)
    return own.get(id(result), result)


def _given(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    alias = values.detach()  # so that who holds it is seen in its storage
    return _read(tensor, alias) if torch.is_grad_enabled() and tensor.requires_grad else alias


class _Read(torch.autograd.Function):
    """Values of a tensor in the user's form, whose gradient is that of the tensor as it is kept."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        context.kept = tensor.device, tensor.dtype
        return values

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0].to(*context.kept), None


_read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _Read.apply
