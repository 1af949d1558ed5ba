"""Relations of a call's outputs by its autograd graph, and calls of which no other graph can be made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointFunction

from memlab.errors import RefusalError
from memlab.runtime.reach import is_of_library
from memlab.runtime.stand_ins import is_ours

# torch's own words, for what is saved by hooks
CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"
_Key = TypeVar("_Key", bound=Hashable)


def before(outputs: Mapping[_Key, Any]) -> dict[_Key, tuple[_Key, ...]]:
    """Name the outputs that an output is computed from, for those that are.

    Args:
        outputs: gradient edges of tensors with a graph, by any key.

    Example:
        >>> latent = torch.ones(2, requires_grad=True) * 2
        >>> made = {"latent": latent, "image": latent.exp(), "loss": latent.exp().sum()}
        >>> before({name: torch.autograd.graph.get_gradient_edge(tensor) for name, tensor in made.items()})
        {'image': ('latent',), 'loss': ('latent',)}
    """
    keys = {(edge.node, edge.output_nr): key for key, edge in outputs.items()}
    found: dict[_Key, tuple[_Key, ...]] = {}
    for key, edge in outputs.items() if len(keys) > 1 else ():
        waiting, seen = [edge.node], set()
        met: dict[_Key, None] = {}
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                met.update({keys[each]: None for each in node.next_functions if each in keys})
                waiting += [following for following, _ in node.next_functions if following is not None]
        if met:
            found[key] = tuple(met)
    return found


def sequence_nr() -> int:
    """Return the number that torch gives to the next operator of this thread that has a graph."""
    return torch._C._autograd._get_sequence_nr()


class Beginning:
    """A moment that nodes of a graph are older than, or not, by the number that torch gives them in their thread.

    Nodes of another thread are counted apart: from the moment on that one is seen, none is told to be older.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._here.is_same = True
        self._number = sequence_nr()

    def seen_here(self) -> None:
        """Note that this thread makes nodes, or goes through them."""
        if not hasattr(self._here, "is_same"):
            self._number = 0

    def is_after(self, node: Any) -> bool:
        """Return whether a node is older."""
        return bool(node._sequence_nr() < self._number)


def reaches_before(tensors: Iterable[torch.Tensor], began: int) -> bool:
    """Return whether tensors are computed from one that this thread had computed before, by the number of its operator.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> cached, began = weight.exp(), sequence_nr()
        >>> reaches_before([weight * 2], began), reaches_before([weight * cached], began)
        (False, True)
    """
    return any(node._sequence_nr() < began for node in nodes_of(tensors))


def nodes_of(roots: Iterable[Any], *, but: Any = None) -> set[Any]:
    """Return the nodes of the graph of some tensors or gradient edges; without one, and what is reached by it alone."""
    waiting: list[Any] = [_end(root)[0] for root in roots]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node is not but and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def uses_of(node: Any, roots: Iterable[Any]) -> set[int]:
    """Return the numbers of the outputs of a node that some tensors or gradient edges are, or are computed from."""
    roots = [*roots]
    found = {number for end, number in map(_end, roots) if end is node}
    others = nodes_of(roots, but=node)
    return found | {number for each in others for following, number in each.next_functions if following is node}


def _end(root: Any) -> tuple[Any, int]:
    """Return the node and the number of its output that a backward pass begins with."""
    return (root.grad_fn, root.output_nr) if isinstance(root, torch.Tensor) else (root.node, root.output_nr)


@dataclass(frozen=True)
class Asking:
    """A hook on a tensor, in place of which the loop has called another function of torch's."""

    hook: Callable[..., Any]
    by: str  # the name of that function

    def __call__(self, gradient: torch.Tensor) -> Any:
        return self.hook(gradient)


def asks_for_gradient(tensor: torch.Tensor, inputs: Sequence[Any] | None = None) -> str:
    """Return the function by which the loop asks for the gradient of a tensor; empty where it does not.

    Args:
        tensor: an output of a call.
        inputs: what `torch.autograd.grad` is asked for in the pass that begins; None where it is another function.
    """
    if any(each is tensor for each in inputs or ()):
        return "autograd.grad"
    if tensor.retains_grad:
        return "retain_grad"
    hooks = (tensor._backward_hooks or {}).values()
    return next((hook.by if isinstance(hook, Asking) else "register_hook" for hook in hooks), "")


