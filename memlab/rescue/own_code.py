"""The loop's own code between the model call and the optimizer step: its criterion, its backward pass, its clipping.

Numbered rules of the mechanism:

1. From the end of a guarded call to the optimizer step, every function of torch that the loop calls passes
   through `OwnCode`. One that runs out of memory is called again after room was made, unless it has changed one
   of its arguments already.
2. What these functions save for the backward pass is held here. So when memory runs out *in the loop's own part*
   of the backward pass, before the model's begins, that part can be run again; as soon as the model's begins, it
   is let go of, as autograd would.
3. The mode stands at the bottom of the stack of function modes, above torch's own for a default device, so that
   modes of the loop's may be entered and left while it is there.

Known limitations: functions compiled by torch.compile are one call each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_iter

from memlab.techniques._lazy import LazyTensor

_FEW_BYTES = 64 * 2**10  # what is smaller is not worth holding
_MOST_NODES = 500  # of a loop's own graph; a larger one is not walked
_CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"
_TWICE = "Trying to backward through the graph a second time: its saved tensors have been freed"


class Owner(Protocol):
    """Who makes room when the loop's own code runs out of memory."""

    def can_rescue(self, error: BaseException) -> bool:
        """Whether an error says that memory ran out."""

    def makes_room_for_loop(self, error: BaseException, attempt: int) -> None:
        """Memory has been freed when this returns; raises when that is not possible."""

    def is_guarded(self, node: Any) -> bool:
        """Whether a node of the autograd graph is a guarded call."""

    def backward_runs_again(self) -> None:
        """Guarded calls whose gradients were handed over in a backward pass that broke off are differentiated anew."""

    def backward_ended(self) -> None:
        """A backward pass of the loop is over."""


class _Held:
    """A tensor that one function of the loop's saved for its backward pass."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            raise RuntimeError(_TWICE)
        if self.tensor._version != self.version:
            raise RuntimeError(_CHANGED)
        return self.tensor


class OwnCode(TorchFunctionMode):
    """Watches the functions of torch that the loop calls itself.

    Args:
        owner: makes room.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner
        # the graph keeps what is held, and nobody else: a loss that is dropped takes it along
        self._held: list[weakref.ref[_Held]] = []
        self._runs_again = False  # a backward pass that keeps its graph for this class's sake, not the loop's
        self._keeps_all = False  # what was saved is needed until the end of it

    # -- where it stands -----------------------------------------------------------------------

    def begin(self) -> None:
        """Watch this thread's code from now on."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self not in stack:
            base = 1 if stack and isinstance(stack[0], DeviceContext) else 0
            _restack([*stack[:base], self, *stack[base:]])

    def end(self) -> None:
        """Stop watching; what is held stays."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self in stack:
            _restack([mode for mode in stack if mode is not self])

    def forget(self, since: int = 0) -> None:
        """Let go of what functions have saved since a moment, as counted by `moment`."""
        if self._keeps_all:
            return
        for reference in self._held[since:]:
            held = reference()
            if held is not None:
                held.tensor = None
        del self._held[since:]

    @property
    def moment(self) -> int:
        """A number that says what was held before this moment, and what will be after."""
        return len(self._held)

    @property
    def graph_is_kept_for_itself(self) -> bool:
        """Whether a backward pass is under way that keeps its graph although the loop has not asked for it."""
        return self._runs_again

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ATTRIBUTES:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward(args, kwargs)
        return self._retried(func, name, args, kwargs)

    def _retried(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        written = _versions((args, kwargs)) if name.endswith("_") or "out" in kwargs else None
        attempt = 0
        while True:
            moment = self.moment
            shortage: BaseException | None = None
            try:
                with self._holding():
                    return func(*args, **kwargs)
            except BaseException as error:
                self.forget(moment)
                if not self._owner.can_rescue(error) or (written and written != _versions((args, kwargs))):
                    raise
                shortage = error
            attempt += 1
            self._owner.makes_room_for_loop(shortage, attempt)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._hold, _unpack):
            yield

    def _hold(self, tensor: torch.Tensor) -> Any:
        is_small = isinstance(tensor, LazyTensor) or tensor.numel() * tensor.element_size() < _FEW_BYTES
        if is_small or isinstance(tensor, torch.nn.Parameter):
            return tensor
        held = _Held(tensor)
        self._held.append(weakref.ref(held))
        return held

    # -- the loop's backward pass --------------------------------------------------------------

    def _backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            self._run_backward(args, kwargs)
        finally:
            self._owner.backward_ended()

    def _run_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensor, gradient, keeps, creates, inputs = _backward_arguments(*args, **kwargs)
        leaves = self._leaves_behind(tensor)
        if keeps or creates or inputs is not None or leaves is None:
            torch.Tensor.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
            return
        # where the loop's gradients of parameters meet the model's, autograd adds them up at the very end
        self._keeps_all = bool(leaves)
        try:
            self._run_until_it_fits(tensor, gradient, leaves)
        finally:
            self._runs_again = self._keeps_all = False
            self.forget()

    def _run_until_it_fits(
        self, tensor: torch.Tensor, gradient: torch.Tensor | None, leaves: list[torch.Tensor]
    ) -> None:
        attempt = 0
        while True:
            shortage: BaseException | None = None
            self._runs_again = True
            try:
                torch.Tensor.backward(tensor, gradient, retain_graph=True)  # type: ignore[no-untyped-call]
            except BaseException as error:
                # nothing held any more: the model's part had begun, and what it raises is final
                if not self._held or not self._owner.can_rescue(error):
                    raise
                shortage = error
            if shortage is None:
                return
            self._runs_again = False
            for leaf in leaves:
                leaf.grad = None
            self._owner.backward_runs_again()
            attempt += 1
            self._owner.makes_room_for_loop(shortage, attempt)

    def _leaves_behind(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Leaves that the loop's own code sends a gradient to past the model.

        Returns:
            None where the loop's part of the backward pass cannot be run twice: there is none, it is large, or it adds
            to gradients that are there already.
        """
        if not self._held:
            return None
        leaves: list[torch.Tensor] = []
        waiting, seen = [tensor.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or self._owner.is_guarded(node):
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if len(seen) > _MOST_NODES or (leaf is not None and leaf.grad is not None):
                return None
            leaves += [leaf] if leaf is not None else []
            waiting += [following for following, _ in node.next_functions]
        return leaves


# what is asked of tensors and gradients without computing anything
_ATTRIBUTES = frozenset(
    {"__get__", "__set__", "__delete__", "size", "dim", "numel", "stride", "is_floating_point", "register_hook"}
)


def _backward_arguments(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None, bool, bool, Any]:
    return tensor, gradient, bool(retain_graph), create_graph, inputs


def _unpack(saved: Any) -> torch.Tensor:
    return saved.get() if isinstance(saved, _Held) else saved


def _versions(value: Any) -> list[int]:
    return [t._version for t in tree_iter(value) if isinstance(t, torch.Tensor) and not t.is_inference()]


def _restack(modes: list[TorchFunctionMode]) -> None:
    """Rebuild this thread's stack of function modes, bottom first."""
    for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        _push_mode(mode)  # type: ignore[no-untyped-call]
