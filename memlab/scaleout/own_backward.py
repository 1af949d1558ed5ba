"""Backward passes that an engine cannot run: the user's own modules run the call once more for them.

An engine hands gradients over in one kind of backward pass: every parameter gets its gradient, once, without a graph. The loop
may ask for something else (``torch.autograd.grad``, ``backward(inputs=...)``, ``create_graph=True``, and with some engines
a pass through two calls), or the engine has ended since the call. Between the engine's outputs and the loop stands a node
that also leads to the user's parameters and to the inputs. In a pass of the first kind it hands gradients on to the engine's
graph. In any other the call is run again on the user's modules, from the state it began with, and the gradients are those of
that graph.

The engine's graph is apart from the loop's, as engines break where autograd comes by without gradients. Where hooks or
attributes keep tensors of that graph, it is part of the loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from memlab.errors import RefusalError
from memlab.rescue.outputs import Path, at, differentiable, replaced
from memlab.runtime.autocast import CallContext
from memlab.runtime.backward import is_added
from memlab.runtime.fingerprints import Fingerprint, are_others, fingerprints, other_results
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.model_state import State

Gradients = Sequence[torch.Tensor | None]
_Call = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Sequence[str]]]


class OwnBackward:
    """A training call under an engine, as the user's own modules can repeat it."""

    def __init__(
        self,
        model: nn.Module,
        own: Callable[..., Any],  # the call without the engine
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        device: torch.device,  # of the inputs
        is_apart: bool,  # whether the engine's graph is no part of the loop's
        updates: Callable[[], int],  # done so far
        age: Callable[[], object],  # another one, once the engine no longer runs backward passes of calls from before
    ) -> None:
        self._model, self._own, self._device = model, own, device
        self._leaves, self._spec = tree_flatten((args, dict(kwargs)))
        self._is_apart, self._updates, self._age = is_apart, updates, age
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._inputs = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self._inner_inputs: list[torch.Tensor] = []
        # its gradient is added in the passes that add one to every leaf
        self._leaf = torch.zeros((), requires_grad=True, device=device)
        self._sources = [*self._inputs, *self._parameters.values(), self._leaf]
        self._context = CallContext()
        self._state = State.of_model(model, device, self._leaves)
        self._began, self._age_then = self._now(), age()
        self._paths: list[Path] = []
        self._gave: dict[Path, Fingerprint] = {}
        self._graph: list[torch.Tensor] = []  # the engine's outputs, where they are apart
        self.waits = True  # for its backward pass

    def run(self, call: _Call) -> Any:
        """Have the engine run the call, and return the output behind the node.

        The call gives the output, and the names of attributes in which the model has kept tensors with a graph.
        """
        leaves = self._leaves
        if self._is_apart:
            self._inner_inputs = [tensor.detach().requires_grad_() for tensor in self._inputs]
            inner = {id(tensor): other for tensor, other in zip(self._inputs, self._inner_inputs, strict=True)}
            leaves = [inner.get(id(leaf), leaf) for leaf in leaves]
        output, kept = call(*tree_unflatten(leaves, self._spec))
        if kept and self._inner_inputs:
            raise RefusalError(
                "scale",
                f"the model keeps {kept[0]} with its graph, and inputs require gradients: an engine runs one backward pass "
                "through a call",
                "train without --scale",
            )
        graph = differentiable(output)
        if not graph:
            return output
        self._paths, self._gave = list(graph), fingerprints(graph)
        self._is_apart = self._is_apart and not kept
        self._graph = [*graph.values()] if self._is_apart else []
        inner_outputs = [] if self._is_apart else [*graph.values()]
        values = _Between.apply(self, tuple(t.detach() for t in graph.values()), *inner_outputs, *self._sources)  # type: ignore[no-untyped-call]
        return replaced(output, dict(zip(self._paths, values, strict=True)))

    def gradients(self, outer: Gradients, leaf: Any) -> Gradients:
        """Gradients from those of the outputs: of the engine's outputs where its graph is not apart, inputs and parameters.

        `leaf` is the node that adds the gradient of the leaf that is here for it.
        """
        self.waits = False
        nothing = [None] * len(self._sources)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        is_engines = not torch.is_grad_enabled() and is_added(leaf) and self._age() == self._age_then
        if self._is_apart:
            if is_engines and not keeps:
                return [*self._apart(outer), *nothing[len(self._inputs) :]]
            return self._again(outer)
        return [*outer, *nothing] if is_engines else [*[None] * len(outer), *self._again(outer)]

    def _apart(self, outer: Gradients) -> Gradients:
        graph, self._graph = self._graph, []
        if not graph:
            raise RuntimeError("Trying to backward through the graph a second time: specify retain_graph=True")
        wanted = [(tensor, g) for tensor, g in zip(graph, outer, strict=True) if g is not None]
        del graph
        edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor, _ in wanted]
        torch.autograd.backward(edges, [g for _, g in wanted])
        return [tensor.grad for tensor in self._inner_inputs]

    def _again(self, outer: Gradients) -> Gradients:
        """Gradients of inputs and parameters from another run; with a graph under ``create_graph=True``."""
        if self._began != self._now():
            raise RuntimeError(
                "memlab cannot run this model call again: its inputs or the weights were changed in place between "
                "forward and backward"
            )
        # views, whose gradients are not handed to hooks of the loop's tensors
        with torch.enable_grad():
            views = {id(tensor): tensor.view_as(tensor) for tensor in self._inputs}
        args, kwargs = tree_unflatten([views.get(id(leaf), leaf) for leaf in self._leaves], self._spec)
        # an engine may keep weights elsewhere
        weights = {name: p.to(self._device) for name, p in self._parameters.items() if p.device != self._device}
        as_then = (
            deferred_interrupts(),
            self._state.again(with_graphs=True),
            self._context.entered(),
            torch.enable_grad(),
        )
        with ExitStack() as contexts:
            for context in (*as_then, _reparametrize_module(self._model, weights)):
                contexts.enter_context(context)
            made = at(self._own(*args, **kwargs), self._paths)
        wanted = {path: g for path, g in zip(self._paths, outer, strict=True) if g is not None}
        if are_others({path: self._gave[path] for path in wanted if path in self._gave}, made):
            raise other_results("scale", type(self._model).__name__, "train without --scale")
        return torch.autograd.grad(
            [made[path] for path in wanted], [views.get(id(each), each) for each in self._sources], [*wanted.values()],
            create_graph=torch.is_grad_enabled(), allow_unused=True,
        )  # fmt: skip

    def _now(self) -> list[int]:
        tensors = [*self._leaves, *self._parameters.values()]
        return [self._updates(), *(t._version for t in tensors if isinstance(t, torch.Tensor) and not t.is_inference())]


class _Between(torch.autograd.Function):
    """The node between an engine's graph and the loop's."""

    @staticmethod
    def forward(ctx: Any, call: OwnBackward, values: tuple[torch.Tensor, ...], *_tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.call.gradients(gradients, ctx.next_functions[-1][0]))
