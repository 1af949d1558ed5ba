"""The same call with other numbers of rows, and the most rows that fit, proven by running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memlab.errors import BudgetError, WorkloadError
from memlab.inference_record import BatchAdvice, InferenceRecord, advice_from
from memlab.measuring.ledger import tensors_in
from memlab.measuring.steps import samples_of
from memlab.units import format_bytes
from memlab.workload import Batch

_MOST_RUNS = 5


@dataclass(frozen=True)
class Call:
    """A call of a model, kept by reference.

    Args:
        method: "forward" or "generate".
        batch: its arguments.

    Example:
        >>> call = Call("forward", Batch((torch.arange(6).view(2, 3),), {"scale": torch.ones(3)}))
        >>> call.with_rows(5).args[0].shape, call.with_rows(5).kwargs["scale"].shape
        (torch.Size([5, 3]), torch.Size([3]))
    """

    method: str
    batch: Batch

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return samples_of(self.batch)

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel() for tensor in tensors_in((self.batch.args, self.batch.kwargs)))

    def with_rows(self, rows: int) -> Batch:
        """The same arguments with so many rows, made by repeating rows of every tensor that has as many as the batch."""
        own = self.rows

        def taken(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != own:
                return leaf
            return leaf.index_select(0, torch.arange(rows, device=leaf.device) % own)

        args, kwargs = tree_map(taken, (self.batch.args, dict(self.batch.kwargs)))
        return Batch(args, kwargs)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Random state as it was, afterwards."""
        devices = {t.device for t in tensors_in((self.batch.args, self.batch.kwargs)) if t.is_cuda}
        with torch.random.fork_rng(devices=list(devices)):
            yield


def proven(first: BatchAdvice, record: InferenceRecord, peak_of: Callable[[int], int | None]) -> BatchAdvice:
    """Run numbers of rows until the largest that fits is known, or five have been run.

    Args:
        first: the advice to begin with.
        record: what was measured before.
        peak_of: runs so many rows and tells the peak; None when memory ran out.

    Returns:
        The largest number that was run and fitted, with its peak.

    Raises:
        BudgetError: none did.
        WorkloadError: nothing grows with the rows.
    """
    highest = max(record.calls, key=lambda call: call.peak_allocated_bytes or 0)
    peaks = {
        call.rows: call.peak_allocated_bytes
        for call in record.calls
        if call.shape == highest.shape and call.peak_allocated_bytes is not None
    }
    too_many = None  # rows that memory ran out with
    advice: BatchAdvice | None = first
    for _ in range(_MOST_RUNS):
        advice = advice_from(peaks, first.fixed_bytes, first.budget_bytes)
        if advice is None:
            raise WorkloadError("nothing that this call needs grows with its rows: any number fits")
        rows = advice.rows if too_many is None else min(advice.rows, too_many - max(1, too_many // 10))
        if rows < 1 or rows in peaks:
            break
        peak_bytes = peak_of(rows)
        if peak_bytes is None:
            too_many = rows
        else:
            peaks[rows] = peak_bytes
    fitting = [rows for rows, peak in peaks.items() if peak <= first.budget_bytes]
    if not fitting:
        raise BudgetError(
            f"not one row fits into {format_bytes(first.budget_bytes)}: {format_bytes(first.fixed_bytes)} are taken before "
            f"the first one, and each needs {format_bytes(first.row_bytes)}"
        )
    rows = max(fitting)
    assert advice is not None
    return replace(advice, rows=rows, proven_bytes=peaks[rows])
