"""`%memfit worst`: the largest batch of a loader, predicted and rehearsed before a run meets it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from memlab.errors import WorkloadError
from memlab.jupyter import prediction
from memlab.measuring.device import Device
from memlab.measuring.runs import measured_row
from memlab.measuring.worst_batch import worst_batch
from memlab.plan import Plan
from memlab.records.comparison import Comparison
from memlab.runtime.batch import Batch
from memlab.runtime.namespace import trainer_model
from memlab.runtime.tree import tensors_in
from memlab.runtime.workload import Workload, describe_all

Say = Callable[[str], None]


def rehearsed(workload: Workload, loader: DataLoader[Any], plan: Plan, device: Device, say: Say) -> Comparison:
    """Return a plan measured and predicted on the largest batch of a loader, with everything put back."""
    found = worst_batch(loader, progress=say)
    worst = Workload(
        workload.model, workload.optimizers, _as_called(workload, found.batch), workload.loss_fn, None, workload.name
    )
    worst.tape = workload.tape
    say(f"rehearsing a step on {len(found.samples)} rows")
    row = measured_row(worst, plan, 1, device)
    compared = Comparison(
        f"memfit worst · {describe_all([worst])} · {device.name}", (row,), (str(found), _verdict(row.fits, plan))
    )
    return prediction.with_predictions(compared, worst, say)


def loader_in(variables: Mapping[str, Any], name: str) -> DataLoader[Any]:
    """Return the loader that a line names, or the only one of the notebook; a trainer gives the one it trains on."""
    if name:
        if name not in variables:
            raise WorkloadError(
                f"%memfit worst {name}: no variable of that name; name a DataLoader, as in %memfit worst loader"
            )
        found = dict(_loaders({name: variables[name]}))
        if not found:
            what = type(variables[name]).__name__
            raise WorkloadError(
                f"%memfit worst {name}: a {what} is no torch DataLoader and no trainer with one; name one of these"
            )
    else:
        found = dict(_loaders(variables))
    if not found:
        raise WorkloadError(
            "%memfit worst needs a loader: no variable of this notebook is a torch DataLoader or a trainer; make it first"
        )
    if len({id(each) for each in found.values()}) > 1:
        raise WorkloadError(
            f"%memfit worst: several loaders ({', '.join(found)}); name the one that trains, as in %memfit worst {next(iter(found))}"
        )
    return next(iter(found.values()))


def _loaders(variables: Mapping[str, Any]) -> Iterator[tuple[str, DataLoader[Any]]]:
    for name, value in list(variables.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, DataLoader):
            yield name, value
        elif trainer_model(value) is not None and callable(getattr(value, "get_train_dataloader", None)):
            yield name, _of_trainer(value)


def _of_trainer(trainer: Any) -> DataLoader[Any]:
    """Return the loader of a trainer, which remembers it no longer."""
    known = getattr(getattr(trainer, "accelerator", None), "_dataloaders", [])
    before = len(known)
    try:
        loader: DataLoader[Any] = trainer.get_train_dataloader()
    finally:
        del known[before:]
    return loader


def _as_called(workload: Workload, batch: Any) -> Any:
    """Return a loader's batch as the model is called with it, on its device: by names, or as in the last cell."""
    batch = tree_map(lambda each: each.to(workload.device) if isinstance(each, torch.Tensor) else each, batch)
    if workload.loss_fn is not None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise WorkloadError("--loss-fn needs a loader that gives inputs and target, two of them")
        return tuple(batch)
    known = None if workload.batch is None else Batch.of(workload.batch)
    if known is None:
        return batch
    if isinstance(batch, Mapping) and not known.args and known.kwargs.keys() & batch.keys():
        given = {name: value for name, value in batch.items() if name in known.kwargs}
        replaced = [(known.kwargs[name], value) for name, value in given.items()]
        own = _Own([pair for pair in replaced if all(isinstance(each, torch.Tensor) for each in pair)])
        return {name: given[name] if name in given else tree_map(own, value) for name, value in known.kwargs.items()}
    # the first tensor of the batch that is like one of the last cell's call takes its place
    unused, replaced = tensors_in(batch), []
    for tensor in known.tensors:
        at = next((n for n, each in enumerate(unused) if _are_alike(each, tensor)), None)
        if at is not None and not any(_is_same(old, tensor) for old, _ in replaced):
            replaced.append((tensor, unused.pop(at)))
    if not replaced:
        kinds = ", ".join(
            f"{each.dim()} dimensions of {str(each.dtype).removeprefix('torch.')}" for each in known.tensors[:1]
        )
        raise WorkloadError(
            f"the loader's batch has no tensor like one that the last cell called {workload.name} with ({kinds}); name a batch with --batch"
        )
    args, kwargs = tree_map(_Own(replaced), (known.args, dict(known.kwargs)))
    return Batch(args, kwargs)


class _Own:
    """Gives what takes the place of an argument of the last cell's call, where the loader has none of that name.

    A loop gives a tensor of the loader twice (``labels=ids``), or makes one of its own of like size: that is continued by its last
    values, or cut, to the sizes of the loader's batch.

    Args:
        replaced: tensors of the call and those of the loader's batch in their places.
    """

    def __init__(self, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._replaced = replaced
        self._sizes: dict[tuple[int | None, int], set[int]] = defaultdict(set)
        for old, new in replaced:
            for dim, (before, after) in enumerate(zip(old.shape, new.shape, strict=False)):
                self._sizes[dim, before].add(after)
                self._sizes[None, before].add(after)

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for old, new in self._replaced:
            if _is_same(old, value):
                return new
        for dim, size in enumerate(value.shape):
            known = self._sizes.get((dim, size)) or self._sizes.get((None, size), {size})
            if size and known != {size} and len(known) == 1:
                places = torch.arange(next(iter(known)), device=value.device).clamp_(max=size - 1)
                value = value.detach().index_select(dim, places)
        return value


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.dim()) == (other.dtype, other.dim())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (_are_alike(one, other) and one.device == other.device and torch.equal(one, other))


def _verdict(fits: bool, plan: Plan) -> str:
    return (
        f"{plan.label} fits the largest batch"
        if fits
        else f"{plan.label} does not fit the largest batch: %memfit find --budget SIZE"
    )