def leaves_of(roots: Iterable[Any]) -> list[torch.Tensor]:
    """Return the leaves that a backward pass from some tensors or gradient edges gives gradients to.

    Example:
        >>> weight, rows = torch.ones(2, requires_grad=True), torch.ones(2)
        >>> [leaf is weight for leaf in leaves_of([weight * rows])]
        [True]
    """
    found = [*roots]
    ends = (getattr(node, "variable", None) for node in nodes_of(found))
    alone = (each for each in found if isinstance(each, torch.Tensor) and each.grad_fn is None)
    return [*(each for each in ends if each is not None), *alone]


def runs_code_of_the_users(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a backward pass through the graph of some tensors runs Python code that is no well-known library's.

    Hooks on tensors are not among what a graph tells.
    """
    nodes = nodes_of(tensors)
    # what that recomputes is the user's
    return bool(functions_of_users(nodes)) or any(
        getattr(type(node), "_forward_cls", None) is CheckpointFunction for node in nodes
    )


def functions_of_users(nodes: Iterable[Any]) -> list[str]:
    """Return names of the `torch.autograd.Function` classes among the nodes of a graph that are no well-known library's."""
    functions = (getattr(type(node), "_forward_cls", None) for node in nodes)
    return [each.__name__ for each in functions if each is not None and not is_of_library(each.__module__)]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient. What stands in its place for a call (`functional_call`) has none, and torch warns who asks."""
    return parameter.grad if parameter.is_leaf else None


def is_transformed() -> bool:
    """Return whether the thread is within a transform of torch.func: tensors made there may have no storage."""
    return torch._C._are_functorch_transforms_active()


def why_as_written() -> str:
    """Return where the thread is, in words, if a model call there can be run in no other way than it is written; else nothing.

    Example:
        >>> with forward_ad.dual_level():
        ...     why_as_written()
        'under forward-mode differentiation'
        >>> why_as_written()
        ''
    """
    if torch.compiler.is_compiling():  # which takes transforms apart itself, and cannot look at what follows
        return ""
    if is_transformed():
        return "inside of torch.func transforms"
    if forward_ad._current_level >= 0:
        return "under forward-mode differentiation"
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return "where hooks on saved tensors are disabled"
    return ""


def hooks_on_saved_tensors() -> Any:
    """Return those in force, by which functions pack and unpack what they save; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def are_saved_by_hooks_of_the_loop() -> bool:
    """Return whether hooks that are not memlab's pack what functions save: those of `save_on_cpu`, of checkpoints, of the loop."""
    hooks = hooks_on_saved_tensors()
    return hooks is not None and not is_ours(hooks[0])


def is_within_checkpoint() -> bool:
    """Return whether the hooks on saved tensors in force are those of torch's checkpoint, which count what a run saves."""
    hooks = hooks_on_saved_tensors()
    return hooks is not None and getattr(hooks[0], "__module__", None) == CheckpointFunction.__module__


def refuse_within_checkpoint(field: str, name: str) -> None:
    """Raise `RefusalError` where the loop calls a model within torch's own checkpointing."""
    if is_within_checkpoint():
        raise RefusalError(
            field,
            f"{name} is called within torch.utils.checkpoint, which counts what one run saves",
            "use --checkpoint in place of that",
        )


def repeatable_hooks() -> AbstractContextManager[Any]:
    """Return a context with the hooks on saved tensors that are in force now, but for those of a checkpoint."""
    hooks = hooks_on_saved_tensors()
    if hooks is None or is_within_checkpoint():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(*hooks)


def are_batched(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Return whether gradients are those of several backward passes at once (`torch.autograd.grad(..., is_grads_batched=True)`)."""
    kinds = torch._C._functorch.is_legacy_batchedtensor, torch._C._functorch.is_batchedtensor
    return any(is_kind(each) for each in gradients if each is not None for is_kind in kinds)
