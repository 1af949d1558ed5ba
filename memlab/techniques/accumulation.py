"""Gradient accumulation that the loop does not see: the model call splits its own batch.

Numbered rules of the mechanism:

1. The call is split into micro-batches along the batch dimension. Each runs on *aliases* of the
   parameters, leaves that share their storage, so that its gradients gather beside the user's own
   and no hook of the user's (or of DDP's) fires before the sum is complete.
2. *Fused form*, when the model returns its loss: forward and backward of each micro-batch run at
   once inside one autograd function, each loss weighted by its share of the batch's loss. The
   loop's ``loss.backward()`` then only scales the gathered gradients and hands them over.
3. *Replay form*, when the loop computes the loss from the outputs: outputs are computed without
   gradients (the last micro-batch keeps its graph), the loop's loss gives their gradient, and the
   backward pass runs each micro-batch again under its saved random state. Exact for any loss.
4. Outputs beside the loss are joined. If the loop derives gradients from them after all, they come
   by replay. Large ones are computed only when looked at.
5. Under a loop's own fp16 autocast the inner backward is scaled by the factor the loop's scaler
   used last, because the loop's own scaling comes too late for it.

Gradients agree with the unsplit batch to rounding (tested at 1e-6 relative in fp32); with dropout,
with a hand-written accumulation loop under the same random state.

Source of the replay form: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", https://arxiv.org/abs/2101.06983
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.techniques._micro import Learnt, MicroRun
from memlab.techniques._modules import without_cache
from memlab.techniques._probe import Probe
from memlab.techniques._split import Call, row_ranges
from memlab.techniques.base import ModelCall, Technique
from memlab.techniques.description import Description
from memlab.workload import Workload


class Accumulation(Technique):
    """Split every training batch into micro-batches; the gradient is that of the whole batch.

    Known limitations: inputs and outputs must be tensors (in any nesting of dicts, lists and tuples);
    a second backward through the same loss is not possible.
    """

    field = "accumulation"
    descriptions = (
        Description(
            flags="--accumulate N",
            saves="activations and logits ÷ N",
            costs="smaller kernels, which fill a GPU less; a loop with its own criterion runs each forward pass twice",
            exactness="same gradient (≤ 1e-6 relative in fp32)",
            gives_nothing="the peak is in the optimizer step, or is mostly parameters, gradients and moments; refused with BatchNorm and for fewer than N rows",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._model: nn.Module | None = None
        self._name = ""
        self._probe: Probe | None = None
        self._split_before = False
        self._learnt = Learnt()

    def check(self, workload: Workload) -> None:
        for name, module in workload.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise RefusalError(
                    self.field,
                    f"{workload.name} has BatchNorm ({name}), whose statistics depend on the whole batch",
                    "replace it by GroupNorm, or use --checkpoint or --offload activations, which keep the batch whole",
                )

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._model, self._name = workload.model, workload.name
        self._probe = Probe(workload.model, workload.name)
        undo.callback(self._forget)

    def _forget(self) -> None:
        self._model = self._probe = None

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        self._learnt.updates += 1

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._model is not None
        assert self._probe is not None
        whole = Call.of(args, without_cache(self._model, kwargs))
        layout = self._probe.layout(whole)
        parts = self._parts_for(layout.rows)
        if parts == 1:
            return call(*args, **kwargs)
        micro_batches = [layout.take(whole, start, stop) for start, stop in row_ranges(layout.rows, parts)]
        weights = self._probe.weights(whole, layout, micro_batches)
        if any(not any(shares) for shares in weights.values()):
            # no target anywhere: the model's own answer (0/0) is the right one
            return call(*args, **kwargs)
        run = MicroRun(self._model, call, micro_batches, layout, weights, self._probe.joins(whole), self._learnt)
        return run.outputs()

    def _parts_for(self, rows: int) -> int:
        wanted = self.plan.accumulation
        if rows < wanted and not self._split_before:
            raise RefusalError(
                self.field,
                f"--accumulate {wanted} needs at least {wanted} rows in a batch of {self._name}, this one has {rows}",
                f"use --accumulate {rows} or larger batches" if rows > 1 else "use larger batches, or --checkpoint",
            )
        # a last, smaller batch of an epoch is split as far as it goes
        self._split_before = True
        return min(wanted, rows)
