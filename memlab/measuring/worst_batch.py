"""`worst_batch`: the largest batch that a `DataLoader` can give, made without training and without changing what it gives later.

Rules:

1. The size of a sample is the number of its elements: of tensors and arrays, numbers in lists, characters of texts.
2. Where batches are shuffled, any samples may come together: the worst batch has the largest ones. Where the order is fixed, or
   a batch sampler of the user's own puts batches together, it is the largest of one epoch, by rows times its largest sample.
3. Who draws what comes (a sampler, samples that are cropped, a collator) draws twice, and what differs is said: no batch is the largest then.
4. Random numbers are put back: those of torch, NumPy and Python, and of the sampler's generator. Samplers are looked at in a copy.

Known limitations: samples are read as the loader would read them, so files are opened, and what a dataset counts it counts.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from memlab.errors import WorkloadError
from memlab.runtime.rng import Randomness, is_generator

# share of a usual batch that is padding from which on it is worth a word
_NOTEWORTHY_PADDING = 0.2
_READ_TWICE = 16  # samples, about


@dataclass(frozen=True)
class WorstBatch:
    """The largest batch of a loader."""

    batch: Any  # as the loader gives it
    samples: tuple[int, ...]  # their places in the dataset
    sizes: tuple[int, ...]  # of all samples that the loader gives, in elements, from the smallest on
    is_fixed: bool  # whether the loader gives this very batch; else it may
    padding: float  # share of an epoch's batches that is padding, if samples are padded to the largest of their batch
    drawn_by: str = ""  # who draws at random what else can come; empty where nobody does

    def __str__(self) -> str:
        median = statistics.median(self.sizes)
        largest = self.sizes[-1]
        times = f", {largest / median:.1f} × the median" if median and largest > median else ""
        given = "the largest batch" if self.is_fixed else "the largest batch that can come"
        alike = self.sizes[0] == largest
        spread = f"all of {largest:,} elements" if alike else f"of {self.sizes[0]:,} to {largest:,} elements{times}"
        said = f"{len(self.sizes):,} samples {spread}; {given} has {len(self.samples)} rows"
        if self.drawn_by:
            said += f", of those looked at: {self.drawn_by} draws at random what comes, and a run can meet larger ones"
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
        is_fixed, batches, possible, drawn_by = _given_by(loader)
        places = sorted(possible)
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
        batch, again = _collated(loader, worst), _collated(loader, worst)
        step = max(1, len(places) // _READ_TWICE)
        if not drawn_by and any(_elements(loader.dataset[place]) != sizes[place] for place in places[::step]):
            drawn_by = "the dataset"
        elif not drawn_by and _elements(again) != _elements(batch):
            drawn_by = "the collator"
        batch = max(batch, again, key=_elements)
    finally:
        before.restore()
    held = sum(len(batch) * max(sizes[place] for place in batch) for batch in batches)
    used = sum(sizes[place] for batch in batches for place in batch)
    return WorstBatch(
        batch, tuple(worst), tuple(sorted(sizes.values())), is_fixed, 1 - used / held if held else 0.0, drawn_by
    )


def _collated(loader: DataLoader[Any], places: Sequence[Any]) -> Any:
    collate: Any = loader.collate_fn
    samples = [loader.dataset[place] for place in places]
    is_batched = loader.batch_size is not None or loader.batch_sampler is not None
    return collate(samples if is_batched else samples[0])


def _attributes_of(loader: DataLoader[Any]) -> Iterator[Any]:
    for each in (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        yield from getattr(each, "__dict__", {}).values()


class _Given(NamedTuple):
    """What a loader gives."""

    is_fixed: bool  # whether its batches are the same each time
    batches: list[list[Any]]  # of an epoch, by the places of their samples
    places: set[Any]  # that can come
    drawn_by: str  # who draws others


def _given_by(loader: DataLoader[Any]) -> _Given:
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
    batches, others = (_of_an_epoch(copied, batch_sampler is not None) for _ in range(2))
    is_plain = batch_sampler is None or type(batch_sampler) is BatchSampler
    if not is_plain or isinstance(sampler, SequentialSampler):
        is_drawn = {*map(tuple, batches)} != {*map(tuple, others)}
        batches += others if is_drawn else []
        return _Given(True, batches, {*chain.from_iterable(batches)}, "the batch sampler" if is_drawn else "")
    # past a last batch that is dropped: another epoch has others there
    places, again = ({*getattr(copied, "sampler", copied)} for _ in range(2))
    possible = places.union(again, *batches) if batches else set[Any]()
    return _Given(False, batches, possible, "the sampler" if places != again else "")


def _of_an_epoch(sampler: Iterable[Any], gives_batches: bool) -> list[list[Any]]:
    return [list(each) if gives_batches else [each] for each in sampler]


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
