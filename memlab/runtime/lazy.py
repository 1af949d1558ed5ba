"""A tensor whose value is computed when somebody looks at it.

Used for logits that a training loop gets back and usually never reads. Shape, dtype and device are
known at once; any operation, print or copy computes the value and goes on with the real tensor.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import weakref
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from memlab.errors import SessionError
from memlab.runtime.callers import handed_over, module_of
from memlab.runtime.dispatch import own_tensors
from memlab.units import MIB

# an output larger than this is computed only when the loop looks at it
LAZY_FROM_BYTES = 1 * MIB

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

_OF_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)


class LazyTensor(torch.Tensor):
    """Stands in for a tensor until its value is needed."""

    _compute: Callable[..., torch.Tensor] | None  # from the value of `_origin`, if any; None once computed or expired
    _value: torch.Tensor | None
    _expired: str | None  # why there is no value any more
    _grad_enabled: bool
    _origin: LazyTensor | None  # what this is a view of, or computed from
    _family: list[weakref.ref[LazyTensor]]  # of one that has no origin: what follows it
    made_of: torch.Tensor | None  # what it is cast from, and holds

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, compute: Callable[..., torch.Tensor]
    ) -> Self:
        lazy = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        lazy._compute = compute
        lazy._value = lazy._expired = None
        lazy._grad_enabled = torch.is_grad_enabled()
        lazy._origin, lazy._family, lazy.made_of = None, [], None
        return lazy

    def __init__(self, *_args: Any) -> None:
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own_tensors.add(f"`{cls.__name__}`")

    def value(self) -> torch.Tensor:
        """The real tensor, computed at the first call, with a graph if one would have been recorded where it was made."""
        if self._value is None:
            if self._compute is None:
                raise SessionError(self._expired)
            with torch.set_grad_enabled(self._grad_enabled), _with_graph_of_its_own():
                self._value = self._compute() if self._origin is None else self._compute(self._origin.value())
            self._compute = None
        return self._value

    def follow(self, origin: LazyTensor, how: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Take the value from that of another one, so that what is written to one is seen in the other."""
        self._origin, self._compute = origin, how
        origin._first._family.append(weakref.ref(self))
        return self

    @property
    def _first(self) -> LazyTensor:
        return self if self._origin is None else self._origin._first

    @property
    def computed(self) -> torch.Tensor | None:
        """Return the real tensor where somebody has looked."""
        return self._value

    @property
    def holds(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that it keeps alive, without computing it."""
        return tuple(each for each in (self._value, self.made_of) if each is not None)

    def is_about_to_be_written(self) -> None:
        """Compute what follows the same values: copies are those of before, and views see what is written."""
        first = self._first
        family, first._family = first._family, []
        for ref in family:
            if (other := ref()) is not None and other._compute is not None:
                other.value()

    def expire(self, reason: str) -> None:
        """Have no value any more; whoever looks is told why."""
        self._compute, self._expired = None, reason

    def with_gradient(self, pass_through: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        """The same values, with an identity in the graph that changes their gradient."""
        made: LazyTensor = with_graph(
            lambda: LazyTensor(self.shape, self.dtype, self.device, pass_through).follow(self, pass_through),
            (self,),
            lambda gradient: _through(pass_through, self.value(), gradient),
        )
        return made

    @classmethod
    def cast(cls, tensor: torch.Tensor, dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """What a change of the number format makes of a tensor, when somebody looks; it holds the tensor until then and after."""

        def make() -> LazyTensor:
            lazy = cls(tensor.shape, dtype, tensor.device, lambda: change(tensor))
            lazy.made_of = tensor
            return lazy

        with _with_graph_of_its_own():  # it is held as it is
            return with_graph(make, (tensor,), lambda gradient: _through(change, tensor, gradient))

    def with_rows_placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The same rows, elsewhere or as they are, by what passes their gradients on."""
        return place(self.value())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = handed_over(func)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if args and isinstance(args[0], LazyTensor) and _writes(func):
            args[0].is_about_to_be_written()
        real_args, real_kwargs = tree_map(real, (args, dict(kwargs or {})))
        return func(*real_args, **real_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # reached by operations in C++ that were given a lazy tensor without passing through Python, and below autograd: the
        # value is kept, and its graph is wanted by what looks next
        with _above_autograd():
            real_args, real_kwargs = tree_map(real, (args, dict(kwargs or {})))
        return func(*real_args, **real_kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.value().detach().clone()


own_tensors.add(f"`{LazyTensor.__name__}`")


def _above_autograd() -> AbstractContextManager[Any]:
    """Context in which a graph is recorded, also from within an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _OF_AUTOGRAD:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _with_graph_of_its_own() -> AbstractContextManager[Any]:
    """Context in which what a graph saves goes past hooks: `torch.utils.checkpoint` counts what a function of the loop's saves."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined] # by `torch.func.grad` and its like
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(as_saved, as_saved)


@functools.cache
def _writes(func: Callable[..., Any]) -> bool:
    """Return whether a function or method of torch's writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    is_operator = (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__int__", "__index__", "__invert__", "__iter__")
    )
    return name in ("__setitem__", "__set__") or is_operator or (name.endswith("_") and not name.endswith("__"))


def as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a hook keeps of a saved tensor that it leaves in place.

    An output that a hook keeps as it is would hold its own node, and no graph that is dropped without a backward pass would go.
    """
    return tensor if isinstance(tensor, LazyTensor) or tensor.is_leaf else tensor.detach()


Gradients = Callable[[torch.Tensor], Sequence[torch.Tensor | None]]


def with_graph(make: Callable[[], LazyTensor], sources: Sequence[torch.Tensor | None], gradients: Gradients) -> Any:
    """Make a lazy tensor that has a graph, for what takes it past Python: an `autograd.Function`, compiled code, `vmap`.

    Args:
        make: makes it.
        sources: what its value is computed from.
        gradients: gives theirs from that of the value; with a graph where gradients are enabled.
    """
    return _WithGraph.apply(make, gradients, *sources)  # type: ignore[no-untyped-call]


def _through(
    change: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor, gradient: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Gradient of what was changed, from that of what it became."""
    inner = value.detach().requires_grad_()
    with torch.enable_grad():
        outer = change(inner)
    return torch.autograd.grad(outer, inner, gradient, create_graph=torch.is_grad_enabled())


class _WithGraph(torch.autograd.Function):
    """The node of a lazy tensor."""

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], LazyTensor], gradients: Gradients, *sources: torch.Tensor | None
    ) -> LazyTensor:
        ctx.gradients = gradients
        ctx.save_for_backward(*sources)
        with torch.enable_grad():
            return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # torch's own error where they have been written to, or the graph is gone
        return (None, None, *ctx.gradients(gradients[0]))


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

    def taken(self) -> list[weakref.ref[LazyTensor]]:
        """Return those that are still there, and let go of them."""
        found = [ref for ref in self._tensors if (lazy := ref()) is not None and lazy._compute is not None]
        self._tensors.clear()
        return found


def _arguments_borrow() -> bool:
    """Return whether an argument may be in a variable without a reference of its own: the caller's is enough from Python 3.14 on."""

    def references(argument: object) -> int:
        return sys.getrefcount(argument)

    variable = object()
    return references(variable) == sys.getrefcount(variable)


_ARGUMENTS_BORROW = _arguments_borrow()


def _arguments_of(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def may_be_read(waiting: Sequence[weakref.ref[LazyTensor]]) -> bool:
    """Return whether code may look at one of these tensors later.

    It may not where variables of running functions hold them, and nothing else does, and their code, from where it is, comes to
    other values of those variables before it uses them for anything but the loss: ``out = model(**batch); out.loss.backward()``.
    """
    ids, holders = {id(ref()) for ref in waiting}, _Holders()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not module_of(frame).startswith(("memlab.", "torch.")):
            variables, code = frame.f_locals, frame.f_code
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            for name in [*variables]:
                # held by the frame of a function, and before Python 3.13 by the copy that its `f_locals` is; a variable of a
                # function around it is counted there, and so is an argument that borrows it
                is_own = name not in code.co_freevars and not (_ARGUMENTS_BORROW and name in _arguments_of(code))
                holding = {"frame": is_function and is_own, "dict": isinstance(variables, dict)}
                edges = [(id(frame), name, kind) for kind, holds in holding.items() if holds]
                if holders.look(variables[name], edges, 2, ids) and (
                    _is_read_from(code, frame.f_lasti, name)
                    or any(_uses(each, name) for each in (*_codes_in(code), *_codes_of(variables)))
                ):
                    return True
            if code.co_name == "<module>":  # below is what runs the cell or the script
                break
        frame = frame.f_back
    return holders.are_more_than_found(ids)


class _Holders:
    """Holders of lazy tensors, and theirs, as far as variables tell."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, set[Any]]] = {}

    def look(self, value: Any, edges: Sequence[Any], depth: int, ids: set[int]) -> bool:
        """Note what is on the way from a variable to one of these tensors; whether there is a way."""
        inner: list[tuple[Any, Any]] = []
        if issubclass(type(value), LazyTensor):  # some objects mind being asked for a class
            inner = [("origin", value._origin)]
        elif depth > 0 and not isinstance(value, (torch.Tensor, *_NO_HOLDERS)):
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            inner = [*enumerate(list(items)[:64]), *getattr(value, "__dict__", {}).items()]
        within = [self.look(item, [(id(value), key)], depth - 1, ids) for key, item in inner]
        is_on_the_way = id(value) in ids or any(within)
        if is_on_the_way:
            self._found.setdefault(id(value), (value, set()))[1].update(edges)
        return is_on_the_way

    def are_more_than_found(self, ids: set[int]) -> bool:
        """Return whether something else holds one of these tensors, or what is on the way to it."""
        # a pair here holds each, and so does the argument of `getrefcount`
        return not ids <= self._found.keys() or any(
            sys.getrefcount(pair[0]) - 2 > len(pair[1]) for pair in self._found.values()
        )


def _codes_of(namespace: Mapping[str, Any]) -> list[CodeType]:
    """Return the code of functions and methods that may read a namespace as their global variables."""
    members = [
        each
        for value in [*namespace.values()]
        for each in (value, *(vars(value).values() if issubclass(type(value), type) else ()))
        if issubclass(type(each), (FunctionType, staticmethod, classmethod))
    ]
    functions = [inspect.unwrap(each) for each in members]
    return [each.__code__ for each in functions if getattr(each, "__globals__", None) is namespace]


def _codes_in(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


@functools.lru_cache
def _is_read_from(code: CodeType, last: int, name: str) -> bool:
    """Return whether code may read a variable after an instruction, before it gives it another value."""
    steps = list(dis.get_instructions(code))
    offsets = [step.offset for step in steps]
    seen: set[int] = set()
    waiting = [bisect(offsets, last)]
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
    loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    if name not in loaded or not step.opname.startswith(_LOADS):
        return False
    is_last = name not in loaded[:-1]  # what follows takes the last one
    is_item = after is not None and (after.opname == "BINARY_SUBSCR" or after.argrepr == "[]")
    return not (is_last and then is not None and (then.opname == "LOAD_ATTR" or is_item) and then.argval in _LOSSES)


@functools.lru_cache(maxsize=1024)
def _uses(code: CodeType, name: str) -> bool:
    """Return whether some code reads a variable around it for anything but the loss."""
    steps = list(dis.get_instructions(code)) if name in (*code.co_names, *code.co_freevars) else []
    return any(
        "FAST" not in step.opname and _is_read_at(steps, number, name) for number, step in enumerate(steps)
    ) or any(_uses(each, name) for each in _codes_in(code))


def requires_grad(leaf: Any) -> bool:
    """Return whether a value is a tensor that needs a gradient, computed on demand or not."""
    return isinstance(leaf, torch.Tensor) and bool(real(leaf).requires_grad)
