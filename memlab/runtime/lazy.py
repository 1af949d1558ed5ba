"""A tensor whose value is computed when somebody looks at it.

Used for logits that a training loop gets back and usually never reads. Shape, dtype and device are
known at once; any operation, print or copy computes the value and goes on with the real tensor.
"""

from __future__ import annotations

import dis
import sys
import weakref
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from memlab.errors import SessionError

# what can be asked without knowing the value
_METADATA = frozenset(
    {
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__,
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.__len__,
    }
)


class LazyTensor(torch.Tensor):
    """Stands in for a tensor until its value is needed."""

    _compute: Callable[[], torch.Tensor] | None
    _value: torch.Tensor | None
    _grad_enabled: bool
    _origin: LazyTensor | None  # what this is a view of, or computed from

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, compute: Callable[[], torch.Tensor]
    ) -> Self:
        lazy = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        lazy._compute = compute
        lazy._value = None
        lazy._grad_enabled = torch.is_grad_enabled()
        lazy._origin = None
        return lazy

    def __init__(self, *_args: Any) -> None:
        super().__init__()

    def value(self) -> torch.Tensor:
        """The real tensor, computed at the first call, with a graph if one would have been recorded where it was made."""
        if self._value is None:
            assert self._compute is not None
            with torch.set_grad_enabled(self._grad_enabled):
                self._value = self._compute()
            self._compute = None
        return self._value

    def follow(self, origin: LazyTensor, how: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Be computed from the value of another one, so that what is written to one is seen in the other."""
        self._origin, self._compute = origin, lambda: how(origin.value())
        return self

    def expire(self, reason: str) -> None:
        """Have no value any more; whoever looks is told why."""

        def refused() -> torch.Tensor:
            raise SessionError(reason)

        self._compute = refused

    def with_gradient(self, pass_through: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        """The same values, with an identity in the graph that changes their gradient."""
        return LazyTensor(self.shape, self.dtype, self.device, lambda: pass_through(self.value()))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        real_args, real_kwargs = tree_map(real, (args, dict(kwargs or {})))
        return func(*real_args, **real_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # reached by operations in C++ that were given a lazy tensor without passing through Python
        real_args, real_kwargs = tree_map(real, (args, dict(kwargs or {})))
        return func(*real_args, **real_kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.value().detach().clone()


def real(leaf: Any) -> Any:
    """The value of a lazy tensor; anything else as it is."""
    return leaf.value() if isinstance(leaf, LazyTensor) else leaf


# what a loop keeps no tensors in
_NO_HOLDERS = (ModuleType, type, FunctionType, BuiltinFunctionType, str, int, float)
# attributes and items that hold the loss
_LOSSES = ("loss", 0)
_LOADS = (
    "LOAD_FAST",
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "LOAD_DEREF",
    "LOAD_CLOSURE",
    "LOAD_FROM_DICT_OR",
    "STORE_FAST_LOAD_FAST",
)
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class Waiting:
    """Lazy tensors that nobody has looked at, made from weights that the next update changes."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[LazyTensor]] = []

    def add(self, lazy: LazyTensor) -> None:
        """Have one wait for the next update."""
        self._tensors.append(weakref.ref(lazy))

    def taken(self) -> list[LazyTensor]:
        """Return those that are still there, and let go of them."""
        found = [lazy for ref in self._tensors if (lazy := ref()) is not None and lazy._value is None]
        self._tensors.clear()
        return found


def may_be_read(lazy: Sequence[LazyTensor]) -> bool:
    """Return whether code that is running now may look at one of these tensors later.

    It may not where variables of running functions hold them, and their code, from where it is, comes to other values of those
    variables before it uses them for anything but the loss: ``out = model(**batch); out.loss.backward()``.
    """
    ids = {id(each) for each in lazy}
    held: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith(("memlab.", "torch.")):
            for name, value in [*frame.f_locals.items()]:
                found = ids.intersection(_ids_within(value, 2))
                held |= found
                if found and (_is_read_from(frame, name) or any(_uses(each, name) for each in _codes_in(frame.f_code))):
                    return True
            if frame.f_code.co_name == "<module>":  # below is what runs the cell or the script
                break
        frame = frame.f_back
    return held != ids


def _ids_within(value: Any, depth: int) -> Iterator[int]:
    yield id(value)
    while (
        issubclass(type(value), LazyTensor) and value._origin is not None
    ):  # some objects mind being asked for a class
        value = value._origin
        yield id(value)
    if depth and not isinstance(value, (torch.Tensor, *_NO_HOLDERS)):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for item in [*list(items)[:64], *getattr(value, "__dict__", {}).values()]:
            yield from _ids_within(item, depth - 1)


def _codes_in(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _is_read_from(frame: FrameType, name: str) -> bool:
    """Return whether the code of a frame may read a variable from where it is, before it gives it another value."""
    steps = list(dis.get_instructions(frame.f_code))
    offsets = [step.offset for step in steps]
    seen: set[int] = set()
    waiting = [bisect(offsets, frame.f_lasti)]
    while waiting:
        number = waiting.pop()
        if number in seen or number == len(steps):
            continue
        seen.add(number)
        step = steps[number]
        if _is_written_at(step, name):
            continue
        if _is_read_at(steps, number, name):
            return True
        if step.opcode in _JUMPS:
            waiting.append(bisect(offsets, step.argval - 1))
        if not step.opname.startswith(_ENDS):
            waiting.append(number + 1)
    return False


def _is_written_at(step: dis.Instruction, name: str) -> bool:
    written = step.argval[:1] if step.opname == "STORE_FAST_LOAD_FAST" else step.argval
    is_write = step.opname.startswith(("STORE", "DELETE")) and not step.opname.endswith("ATTR")
    return is_write and (written == name or (isinstance(written, tuple) and name in written))


def _is_read_at(steps: Sequence[dis.Instruction], number: int, name: str) -> bool:
    """Return whether an instruction reads a variable, for anything but the loss."""
    step, then, after = [*steps[number : number + 3], None, None][:3]
    assert step is not None
    named = step.argval == name or (isinstance(step.argval, tuple) and name in step.argval)
    if not named or not step.opname.startswith(_LOADS):
        return False
    is_item = after is not None and after.opname.startswith("BINARY")
    return not (then is not None and (then.opname == "LOAD_ATTR" or is_item) and then.argval in _LOSSES)


def _uses(code: CodeType, name: str) -> bool:
    """Return whether some code reads a variable for anything but the loss."""
    steps = list(dis.get_instructions(code))
    return any(_is_read_at(steps, number, name) for number in range(len(steps))) or any(
        _uses(each, name) for each in _codes_in(code)
    )


def requires_grad(leaf: Any) -> bool:
    """Return whether a value is a tensor that needs a gradient, computed on demand or not."""
    return isinstance(leaf, torch.Tensor) and bool(real(leaf).requires_grad)
