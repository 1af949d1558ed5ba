"""The loop's own code between the model call and the optimizer step: its criterion, its backward pass, its clipping.

Numbered rules of the mechanism:

1. From the end of a guarded call to the optimizer step, every function of torch that the loop calls passes
   through `LoopCode`. One that runs out of memory is called again after room was made, unless it has changed one
   of its arguments already. A kernel allocates before it writes, so one that writes into a single tensor is called
   again as well; functions that write into lists of them are not.
2. A backward pass of the loop begins with the *loop's own part*, from the loss to the model's outputs. It keeps its
   graph, so that it can be run again when memory runs out there. What its functions have saved is held here: as soon
   as the model's part begins, it is let go of, as autograd would. What one call of a function saved is named at the
   nodes it made, and let go of only by a backward pass that reaches all of them: another graph's is never touched.
3. Where the loop's own part goes on after the model's has begun, because it sends gradients to parameters past the
   model (a penalty on weights) or stands between two model calls, everything is kept until the end, and gradients
   that were there before are set aside until then. What hooks on the loop's own tensors, and autograd functions, have changed is put
   back first; a pass that calls backward hooks of modules is not run again.
4. Where the mode stands among those of the loop's: `memlab.runtime.loop_mode`.
   What another model of the loop computes in its call is that model's, and left alone.
5. Where anything has been compiled by ``torch.compile`` the mode stays away, as Dynamo would trace into it.

Known limitations: in such a process nothing of the loop's own code is called again. `torch.autograd.grad`, a backward
pass with ``create_graph``, one
into ``inputs=``, and one over more than 2000 functions of the loop's own are not run again, nor is what the loop
computes in front of the model.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._pytree import tree_iter

from memlab.rescue.differentiation import ASKING, DIFFERENTIATING, Called, Differentiation, hook_within, set_aside
from memlab.rescue.guard import before_others, is_guarded
from memlab.runtime import graphs
from memlab.runtime.callers import handed_over
from memlab.runtime.interrupts import deferred_interrupts, interruptible
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.loop_mode import UncompiledMode
from memlab.runtime.model_state import State, Written
from memlab.runtime.reach import is_of_library
from memlab.runtime.rng import RandomState

if TYPE_CHECKING:
    from memlab.rescue.rescuer import Rescuer

_SAVED = "memlab.saved"  # in the metadata of nodes
_MOST_NODES = 2000  # of a loop's own graph; a larger one is not walked
_TWICE = "Trying to backward through the graph a second time: its saved tensors have been freed"


class _Held:
    """A tensor that one function of the loop's saved for its backward pass."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # detached: an output that a function saves knows its node, which would keep itself alive through this
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            raise RuntimeError(_TWICE)
        if self.tensor._version != self.version:
            raise RuntimeError(graphs.CHANGED)
        return self.tensor


class _Saved:
    """Tensors that one call of a function has saved, named in the metadata of the nodes that its outputs have."""

    __slots__ = ("held", "nodes")

    def __init__(self) -> None:
        # the graph keeps what is held, and nobody else: a result that is dropped takes it along
        self.held: list[weakref.ref[_Held]] = []
        self.nodes = 0

    def free(self) -> None:
        for reference in self.held:
            held = reference()
            if held is not None:
                held.tensor = None
        self.held.clear()


