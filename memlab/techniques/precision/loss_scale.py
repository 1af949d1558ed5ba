"""Loss scaling for fp16, for loops without a `GradScaler`.

Numbered rules:

1. The gradient is scaled where it enters the outputs of the model's call, in fp32, before it is cast down: after the cast
   a small one would be zero already. Where it leaves by an input of the call it is unscaled.
2. A hook on each parameter divides by the scale before the gradient is accumulated, so gradient clipping in the loop sees
   true gradients, and the scale may change between two backward passes. Leaves that a call reaches by itself (a tensor of the
   loop's, a layer that has come since) have such a hook during the backward pass.
3. What reaches one of these leaves past the call (a penalty on weights, a part or a method that the loop calls) is scaled before
   it gets there. The scale is a power of two, so it is divided out again without a trace. Which nodes these are is looked up
   when a backward pass begins.
4. The hook of rule 2 notes gradients that are not finite; the optimizer step is then skipped and the scale halved. After 2000 good
   steps it doubles. (The rules of `torch.amp.GradScaler`.) A loop that updates by hand has no step to skip: there gradients
   are looked at when a backward pass ends, and become zero.
5. Gradients that the loop takes itself (`torch.autograd.grad`) are not scaled: it has no step that could be skipped, and would
   find what a scale that is still too large has made infinite. Nor is a backward pass that turns out to go both ways, to a
   parameter through a call and past it, where the plan is on trial: that step is made without scaling, and the plan before comes back.
6. A graph may be older than the plan, or outlive it. What is older is past all calls. After the plan nothing is scaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.runtime.backward import around_backward_passes, is_in_backward
from memlab.runtime.graphs import Beginning, are_batched
from memlab.runtime.lazy import LazyTensor
from memlab.runtime.lifetimes import called_while_alive
from memlab.runtime.mechanisms import Skipping
from memlab.runtime.stand_ins import is_ours
from memlab.runtime.workload import Workload

FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
_Nodes = dict[int, Any]  # by identity; they are kept, so that no other gets theirs


class LossScale(Skipping):
    """Dynamic loss scale by the rules of `torch.amp.GradScaler`, without a scaler in the loop."""

    def __init__(self) -> None:
        # factor by which gradients are multiplied on entering the backward pass; a power of two
        self.scale = FIRST_SCALE
        self._is_unscaled = False  # whether gradients of the backward pass under way are not scaled
        self._began = Beginning()
        self._is_off: bool | None = None  # whether the loop sees to its precision itself; known from the first call on
        self._good_steps = 0
        self._sums: list[torch.Tensor] = []
        self._last_were_bad = False
        self._parameters: dict[int, weakref.ref[nn.Parameter]] = {}
        self._hooks: list[Any] = []
        self._all: list[weakref.ref[nn.Parameter]] = []  # in the middle of a call others may stand in their places
        # hooks of parameters, which a graph may keep, are not to keep the model
        self._workload: Callable[[], Workload | None] = lambda: None
        self._note: Callable[[str], None] = lambda _line: None
        self._withdraw: Callable[[RefusalError], bool] = lambda _refusal: False
        self._name = ""
        # for each backward pass under way: nodes up to the calls, and those of the calls
        self._outside: list[_Nodes] = []

    def watch(
        self, workload: Workload, note: Callable[[str], None], withdraw: Callable[[RefusalError], bool], undo: ExitStack
    ) -> None:
        """Unscale every parameter's gradient before it is accumulated; `withdraw` is `Host.withdraw`."""
        self._name, self._workload = workload.name, weakref.ref(workload)
        self._note, self._withdraw = called_while_alive(note), called_while_alive(withdraw)
        undo.callback(self._sums.clear)
        self._all = [weakref.ref(parameter) for parameter in workload.model.parameters()]
        undo.callback(self._unwatch)
        self._is_unscaled, self._began = False, Beginning()
        self._watch_parameters()
        around_backward_passes(self._scaled_past_calls, undo)

    def _watch_parameters(self) -> None:
        """Put a hook on each parameter that has a gradient and none of them yet, as of layers that the loop has unfrozen."""
        for parameter in (each for ref in self._all if (each := ref()) is not None):
            if parameter.requires_grad and id(parameter) not in self._parameters:
                self._hooks.append(self._unscaled_first(parameter))
                self._parameters[id(parameter)] = weakref.ref(parameter)

    def _unscaled_first(self, leaf: torch.Tensor) -> Any:
        """Put a hook on a leaf before those of the loop, which see true gradients, as one that clips them must; returns its handle."""
        handle = leaf.register_hook(self._unscale)  # type: ignore[no-untyped-call]
        # each is put in anew, since autograd goes by the plain dictionary below the ordered one
        hooks: Any = leaf._backward_hooks
        for key in list(hooks)[:-1]:
            hooks[key] = hooks.pop(key)
        return handle

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._parameters.clear()
        self._is_unscaled = True

    def call_begins(self, *, is_own: bool) -> None:
        """Leave gradients as they are where the loop calls the model under autocast of its own.

        Raises:
            RefusalError: it does so for some calls and not for others, whose gradients could not be told apart.
        """
        self._began.seen_here()
        self._watch_parameters()
        if self._is_off is None:
            self._is_off = is_own
        elif self._is_off is not is_own:
            raise RefusalError(
                "precision",
                f"the loop calls {self._name} both under autocast of its own and without: --fp16 scales gradients of all calls "
                "or of none",
                "leave autocast out of the loop, or use --bf16",
            )

    def entered(self, leaf: Any) -> Any:
        """Return an argument of a call, by which gradients leave it unscaled."""
        return self._scaled(leaf, enters=True)

    def left(self, leaf: Any) -> Any:
        """Return an output of a call, by which gradients enter it scaled; rules 2 and 3 see to a leaf that it has made."""
        is_leaf = type(leaf) is torch.Tensor and leaf.is_leaf
        return leaf if is_leaf else self._scaled(leaf, enters=False)

    def _scaled(self, leaf: Any, *, enters: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, LazyTensor):
            return leaf.with_gradient(lambda tensor: self._scaled(tensor, enters=enters))
        return _ScaledGradient.apply(leaf, self, enters) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]

    @property
    def factor(self) -> float:
        """Return what gradients within calls are multiplied by in the backward pass under way."""
        return 1.0 if self._is_unscaled else self.scale

    @contextmanager
    def _scaled_past_calls(self, roots: Sequence[Any], inputs: Sequence[Any] | None) -> Iterator[None]:
        """Scale, during a backward pass, what reaches parameters past the model's calls.

        Args:
            roots: what it begins with.
            inputs: whose gradients go to the loop; None where they go to leaves.

        Raises:
            RefusalError: a node gets gradients both with the scale and without it.
        """
        if self._is_off:
            yield
            return
        within = torch._C._current_autograd_node() if is_in_backward() else None
        if within is not None and not any(id(within) in nodes for nodes in self._outside):
            yield  # a pass in the middle of a call, whose gradients are scaled
            return
        if inputs is not None:
            with self._unscaled():
                yield
            if within is None:
                self._look_at_update_by_hand(())
            return
        past, calls, inside, leaves = _walk([*map(_node_of, roots)], self, self._began)
        own = [each for ref in self._parameters.values() if (each := ref()) is not None]
        # a leaf that stands in for a parameter shares its attributes, and its gradient goes on to it
        known = {id(vars(each)) for each in own}
        found = {key: leaf for key, leaf in leaves.items() if id(vars(leaf)) not in known}
        hooked = found.keys() | {*map(id, own)}
        ends = {key: places for key, node in past.items() if (places := _places(node, hooked))}
        if ends and past.keys() & inside.keys():
            self._refuse_both_ways()
            with self._unscaled():
                yield
            return
        hooks = [past[key].register_hook(partial(_multiplied, places, self.scale)) for key, places in ends.items()]
        hooks += map(self._unscaled_first, found.values())
        self._outside.append(past | calls)
        try:
            yield
        finally:
            self._outside.pop()
            for hook in hooks:
                hook.remove()
        if within is None:
            self._look_at_update_by_hand(found.values())

    @contextmanager
    def _unscaled(self) -> Iterator[None]:
        before, self._is_unscaled = self._is_unscaled, True
        try:
            yield
        finally:
            self._is_unscaled = before

    def _look_at_update_by_hand(self, found: Iterable[torch.Tensor]) -> None:
        workload = self._workload()
        if workload is not None and not workload.optimizers and self.skips_step():
            self._without_update(found)

    def _without_update(self, found: Iterable[torch.Tensor]) -> None:
        """Have an update by hand change nothing. Raises `RefusalError`: gradients are handed over elsewhere than in the parameters."""
        leaves = [*(each for ref in self._parameters.values() if (each := ref()) is not None), *found]
        gradients = [each.grad for each in leaves if each.grad is not None]
        if not gradients:
            raise RefusalError(
                "precision",
                f"gradients of {self._name} are not finite under --fp16, and no optimizer updates it whose step could be skipped",
                "use --bf16, or train it with one of torch.optim",
            )
        for gradient in gradients:
            gradient.zero_()
        self._note("gradients were not finite: they were set to zero, as no optimizer's step could be skipped")

    def _refuse_both_ways(self) -> None:
        refusal = RefusalError(
            "precision",
            f"the loss goes through a call of {self._name} by its output and past it as well (by a gradient of a gradient, or by a "
            "tensor that the call leaves elsewhere): --fp16 scales the one and not the other",
            "use --bf16",
        )
        if not self._withdraw(refusal):
            raise refusal

    def _unscale(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        # none for a parameter that a call has not used; several at once are the loop's own, which are not scaled
        if self._is_off or gradient is None or are_batched([gradient]):
            return gradient
        true_gradient = gradient / self.factor
        # the sum of a gradient is finite when all of it is: one cheap pass, read at the step
        self._sums.append(true_gradient.detach().sum())
        return true_gradient

    def skips_step(self) -> bool:
        """Return whether a gradient since the last step was inf or nan; adapts the scale (waits for the device).

        Several optimizers of one model ask in turn; the later ones get the answer of the first.
        """
        sums, self._sums[:] = list(self._sums), []
        if sums:
            self._last_were_bad = not all(map(_all_finite, _by_device(sums)))
            self._update()
        return self._last_were_bad

    def _update(self) -> None:
        """Halve the scale after bad gradients, double it after 2000 good steps."""
        self._good_steps = 0 if self._last_were_bad else self._good_steps + 1
        if self._last_were_bad:
            self.scale = max(self.scale / 2, 1.0)
        elif self._good_steps == _GROWTH_STEPS:
            self.scale, self._good_steps = self.scale * 2, 0


def _by_device(scalars: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of parameters that rest on the host may be there."""
    devices = dict.fromkeys(scalar.device for scalar in scalars)
    return [[scalar for scalar in scalars if scalar.device == device] for device in devices]


def _all_finite(scalars: list[torch.Tensor]) -> bool:
    return bool(torch.stack(scalars).isfinite().all())


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a scale, or divided by it where the tensor enters a call."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: LossScale, enters: bool) -> torch.Tensor:
        ctx.scale, ctx.enters = scale, enters
        return tensor.detach()  # no view: the loop may write to an output in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        factor = ctx.scale.factor
        return gradients[0] * (1 / factor if ctx.enters else factor), None, None


def _multiplied(places: frozenset[int], scale: float, gradients: Sequence[Any], _outer: Any) -> tuple[Any, ...]:
    """A hook of a node: some of its gradients, scaled."""
    return tuple(
        gradient * scale if place in places and gradient is not None else gradient
        for place, gradient in enumerate(gradients)
    )


def _node_of(root: Any) -> Any:
    return root.grad_fn if isinstance(root, torch.Tensor) else root.node


def _places(node: Any, leaves: Collection[int]) -> frozenset[int]:
    """Return which gradients of a node go to leaves directly."""
    return frozenset(
        place
        for place, (following, _) in enumerate(node.next_functions)
        if id(getattr(following, "variable", None)) in leaves
    )


def _walk(
    roots: Sequence[Any], scale: LossScale, began: Beginning
) -> tuple[_Nodes, _Nodes, _Nodes, dict[int, torch.Tensor]]:
    """Walk a graph.

    Args:
        roots: where to begin.
        scale: whose calls are meant; those of another model have a scale of their own, and so have those of an earlier plan.
        began: when calls began to be scaled.

    Returns:
        Nodes outside of calls, memlab's own functions, which stand around calls, nodes inside of calls, and leaves that these
        reach.
    """
    outside: _Nodes = {}
    calls: _Nodes = {}
    inside: _Nodes = {}
    leaves: dict[int, torch.Tensor] = {}
    waiting = [(node, False) for node in roots]
    while waiting:
        node, is_inside = waiting.pop()
        met = inside if is_inside else outside
        if node is None or id(node) in met or id(node) in calls:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            if is_inside:
                leaves[id(leaf)] = leaf
            continue
        function = getattr(type(node), "_forward_cls", None)
        if function is _ScaledGradient and node.scale is scale:
            calls[id(node)] = node
            is_inside = not node.enters
        elif function is not None and is_ours(function) and not (is_inside or began.is_after(node)):
            calls[id(node)] = node
        else:
            met[id(node)] = node
        waiting += [(following, is_inside) for following, _ in node.next_functions]
    return outside, calls, inside, leaves
