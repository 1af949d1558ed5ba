"""`Differentiation`: a backward pass that the loop runs, and what the loop asks for its gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memlab.rescue.guard import GuardedCall, before_others
from memlab.runtime.callers import for_asker

# torch's functions that run a backward pass, and what they call the tensors where it begins
DIFFERENTIATING: Mapping[Any, str] = {
    torch.Tensor.backward: "self",
    torch.autograd.backward: "tensors",
    torch.autograd.grad: "outputs",
}
ASKING = frozenset({"register_hook", "retain_grad"})  # for gradients of a tensor


class Called:
    """A function of torch that the loop calls, and how that ended: other errors are memlab's own."""

    __slots__ = ("error_id", "func", "result")

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.error_id = 0  # of its last error, which would keep alive what its frames hold
        self.result: tuple[Any, ...] = ()  # what it returned, if it did

    @for_asker
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.result = ()
        try:
            result = self.func(*args, **kwargs)
        except BaseException as error:
            self.error_id = id(error)
            raise
        self.result = (result,)
        return result


@dataclass(frozen=True)
class Differentiation:
    """A call of one of torch's functions that run a backward pass."""

    called: Called
    bound: inspect.BoundArguments

    @classmethod
    def of(cls, called: Called, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Differentiation:
        bound = _signature(called.func).bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(called, bound)

    @property
    def roots(self) -> list[torch.Tensor]:
        roots = self.bound.arguments[DIFFERENTIATING[self.called.func]]
        everything = [roots] if isinstance(roots, torch.Tensor) else roots
        return [tensor for tensor in everything if isinstance(tensor, torch.Tensor)]

    @property
    def accumulates(self) -> bool:
        return self.called.func is not torch.autograd.grad

    @property
    def keeps(self) -> bool:
        """Return whether the loop wants to keep its graph."""
        kept = self.bound.arguments["retain_graph"]
        return bool(self.bound.arguments["create_graph"] if kept is None else kept)

    def run_of(self, from_nodes: Mapping[Any, list[Any]]) -> Iterable[Any]:
        """The nodes that a pass runs: all of them, but those alone that lead to inputs where some are named."""
        if self.accumulates:
            return from_nodes
        inputs = self.bound.arguments["inputs"]
        named = [inputs] if isinstance(inputs, torch.Tensor) else [one for one in inputs if one.requires_grad]
        waiting, run = [torch.autograd.graph.get_gradient_edge(one).node for one in named], set()
        while waiting:
            node = waiting.pop()
            if node in from_nodes and node not in run:
                run.add(node)
                waiting += [above for above in from_nodes[node] if above is not None]
        return run

    @property
    def can_repeat(self) -> bool:
        has_inputs = self.accumulates and self.bound.arguments["inputs"] is not None
        return not (has_inputs or self.bound.arguments["create_graph"])

    def before_others(self) -> dict[int, tuple[GuardedCall, int]]:
        """Places among inputs of outputs that others of their call are computed from."""
        inputs = self.bound.arguments["inputs"]
        if self.accumulates or isinstance(inputs, torch.Tensor):
            inputs = () if self.accumulates else (inputs,)
        found = {i: before_others(each) for i, each in enumerate(inputs) if isinstance(each, torch.Tensor)}
        return {i: each for i, each in found.items() if each is not None}

    def run_through(self, asked: Mapping[int, tuple[GuardedCall, int]]) -> Any:
        """Run `torch.autograd.grad` with calls whose outputs are among the inputs; their whole gradients are known within."""
        inputs = self.bound.arguments["inputs"]
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
        whole: dict[int, torch.Tensor] = {}
        handles = [
            call.hook(number, functools.partial(whole.__setitem__, i), by="autograd.grad")
            for i, (call, number) in asked.items()
        ]
        # torch runs a call only where gradients of what is before it are asked for as well
        weights = [call.weight for call, _ in asked.values()]
        try:
            # what is before the outputs keeps its graph, as torch would not come to it
            found = self.run(keep=True, inputs=[*inputs, *weights], allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        gradients = [whole.get(i, gradient) for i, gradient in enumerate(found[: len(inputs)])]
        if not self.bound.arguments["allow_unused"] and any(gradient is None for gradient in gradients):
            return self.run(keep=True)  # torch's own error
        return tuple(gradients)

    def run(self, *, keep: bool, **others: Any) -> Any:
        arguments = {**self.bound.arguments, "retain_graph": keep, **others}
        changed = inspect.BoundArguments(self.bound.signature, arguments)
        return self.called(*changed.args, **changed.kwargs)


@functools.cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


@contextmanager
def set_aside(leaves: list[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Gradients that are there already wait until the new ones are complete; yields what starts over."""
    before = [(leaf, leaf.grad) for leaf in leaves]

    def start_over() -> None:
        for leaf in leaves:
            leaf.grad = None

    start_over()
    try:
        yield start_over
    finally:
        for leaf, gradient in before:
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else gradient.add_(leaf.grad)


def hook_within(tensor: torch.Tensor, call: GuardedCall, number: int, name: str, *hook: Callable[..., Any]) -> Any:
    """Hook an output that others of its call are computed from, within the call."""
    if name == "register_hook":
        return call.hook(number, *hook)
    if not tensor.retains_grad:
        call.retain(number, tensor)
    return None