class LoopCode(UncompiledMode):
    """Watches the functions of torch that the loop calls itself."""

    def __init__(self, owner: Rescuer) -> None:
        super().__init__()
        self._owner = owner
        # what the backward pass under way is through with when the model's part begins
        self._to_free: list[_Saved] = []
        # whether a backward pass is under way that keeps its graph although the loop has not asked for it
        self.graph_is_kept_for_itself = False
        self._keeps_all = False  # what was saved is needed until the end of it
        self._retaining: list[weakref.ref[torch.Tensor]] = []  # tensors whose gradients a pass adds up, beside leaves
        self._hooks: list[Any] = []  # of the loop's, on tensors of its own
        self._can_repeat = False  # as long as the model's part has not begun, or all is kept

    def end(self) -> None:
        super().end()
        self._retaining.clear()
        self._hooks.clear()

    # -- what is held ---------------------------------------------------------------------------

    def model_begins(self, *, is_kept: bool) -> None:
        """The backward pass has reached a model call; the loop may keep its graph for one of its own."""
        self._can_repeat = self._keeps_all
        if not (is_kept or self._keeps_all):
            self._free_saved()

    def _free_saved(self) -> None:
        while self._to_free:
            self._to_free.pop().free()

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        called = Called(func := handed_over(func))
        try:
            return self._heard(called, args, kwargs)
        except Exception as error:
            if id(error) == called.error_id or not self._owner.is_own(error):
                raise
            # a function that is called in a wrong way says so itself
            result = called.result[0] if called.result else func(*args, **kwargs)
            self._owner.steps_aside(error)
            return result

    def _heard(self, called: Called, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._owner.is_in_other_call:
            return called(*args, **kwargs)
        func = called.func
        name = getattr(func, "__name__", "")
        if name == "retain_grad":
            self._retaining.append(weakref.ref(args[0]))
        if name == "register_hook":
            self._hooks += [*args[1:], *kwargs.values()]
        if name in ASKING and (found := before_others(args[0])) is not None:
            return hook_within(args[0], *found, name, *args[1:], **kwargs)
        if name in _ATTRIBUTES:
            return called(*args, **kwargs)
        if func in DIFFERENTIATING:
            return self._differentiate(Differentiation.of(called, args, kwargs))
        if "_foreach_" in name and name.endswith("_"):
            return called(*args, **kwargs)  # nothing tells how many of its tensors it has written
        return self._retried(called, name, args, kwargs)

    def _retried(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        written = _versions((args, kwargs)) if name.endswith("_") or "out" in kwargs else None
        random = RandomState() if name.rstrip("_") in _DRAWING else None
        attempt = 0
        while True:
            oom: BaseException | None = None
            try:
                return self._holding(func, args, kwargs)
            except BaseException as error:
                is_changed = written and written != _versions((args, kwargs))
                if is_changed or graphs.is_within_checkpoint() or not self._owner.recovery.can_rescue(error):
                    raise
                oom = error
            attempt += 1
            self._owner.makes_room_for_loop(oom, attempt)
            if random is not None:
                random.restore()

    def _holding(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # transforms of functions keep what they save themselves, and allow no hooks; of several hooks torch calls the newest alone
        is_kept = graphs.why_as_written() or graphs.are_saved_by_hooks_of_the_loop()
        if not torch.is_grad_enabled() or is_kept:
            return func(*args, **kwargs)
        saved = _Saved()

        def hold(tensor: torch.Tensor) -> Any:
            if isinstance(tensor, (LazyTensor, torch.nn.Parameter)):
                return tensor
            try:
                held = _Held(tensor)
                saved.held.append(weakref.ref(held))
            except Exception as error:
                if not self._owner.is_own(error):
                    raise
                self._owner.steps_aside(error)
                return tensor
            return held

        # a Ctrl-C in torch's own lines would leave the hooks in force
        with deferred_interrupts(), torch.autograd.graph.saved_tensors_hooks(hold, _unpack), interruptible():
            result = func(*args, **kwargs)
        if saved.held:
            # the arguments as well: functions that write into them give them other nodes
            tensors = [leaf for leaf in tree_iter((result, args, kwargs)) if isinstance(leaf, torch.Tensor)]
            nodes: set[Any] = {tensor.grad_fn for tensor in tensors} - {None}
            saved.nodes = len(nodes)
            for node in nodes:
                node.metadata.setdefault(_SAVED, []).append(saved)
        return result

    # -- the loop's backward pass --------------------------------------------------------------

    def _differentiate(self, wanted: Differentiation) -> Any:
        asked = wanted.before_others()
        if asked:
            return wanted.run_through(asked)
        own = self._own_part(wanted) if wanted.can_repeat else None
        try:
            if own is None:
                return wanted.run(keep=wanted.keeps)
            retaining = [tensor for ref in self._retaining if (tensor := ref()) is not None]
            with set_aside([*own.leaves, *retaining] if wanted.accumulates else []) as start_over:
                return self._run_until_it_fits(wanted, own, start_over)
        finally:
            self._owner.calls.backward_ended()

    def _run_until_it_fits(self, wanted: Differentiation, own: _OwnPart, start_over: Callable[[], None]) -> Any:
        attempt = 0
        self._keeps_all = own.goes_on
        self.graph_is_kept_for_itself = not wanted.keeps
        code = [*self._hooks, *own.functions]
        before = State((), code, Written(), self._owner.device) if code else None
        try:
            while True:
                oom: BaseException | None = None
                self._can_repeat = True
                self._to_free = [] if wanted.keeps else list(own.saved)
                try:
                    done = wanted.run(keep=True)
                    self._free_saved()
                    return done
                except BaseException as error:
                    if not (self._can_repeat and self._owner.recovery.can_rescue(error)):
                        raise
                    oom = error
                start_over()
                self._owner.calls.backward_runs_again()
                if before is not None:
                    before.restore()
                attempt += 1
                self._owner.makes_room_for_loop(oom, attempt)
        finally:
            self.graph_is_kept_for_itself = self._keeps_all = self._can_repeat = False
            self._to_free = []

    def _own_part(self, wanted: Differentiation) -> _OwnPart | None:
        """Look at the loop's own part of a backward pass; None where it cannot be run twice."""
        part = self._walk(wanted, past_calls=not wanted.accumulates)
        return self._walk(wanted, past_calls=True) if part is not None and part.goes_on else part

    def _walk(self, wanted: Differentiation, *, past_calls: bool) -> _OwnPart | None:
        leaves: list[torch.Tensor] = []
        functions: set[type] = set()
        calls = 0
        from_nodes: dict[Any, list[Any]] = {}  # whose gradients each node gets, the roots' from nobody
        waiting: list[tuple[Any, Any]] = [(tensor.grad_fn, None) for tensor in wanted.roots]
        while waiting:
            node, above = waiting.pop()
            if node is None:
                continue
            if node in from_nodes:
                from_nodes[node].append(above)
                continue
            from_nodes[node] = [above]
            is_call = is_guarded(node)
            calls += is_call
            if len(from_nodes) > _MOST_NODES:
                return None
            function = getattr(type(node), "_forward_cls", None)
            if function is BackwardHookFunction:
                return None  # hooks of a module are called, of which nobody knows what they change
            if function is not None and not is_call and not is_of_library(function.__module__):
                functions.add(function)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                if leaf.grad is not None and leaf._post_accumulate_grad_hooks:
                    return None  # they would see a gradient without what was set aside
                leaves.append(leaf)
            if past_calls or not is_call:
                waiting += [(following, node) for following, _ in node.next_functions]
        saved = _saved_by(wanted.run_of(from_nodes))
        return _OwnPart(leaves, saved, functions, goes_on=bool(leaves) or calls > 1)


def _saved_by(nodes: Iterable[Any]) -> list[_Saved]:
    """Return what calls of functions have saved for these nodes, and for no others."""
    counts = Counter(one for node in nodes for one in node.metadata.get(_SAVED, ()))
    return [one for one, count in counts.items() if count == one.nodes]


@dataclass(frozen=True)
class _OwnPart:
    """The loop's own part of a backward pass."""

    # what it sends gradients to itself; where it goes on, what the whole pass sends gradients to
    leaves: list[torch.Tensor]
    saved: list[_Saved]  # what its functions have saved for it, and for no other backward pass
    functions: set[type]  # autograd functions of the user's in it
    goes_on: bool  # whether it goes on after the model's part has begun


# functions in several parts, which may have drawn random numbers when a later part runs out of memory
_DRAWING = frozenset(
    {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"}
    | {"gumbel_softmax", "rrelu", "normal", "multinomial", "scaled_dot_product_attention"}
    | {"multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"}
)


# what is asked of tensors and gradients without computing anything
_ATTRIBUTES = frozenset(
    {"__get__", "__set__", "__delete__", "size", "dim", "numel", "stride", "is_floating_point", "register_hook"}
)


def _unpack(saved: Any) -> torch.Tensor:
    return saved.get() if isinstance(saved, _Held) else saved


def _versions(value: Any) -> list[int]:
    return [t._version for t in tree_iter(value) if isinstance(t, torch.Tensor) and not t.is_inference()]
