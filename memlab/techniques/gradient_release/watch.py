"""Use of gradients by the loop: `Watch` tells when one is read or written, `Gone` stands for one that was freed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memlab.runtime.callers import handed_over, module_of
from memlab.runtime.loop_mode import LoopMode, called_from_loop
from memlab.runtime.touch import SET_DATA, written_in_place

_ATEN = torch.ops.aten
_GRADIENT = torch.Tensor.grad


class Watch(LoopMode):
    """Tells when code that is not memlab's own reads or writes a gradient, or writes to another tensor.

    Args:
        touched: called with the tensor whose gradient it is and with what is written; what it returns is read.
        written: called with the tensors that are about to be written to.
        differentiated: called with what `autograd.grad` is asked to differentiate.
    """

    def __init__(
        self,
        touched: Callable[[torch.Tensor, Any], Gone | None],
        written: Callable[[Sequence[torch.Tensor]], None],
        differentiated: Callable[[Any], None],
    ) -> None:
        super().__init__()
        self._touched, self._differentiated = weakref.WeakMethod(touched), weakref.WeakMethod(differentiated)
        self._written = weakref.WeakMethod(written)
        self._is_paused = False

    @property
    def is_heard(self) -> bool:
        return self._touched() is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the optimizer read gradients."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # Dynamo traces this method, and would make something else of it
            return func(*args, **kwargs or {})
        func = handed_over(func)
        # of a backward pass nothing is seen in here: torch takes the mode away while it calls this method
        if getattr(func, "__self__", None) is _GRADIENT and not self._is_paused and _is_loops(sys._getframe(1)):
            touched = self._touched()
            written = None if func.__name__ == "__get__" else args[1:]
            gone = touched(args[0], written) if touched is not None else None
            if gone is not None:
                return gone if written is None else None
        elif not self._is_paused:
            tensors = [args[0]] if func == SET_DATA else written_in_place(func, args, kwargs or {})
            if tensors and _is_loops(sys._getframe(1)) and (is_written := self._written()) is not None:
                is_written(tensors)
        if func is torch.autograd.grad and (differentiated := self._differentiated()) is not None:
            differentiated((args or tuple((kwargs or {}).values()))[0])
        return func(*args, **kwargs or {})


# frames of their own, which are parts of a function
_INSIDE_FUNCTIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"})


class Owner(Protocol):
    """Freed gradients, and hears what becomes of what stands for them."""

    def gone_zeroed(self, parameter: int) -> None:
        """The loop has zeroed the gradient of the parameter with this id."""

    def gone_read(self) -> None:
        """The loop uses values that are gone; raises a `RefusalError`."""


class Gone(torch.Tensor):
    """Stands for a gradient that was freed: it takes no memory, can be zeroed, and is refused to whoever reads it.

    Args:
        gradient: of which it has shape, layout, dtype and device.
        parameter: id of the parameter whose gradient it was.
        owner: freed it.
        kept: the gradient, where it was only about to be freed: whoever reads it gets it, once the owner has been told.
    """

    _parameter: int
    _owner: weakref.ref[Owner]
    _kept: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, gradient: torch.Tensor, parameter: int, owner: weakref.ref[Owner], kept: torch.Tensor | None = None
    ) -> Self:
        self = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, strides=gradient.stride(), dtype=gradient.dtype, device=gradient.device
        )
        self._parameter, self._owner, self._kept = parameter, owner, kept
        return self

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        operator = func.overloadpacket
        if operator is _ATEN.detach:
            (gone,) = tensors
            return Gone(gone, gone._parameter, gone._owner, gone._kept)
        if operator not in (_ATEN.zero_, _ATEN._foreach_zero_) and not (operator is _ATEN.fill_ and args[1] == 0):
            args, kwargs = pytree.tree_map_only(Gone, Gone._read, (args, kwargs))
            return func(*args, **kwargs or {})
        for tensor in tensors:
            if not isinstance(tensor, Gone):
                tensor.zero_()
                continue
            if tensor._kept is not None:
                tensor._kept.zero_()
            if (owner := tensor._owner()) is not None:
                owner.gone_zeroed(tensor._parameter)
        return None if tensors is args[0] else args[0]

    def _read(self) -> torch.Tensor:
        owner = self._owner()
        if owner is not None:
            owner.gone_read()
        if self._kept is None:
            raise RuntimeError("this gradient was freed by --release-grads")
        return self._kept

    def numpy(self, **kwargs: Any) -> Any:
        return self._read().numpy(**kwargs)

    def tolist(self) -> Any:
        return self._read().tolist()

    def data_ptr(self) -> int:
        return self._read().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._read().untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def where() -> str:
    """Name the function that the loop is in, and the package it is of, in words; empty for the cell itself."""
    for frame, _ in walk_stack(sys._getframe(1)):
        name, module = frame.f_code.co_name, module_of(frame)
        if name not in _INSIDE_FUNCTIONS and not module.startswith(("memlab.", "torch.")):
            package, is_within, _ = module.partition(".")
            of = f" of {package}" if is_within else ""
            return f" (in {name}{of})" if name.isidentifier() else ""  # a cell itself has names in angle brackets
    return ""


def is_memlab(frame: Any) -> bool:
    """Return whether a frame is of memlab's own code."""
    return module_of(frame).startswith("memlab.")


def _is_loops(frame: Any) -> bool:
    # of a mode above this one: `with torch.device(...)`, the guard's, the watch of another model, a recorder's
    while frame.f_code.co_name == "__torch_function__" or frame.f_code is called_from_loop.__code__:
        frame = frame.f_back
    # a module that is moved or cast converts gradients as well, and those that are gone need none of it; by its name, which
    # the frame of `called_from_loop` has as well
    moves = nn.Module._apply
    is_moved = frame.f_code.co_name == moves.__name__ and frame.f_globals is moves.__globals__
    return not is_memlab(frame) and not is_moved
