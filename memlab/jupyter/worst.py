"""`%memfit worst`: the largest batch of a loader, predicted and rehearsed before a run meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    if isinstance(batch, Mapping) and (known is None or (not known.args and known.kwargs.keys() & batch.keys())):
        names = batch.keys() if known is None else known.kwargs.keys()
        others = {} if known is None else {name: value for name, value in known.kwargs.items() if name not in batch}
        return {**others, **{name: value for name, value in batch.items() if name in names}}
    if known is None:
        return batch
    unused = tensors_in(batch)

    def instead(tensor: Any) -> Any:
        """Return the first tensor of the batch that is like one of the last cell's call."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        at = next(
            (n for n, each in enumerate(unused) if (each.dtype, each.dim()) == (tensor.dtype, tensor.dim())), None
        )
        if at is None:
            kind = f"{tensor.dim()} dimensions of {str(tensor.dtype).removeprefix('torch.')}"
            raise WorkloadError(
                f"the loader's batch has no tensor like one that the last cell called {workload.name} with ({kind}); name a batch with --batch"
            )
        return unused.pop(at)

    args, kwargs = tree_map(instead, (known.args, dict(known.kwargs)))
    return Batch(args, kwargs)


def _verdict(fits: bool, plan: Plan) -> str:
    return (
        f"{plan.label} fits the largest batch"
        if fits
        else f"{plan.label} does not fit the largest batch: %memfit find --budget SIZE"
    )
