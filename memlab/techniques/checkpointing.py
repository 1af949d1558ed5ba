"""Activation checkpointing of a model's repeated blocks, on and off on a live model.

Each chosen block's forward is replaced by one that runs it under
`torch.utils.checkpoint.checkpoint(use_reentrant=False)`, which keeps RNG and autocast state for the
recomputation. Frameworks' own switches are not used: Transformers' enable/disable pair leaves an
embedding hook behind at each round.

With a budget, the first training forward of a batch's shape recomputes every block, and runs each once more to see
what it would keep; from the next forward on, those that the `_budget` chose are recomputed.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.seams import stand_in
from memlab.techniques._budget import Budget
from memlab.techniques._modules import repeated_blocks, without_cache
from memlab.techniques._recomputation import Recomputation
from memlab.techniques.base import ModelCall, Technique
from memlab.techniques.description import Description
from memlab.workload import Workload

_aten = torch.ops.aten
# results worth keeping: products of matrices, and attention, which is the costliest to redo
_SAVED_OPERATIONS = frozenset(
    overload
    for packet in (
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
    )
    for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
)


class Checkpointing(Technique):
    """Recompute the activations of repeated blocks in the backward pass.

    Known limitations: blocks must be deterministic under the same RNG state; BatchNorm inside a
    block would update its running statistics twice and is refused.
    """

    field = "checkpointing"
    changes_modules = True
    descriptions = (
        Description(
            flags="--checkpoint",
            saves="activations of all repeated blocks but one, which leave their inputs",
            costs="one more forward pass of the blocks",
            exactness="same gradient, dropout included",
            gives_nothing="the peak is in the loss or in the optimizer step; refused where no block repeats and for blocks with BatchNorm",
        ),
        Description(
            flags="--checkpoint every:N",
            saves="the same, of one block in N",
            costs="the same ÷ N",
            exactness="same gradient, dropout included",
            gives_nothing="as above",
        ),
        Description(
            flags="--checkpoint selective",
            saves="results that are cheap to compute again; those of matrix products and attention stay",
            costs="norms, activations and masks once more",
            exactness="same gradient, dropout included",
            gives_nothing="as above",
        ),
        Description(
            flags="--checkpoint budget:SIZE",
            saves="what blocks keep of a micro-batch: at most SIZE",
            costs="the least recomputation that does",
            exactness="same gradient, dropout included",
            gives_nothing="SIZE is more than the blocks keep anyway; refused where recomputing all of them is not enough",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._model: nn.Module | None = None
        self._budget: Budget | None = None
        self.learns_from_calls = plan.budget_bytes is not None

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        # tiles lie below: a block may be what is tiled, and keeps another number of bytes under it, as in another precision
        return plan.checkpointing, plan.tiling, plan.precision if plan.budget_bytes is not None else None

    def check(self, workload: Workload) -> None:
        blocks = self._chosen(workload.model)
        if not blocks:
            raise RefusalError(
                self.field,
                f"{workload.name} repeats no block (a ModuleList or Sequential with several modules of one class)",
                "use --accumulate N to hold fewer activations at a time",
            )
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for block in blocks for part in block.modules()):
            raise RefusalError(
                self.field,
                f"blocks of {workload.name} hold BatchNorm, whose running statistics would be updated twice a step",
                "use --offload activations, which recomputes nothing",
            )
        if any(getattr(block, "gradient_checkpointing", False) for block in blocks):
            raise RefusalError(
                self.field,
                f"{workload.name} already checkpoints its blocks by its own switch",
                "call model.gradient_checkpointing_disable() first to let memlab do it",
            )

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._model = workload.model
        undo.callback(setattr, self, "_model", None)
        if self.plan.budget_bytes is not None:
            self._budget = Budget(self.plan.budget_bytes, workload.name)
            undo.callback(setattr, self, "_budget", None)
        for block in self._chosen(workload.model):
            stand_in(block, "forward", self._checkpointed(block), undo)

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._model is not None
        options = without_cache(self._model, kwargs)
        if self._budget is None:
            return call(*args, **options)
        with self._budget.applied(args, options) as budget:
            output = call(*args, **options)
        self.notes = budget.notes
        return output

    def _chosen(self, model: nn.Module) -> list[nn.Module]:
        kind, _, every = str(self.plan.checkpointing).partition(":")
        return repeated_blocks(model)[:: int(every) if kind == "every" else 1]

    def _checkpointed(self, block: nn.Module) -> Callable[..., Any]:
        original = block.forward
        selective = self.plan.checkpointing == "selective"
        contexts = functools.partial(_contexts, block, selective=selective)

        @functools.wraps(original)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not (block.training and torch.is_grad_enabled()):
                return original(*args, **kwargs)
            if self._budget is not None and not self._budget.recomputes(block, original, args, kwargs):
                return original(*args, **kwargs)
            return checkpoint(original, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        return checkpointed


def _contexts(block: nn.Module, *, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What surrounds a block's forward, and its recomputation."""
    forward, recomputation = _selective_contexts() if selective else (nullcontext(), nullcontext())
    return forward, Recomputation(block, recomputation)


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]] = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        _keep_products
    )
    return contexts


def _keep_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
