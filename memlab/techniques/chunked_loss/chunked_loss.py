"""`ChunkedLoss`: losses over a large vocabulary, tile by tile.

Gradients are those of the plain losses (tested at 2e-6 relative in fp32).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.runtime.dispatch import makes_one_graph
from memlab.runtime.graphs import why_as_written
from memlab.runtime.lazy import LazyTensor, Waiting, may_be_read, real
from memlab.runtime.loop_reading import made_one_graph
from memlab.runtime.mechanisms import LoopChecks, Updating
from memlab.runtime.stand_ins import method_of, own_attributes, stand_in
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, Reduces, Technique, Traits
from memlab.techniques.chunked_loss.deferred import DeferredLogits
from memlab.techniques.chunked_loss.tiles import in_tiles

_SMALLEST_VOCABULARY = 2048


class ChunkedLoss(Technique, Updating, LoopChecks):
    """Compute losses of a large-vocabulary head in tiles.

    Known limitations: operations that `deferred` does not know (a transpose, a product with a tensor, a mask written into them)
    compute the full logits.
    """

    field = "loss"
    traits = Traits(Reduces.ACTIVATIONS, needs_uncompiled=True)
    descriptions = (
        Description(
            flags="--chunk-loss",
            saves="the logits over the vocabulary, and their gradient",
            costs="gradients of the head are made in the forward pass, tile by tile; losses beyond plain cross-entropy compute the logits twice",
            exactness="same gradient (≤ 2e-6 relative in fp32)",
            gives_nothing="the peak is not in the loss; refused for fewer than 2048 classes",
        ),
    )

    def check(self, workload: Workload) -> None:
        if large_heads(workload.model):
            return
        reason = f"{workload.name} has no linear layer onto {_SMALLEST_VOCABULARY} or more classes"
        if heads := _large(workload.model):
            kind = type(heads[0]).__name__
            reason = (
                f"the layer of {workload.name} onto {heads[0].out_features} classes, a {kind}, has a forward of its own"
            )
        raise RefusalError(self.field, reason, "use --accumulate N, which divides the logits as well")

    def check_loop(self, workload: Workload, frame: FrameType) -> None:
        # one that calls the model itself gets logits that are computed
        if name := made_one_graph(frame, workload.model, calls_it=False):
            raise RefusalError(
                self.field,
                f"the loop calls {name}, of which torch.compile makes one graph (fullgraph=True), and which takes no logits that are "
                "not computed",
                "compile it without fullgraph, or use --accumulate N",
            )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._waiting = Waiting()
        self._has_deferred = False  # in the step under way
        self.in_tiles_before = in_tiles.count

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        for head in large_heads(workload.model):
            stand_in(head, "forward", _deferring(head, self._deferred), undo)

    def _deferred(self, logits: DeferredLogits) -> None:
        self._waiting.add(logits)
        self._has_deferred = True

    def step_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._compute_waiting()

    def bucket_coming(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._compute_waiting()  # an update in the backward pass, or after a closure

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        _expire(self._waiting.taken())
        if self._has_deferred and in_tiles.count == self.in_tiles_before:
            self.notes.once(_NO_EFFECT)
        self._has_deferred, self.in_tiles_before = False, in_tiles.count

    def _compute_waiting(self) -> None:
        """Compute, before an update, logits that the loop may look at when the weights they came from are gone."""
        for ref in self._waiting.taken():
            if may_be_read([ref]):
                real(ref())
            else:
                _expire([ref])


def _expire(waiting: Sequence[weakref.ref[LazyTensor]]) -> None:
    for ref in waiting:
        if (logits := ref()) is not None:
            logits.expire(_TOO_LATE)


_NO_EFFECT = (
    "--chunk-loss had no effect: the loss takes the logits through an operation that needs all of them at once; "
    "use --accumulate N, which divides the logits as well"
)
_TOO_LATE = (
    "logits of a chunked loss were read after optimizer.step(), when their weights were gone: read them before the step, "
    "or leave --chunk-loss out"
)


def large_heads(model: nn.Module) -> list[nn.Linear]:
    """Linear layers onto a vocabulary that compute their product and nothing else."""
    return [head for head in _large(model) if _is_plain(head)]


def _large(model: nn.Module) -> list[nn.Linear]:
    """Layers onto a vocabulary: the output embeddings, or layers with many more outputs than inputs."""
    find: Any = getattr(model, "get_output_embeddings", None)
    named = find() if find is not None else None
    heads = [named] if isinstance(named, nn.Linear) else _widening_layers(model)
    return [head for head in heads if head.out_features >= _SMALLEST_VOCABULARY]


def _is_plain(head: nn.Linear) -> bool:
    """Return whether neither a head's class nor the user has given it another forward."""
    return type(head).forward is nn.Linear.forward and "forward" not in own_attributes(head)


def _widening_layers(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features > 4 * m.in_features]


def _deferring(head: nn.Linear, made: Callable[[DeferredLogits], None]) -> Callable[[torch.Tensor], Any]:
    original, product = method_of(head, "forward"), type(head).forward

    @functools.wraps(original)
    def deferring(hidden: torch.Tensor) -> Any:
        is_derived = head.training and torch.is_grad_enabled() and not why_as_written()
        is_in_graph = torch.compiler.is_compiling() and makes_one_graph()
        if not is_derived or is_in_graph or type(head).forward is not product:
            return original(hidden)
        logits = DeferredLogits.of(hidden, head)
        made(logits)
        return logits

    return deferring
