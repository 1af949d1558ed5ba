"""Batches of other numbers of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from memlab.runtime.batch import Batch
from memlab.runtime.workload import Workload
from memlab.techniques.accumulation.split import Call, Layout


def with_rows(workload: Workload, layout: Layout, rows: int) -> Any:
    """Return the batch of a twin's workload with so many rows, made by repeating those it has."""
    whole = layout.rows
    known: dict[int, torch.Tensor] = {}

    def taken(leaf: Any, dim: int) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return [leaf[row % whole] for row in range(rows)]
        if id(leaf) not in known:  # labels may be the very tensor the inputs are
            known[id(leaf)] = leaf.index_select(dim, torch.arange(rows, device="cpu") % whole)
        return known[id(leaf)]

    def resized(batch: Any) -> Any:
        call, dims = layout.view(flat(Batch.of(batch))), dict(layout.dims)
        leaves = [taken(leaf, dims[place]) if place in dims else leaf for place, leaf in enumerate(call.leaves)]
        args, kwargs = call.spec.put(leaves)
        return Batch(args, kwargs)

    def target_of(leaf: Any) -> Any:
        dim = layout.dims[0][1]
        is_split = isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.size(dim) == whole
        return taken(leaf, dim) if is_split else leaf

    if workload.loss_fn is None:
        return resized(workload.batch)
    return resized(workload.batch[0]), tree_map(target_of, workload.batch[1])


def flat(call: Batch) -> Call:
    """Return a call's arguments, flattened."""
    return Call.of(call.args, dict(call.kwargs))
