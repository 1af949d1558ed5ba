"""`worst_batch`: the largest batch that a `DataLoader` can give, made without training and without changing what it gives later.

Rules:

1. The size of a sample is the number of its elements: of tensors and arrays, numbers in lists, characters of texts.
2. Where batches are shuffled, any samples may come together: the worst batch has the largest ones. Where the order is fixed, or
   a batch sampler of the user's own puts batches together, it is the largest of one epoch, by rows times its largest sample.
3. Random numbers are put back: those of torch, NumPy and Python, and of the sampler's generator. Samplers are looked at in a copy.

Known limitations: samples are read as the loader would read them, so files are opened, and what a dataset counts it counts.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from memlab.errors import WorkloadError
from memlab.runtime.rng import Randomness, is_generator

# share of a usual batch that is padding from which on it is worth a word
_NOTEWORTHY_PADDING = 0.2


@dataclass(frozen=True)
class WorstBatch:
    """The largest batch of a loader."""

    batch: Any  # as the loader gives it
    samples: tuple[int, ...]  # their places in the dataset
    sizes: tuple[int, ...]  # of all samples that the loader gives, in elements, from the smallest on
    is_fixed: bool  # whether the loader gives this very batch; else it may
    padding: float  # share of an epoch's batches that is padding, if samples are padded to the largest of their batch

    def __str__(self) -> str:
        median = statistics.median(self.sizes)
        largest = self.sizes[-1]
        times = f", {largest / median:.1f} × the median" if median and largest > median else ""
        given = "the largest batch" if self.is_fixed else "the largest batch that can come"
        alike = self.sizes[0] == largest
        spread = f"all of {largest:,} elements" if alike else f"of {self.sizes[0]:,} to {largest:,} elements{times}"
        said = f"{len(self.sizes):,} samples {spread}; {given} has {len(self.samples)} rows"
        if self.padding < _NOTEWORTHY_PADDING:
            return said
        return (
            f"{said}; {100 * self.padding:.0f} % of a batch is padding: group samples of like length "
            "(group_by_length=True in a Trainer, or a batch sampler by length), or use --pack, and fewer elements are computed"
        )


def worst_batch(loader: DataLoader[Any], *, progress: Callable[[str], None] = lambda _: None) -> WorstBatch:
    """Make the largest batch that a loader can give.

    Args:
        loader: it gives afterwards what it would have given.
        progress: called with a line now and then, as each sample is read.

    Returns:
        The batch, as the loader's `collate_fn` makes it, and what is known of all samples.

    Raises:
        WorkloadError: the loader's dataset is a stream, is empty, or its sampler cannot be copied.

    Example:
        >>> rows = [torch.zeros(length) for length in (2, 7, 3, 5)]
        >>> loader = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=torch.nn.utils.rnn.pad_sequence)
        >>> found = worst_batch(loader)
        >>> found.samples, found.batch.shape
        ((1, 3), torch.Size([7, 2]))
    """
    if isinstance(loader.dataset, IterableDataset):
        raise WorkloadError(
            "a stream of samples (IterableDataset) cannot be looked at without being used up; name a batch with --batch"
        )
    before = Randomness(filter(is_generator, _attributes_of(loader)))
    try:
        is_fixed, batches = _batches_of(loader)
        places = sorted({place for batch in batches for place in batch})
        if not places:
            raise WorkloadError(
                "the loader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True"
            )
        sizes: dict[Any, int] = {}
        for number, place in enumerate(places, 1):
            progress(f"sample {number:,} of {len(places):,}")
            sizes[place] = _elements(loader.dataset[place])
        if not is_fixed:
            rows = max(map(len, batches))
            worst = sorted(places, key=lambda place: -sizes[place])[:rows]
        else:
            worst = max(batches, key=lambda batch: len(batch) * max(sizes[place] for place in batch))
        collate: Any = loader.collate_fn
        samples = [loader.dataset[place] for place in worst]
        batch = (
            collate(samples)
            if loader.batch_size is not None or loader.batch_sampler is not None
            else collate(samples[0])
        )
    finally:
        before.restore()
    held = sum(len(batch) * max(sizes[place] for place in batch) for batch in batches)
    used = sum(sizes[place] for batch in batches for place in batch)
    return WorstBatch(batch, tuple(worst), tuple(sorted(sizes.values())), is_fixed, 1 - used / held if held else 0.0)


def _attributes_of(loader: DataLoader[Any]) -> Iterator[Any]:
    for each in (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        yield from getattr(each, "__dict__", {}).values()


def _batches_of(loader: DataLoader[Any]) -> tuple[bool, list[list[Any]]]:
    """Return whether a loader gives the same batches each time, and the places of the samples in those of an epoch."""
    batch_sampler = loader.batch_sampler
    sampler = getattr(batch_sampler, "sampler", loader.sampler)  # the loader of a trainer has one of its own, unused
    try:
        # past the dataset and the generators, which are put back
        memo = {id(each): each for each in (loader.dataset, *filter(is_generator, _attributes_of(loader)))}
        copied = copy.deepcopy(sampler if batch_sampler is None else batch_sampler, memo)
    except Exception as error:  # noqa: BLE001 - a class of the user's may raise what it likes
        named = type(batch_sampler or sampler).__name__
        raise WorkloadError(
            f"{named} cannot be copied ({error}), and is not looked at: name a batch with --batch"
        ) from None
    batches = [[place] for place in copied] if batch_sampler is None else [list(batch) for batch in copied]
    is_plain = batch_sampler is None or type(batch_sampler) is BatchSampler
    return not is_plain or isinstance(sampler, SequentialSampler), batches


def _elements(sample: Any) -> int:
    """Number of elements of a sample."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, Number):
        return 1
    if isinstance(sample, Mapping):
        return sum(map(_elements, sample.values()))
    if isinstance(sample, Sequence):
        return sum(map(_elements, sample))
    size = getattr(sample, "size", 0)  # an array's number of elements, an image's width and height
    return int(size[0] * size[1]) if isinstance(size, tuple) and len(size) > 1 else size if isinstance(size, int) else 0
