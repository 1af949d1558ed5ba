"""The same call with other numbers of rows, and the most rows that fit, proven by running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memlab.errors import BudgetError, WorkloadError
from memlab.records.inference import BatchAdvice, InferenceRecord, advice_from
from memlab.runtime.workload import Batch
from memlab.units import format_bytes

_MOST_RUNS = 5


@dataclass(frozen=True)
class Call:
    """A call of a model, described so that it can be made again."""

    method: str  # "forward" or "generate"
    batch: Batch  # its arguments; tensors of floats may be on the meta device, since their values decide nothing
    device: torch.device  # where it ran

    @classmethod
    def like(cls, method: str, batch: Batch, device: torch.device) -> Call:
        """Note a call; the memory of its inputs is not held, but that of integers (tokens, masks)."""

        def noted(leaf: Any) -> Any:
            is_floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return torch.empty_like(leaf, device="meta") if is_floats else leaf

        args, kwargs = tree_map(noted, (batch.args, dict(batch.kwargs)))
        return cls(method, Batch(args, kwargs), device)

    @property
    def rows(self) -> int:
        return self.batch.rows

    @property
    def elements(self) -> int:
        return self.batch.elements

    def with_rows(self, rows: int) -> Batch:
        """The same arguments with so many rows, made by repeating rows of every tensor that has as many as the batch."""
        own = self.rows

        def taken(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not leaf.dim() or leaf.shape[0] != own:
                return torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.device) if leaf.is_meta else leaf
            if leaf.is_meta:
                return torch.zeros((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=self.device)
            return leaf.index_select(0, torch.arange(rows, device=leaf.device) % own)

        args, kwargs = tree_map(taken, (self.batch.args, dict(self.batch.kwargs)))
        return Batch(args, kwargs)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
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
