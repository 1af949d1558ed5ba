"""BatchNorm under accumulation: statistics of each micro-batch, as in accumulation written by hand.

This is another computation than that of the whole batch, which is why it has to be asked for. Running statistics are updated once
per micro-batch, in order, as a loop over micro-batches leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.runtime.stand_ins import method_of, stand_in
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, Technique

BATCH_NORM: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)


class MicroStatistics(Technique):
    """Let each micro-batch of `--accumulate` have its own BatchNorm statistics; `Accumulation` does the work."""

    field = "batchnorm"
    descriptions = (
        Description(
            flags="--batchnorm micro",
            saves="lets --accumulate split the batch of a model with BatchNorm",
            costs="nothing",
            exactness="another gradient than that of the whole batch, as in accumulation by hand: statistics are those of each micro-batch",
            gives_nothing="without --accumulate, or without BatchNorm in the model; both are refused",
        ),
    )

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        return plan.batchnorm, plan.accumulation > 1

    def check(self, workload: Workload) -> None:
        if self.plan.accumulation == 1:
            raise RefusalError(
                self.field, "--batchnorm micro changes nothing without --accumulate N", "add it, as in --accumulate 4"
            )
        if not any(isinstance(module, BATCH_NORM) for module in workload.model.modules()):
            raise RefusalError(self.field, f"{workload.name} has no BatchNorm", "leave --batchnorm micro out")


@contextmanager
def in_groups(model: nn.Module, kinds: tuple[type[nn.Module], ...], rows: Sequence[int]) -> Iterator[None]:
    """Have modules of some kinds treat parts of so many rows of their input, or multiples, one after another."""
    with ExitStack() as undo:
        for module in model.modules():
            if kinds and isinstance(module, kinds):
                stand_in(module, "forward", _grouped(method_of(module, "forward"), rows), undo)
        yield


def _grouped(forward: Callable[..., torch.Tensor], rows: Sequence[int]) -> Callable[..., torch.Tensor]:
    def grouped(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        each, rest = divmod(inputs.size(0), sum(rows))
        if rest:
            return forward(inputs, *args, **kwargs)
        return torch.cat(
            [forward(part, *args, **kwargs) for part in torch.split(inputs, [each * count for count in rows])]
        )

    return grouped
