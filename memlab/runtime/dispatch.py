"""Base of memlab's dispatch modes: they watch plain tensors, and leave torch.compile alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from memlab.runtime.callers import OWN_FOLDER

Function = TypeVar("Function", bound=Any)
_LEFT_ALONE = "code of memlab is not compiled"
_deferring: dict[type, bool] = {}
own_tensors: set[str] = set()  # names of classes of memlab's that loops get tensors of
_DEVICE = torch.ops.prim.device.default
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])  # its version
HALF = (torch.float16, torch.bfloat16)  # numbers of half precision
# operators that multiply matrices, on a GPU by cuBLAS
MATRIX_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
)


class WatchingMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves __init_subclass__ unannotated
    """A dispatch mode for operators on plain tensors; subclasses say in `watched` what is done with one."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # unannotated in torch

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call] # unannotated in torch
        if "__torch_dispatch__" in vars(cls):
            never_compile(cls.__torch_dispatch__)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # autograd asks tensors without memory for it, more often than there are operators
            return args[0].device
        return NotImplemented if defers(types) else self.watched(func, args, kwargs or {})

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator."""
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # the wrapper this spares would import the compiler and cost more than the mode itself
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def never_compile(function: Function) -> Function:
    """Have torch.compile leave calls of a function alone, and what it calls, at no cost for a call."""
    function._torchdynamo_disable = True  # what `torch._dynamo.disable` sets, without its import of the compiler
    function._torchdynamo_disable_msg = _LEFT_ALONE
    of_torch = torch._C._dynamo.eval_frame
    if hasattr(of_torch, "set_code_exec_strategy"):  # not in older torch
        skip = of_torch._FrameAction.SKIP
        of_torch.set_code_exec_strategy(function.__code__, of_torch._FrameExecStrategy(skip, skip))
    return function


never_compile(WatchingMode.__torch_dispatch__)


def makes_one_graph() -> bool:
    """Return whether torch.compile is at a function of which it has to make one graph (``fullgraph=True``), and this is called in it.

    Torch runs this while it compiles, and takes the result for a constant.
    """
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")
    function = getattr(getattr(compiler, "tls", None), "current_tx", None)
    return bool(getattr(function, "one_graph", False) or getattr(function, "error_on_graph_break", False))


makes_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined] # what `assume_constant_result` sets


def is_compilers_failure(error: BaseException) -> bool:
    """Return whether torch.compile failed on code of memlab, in what it had to make one graph of."""
    of_others = hasattr(
        error, "innermost_user_frame_summary"
    )  # which the compiler hangs on errors that it lets through
    is_compilers = of_others or type(error).__module__ == "torch._dynamo.exc"
    return is_compilers and any(mark in str(error) for mark in (_LEFT_ALONE, OWN_FOLDER, *own_tensors))


def is_within_compiled_call() -> bool:
    """Return whether this thread is in a call of what `torch.compile` has made.

    At the end of such a call torch restores whether there are modes, and not the modes: without one that was there when it
    began, every function of torch would fail.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    frame: FrameType | None = None if compiler is None else sys._getframe(1)
    while frame is not None and not (frame.f_code.co_name == "compile_wrapper" and frame.f_globals is vars(compiler)):
        frame = frame.f_back
    return frame is not None


def defers(types: Iterable[type]) -> bool:
    """Return whether wrapper subclasses take part, which must first unfold into the plain tensors they hold."""
    return any(_wraps(kind) for kind in types)


def _wraps(kind: type) -> bool:
    wraps = _deferring.get(kind)
    if wraps is None:
        wraps = _deferring[kind] = is_traceable_wrapper_subclass_type(kind)
    return wraps


_REBINDS = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors whose values an operator writes to; `set_` and `resize_` give a tensor other memory and write to none.

    Example:
        >>> tensor = torch.ones(2)
        >>> len(written_by(torch.ops.aten.add_.Tensor, (tensor, tensor), {}))
        1
        >>> written_by(torch.ops.aten.set_.source_Tensor, (tensor, tensor), {})
        []
    """
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or schema.name in _REBINDS:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(written) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


class WritesWatch(WatchingMode):
    """Tells of tensors that operators have written to.

    Example:
        >>> written = []
        >>> tensor = torch.ones(2)
        >>> with WritesWatch(written.append):
        ...     other = tensor.add(1).mul_(2)
        >>> len(written), other.data_ptr() == written[0].data_ptr()
        (1, True)
    """

    def __init__(self, told: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._told = told

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        for tensor in written_by(func, args, kwargs):
            self._told(tensor)
        return result


class StorageWatch(WatchingMode):
    """Tells of operators that are about to write to some storages."""

    def __init__(self) -> None:
        super().__init__()
        self._protected: dict[int, list[Callable[[], None]]] = {}

    def protect_storage(self, key: int, about_to: Callable[[], None]) -> None:
        """Call something before each write to a storage, which others keep alive."""
        self._protected.setdefault(key, []).append(about_to)

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in written_by(func, args, kwargs):
            key = tensor.untyped_storage()._cdata
            for about_to in (protected := self._protected.get(key, ())):
                about_to()
            if protected:
                self.told(key)
        return func(*args, **kwargs)

    def told(self, key: int) -> None:
        """A protected storage is about to be written to."""
