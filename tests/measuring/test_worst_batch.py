"""The largest batch of a loader is found, and the loader gives afterwards what it would have given."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from memlab.errors import WorkloadError
from memlab.measuring.worst_batch import worst_batch


def lengths_of(seed: int) -> list[int]:
    return [random.Random(seed).randint(1, 50) for _ in range(random.Random(seed + 1).randint(9, 40))]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True)


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from all generators for each sample."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.full((self.lengths[place],), random.random() + np.random.rand()) + torch.randn(())  # noqa: NPY002 - as many datasets do


class ByLength:
    """A batch sampler of the user's, with state of its own."""

    def __init__(self, lengths: list[int], rows: int) -> None:
        self.lengths, self.rows, self.epochs = lengths, rows, 0

    def __iter__(self) -> Iterator[list[int]]:
        self.epochs += 1
        order = sorted(range(len(self.lengths)), key=lambda place: self.lengths[place])
        batches = [order[at : at + self.rows] for at in range(0, len(order), self.rows)]
        random.shuffle(batches)
        return iter(batches)


def loaders(seed: int) -> dict[str, DataLoader[Any]]:
    lengths = lengths_of(seed)
    data = Augmented(lengths)
    generator = torch.Generator().manual_seed(seed)
    return {
        "in order": DataLoader(data, batch_size=4, collate_fn=padded),
        "shuffled": DataLoader(data, batch_size=4, shuffle=True, collate_fn=padded, drop_last=True),
        "with a generator": DataLoader(data, batch_size=4, shuffle=True, generator=generator, collate_fn=padded),
        "in batches of one's own": DataLoader(data, batch_sampler=ByLength(lengths, 4), collate_fn=padded),
        "in given batches": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 3, drop_last=False), collate_fn=padded),
        "one by one": DataLoader(data, batch_size=None, sampler=SequentialSampler(data)),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", loaders(0))
def test_no_batch_of_three_epochs_is_larger_and_all_come_as_they_would_have(name: str, seed: int) -> None:
    def epochs(loader: DataLoader[Any]) -> list[torch.Tensor]:
        return [batch for _ in range(3) for batch in loader]

    def seeded() -> DataLoader[Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        return loaders(seed)[name]

    expected = epochs(seeded())
    loader = seeded()
    found = worst_batch(loader)
    after = epochs(loader)
    assert all(map(torch.equal, after, expected))
    assert len(after) == len(expected)
    assert found.batch.numel() >= max(batch.numel() for batch in after)
    if found.is_fixed:
        assert found.batch.numel() == max(batch.numel() for batch in after)


class Budget:
    """A batch sampler that draws which samples come together."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(12).tolist()
        return iter([order[:5], order[5:]])


class Cropped(Augmented):
    """Samples of which each reading gives another part."""

    def __getitem__(self, place: int) -> torch.Tensor:
        return super().__getitem__(place)[: random.randint(1, 50)]


def _cropped(rows: list[torch.Tensor]) -> torch.Tensor:
    return padded(rows)[:, : random.randint(1, 50)]


_LENGTHS = [60 + place for place in range(12)]
_WEIGHTED = torch.utils.data.WeightedRandomSampler([1.0] * 12, 6)


@pytest.mark.parametrize(
    ("loader", "who"),
    [
        (lambda: DataLoader(Augmented(_LENGTHS), batch_sampler=Budget(), collate_fn=padded), "the batch sampler"),
        (lambda: DataLoader(Augmented(_LENGTHS), batch_size=3, sampler=_WEIGHTED, collate_fn=padded), "the sampler"),
        (lambda: DataLoader(Cropped(_LENGTHS), batch_size=3, shuffle=True, collate_fn=padded), "the dataset"),
        (lambda: DataLoader(Augmented(_LENGTHS), batch_size=3, shuffle=True, collate_fn=_cropped), "the collator"),
        (lambda: DataLoader(Augmented(_LENGTHS), batch_size=5, shuffle=True, collate_fn=padded, drop_last=True), ""),
        (lambda: DataLoader(Augmented(_LENGTHS), batch_size=5, collate_fn=padded), ""),
    ],
)
def test_who_draws_what_comes_is_said(loader: Callable[[], DataLoader[Any]], who: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    before = random.getstate(), torch.get_rng_state()
    found = worst_batch(loader())
    assert found.drawn_by == who
    said = f", of those looked at: {who} draws at random what comes, and a run can meet larger ones"
    assert (said in str(found)) == bool(who)
    assert (random.getstate(), torch.get_rng_state().tolist()) == (before[0], before[1].tolist())


@pytest.mark.parametrize("seed", range(6))
def test_a_sample_in_a_batch_that_this_epoch_drops_can_come_in_another(seed: int) -> None:
    torch.manual_seed(seed)
    data = Augmented([10, 10, 10, 90, 10])
    found = worst_batch(DataLoader(data, batch_size=2, shuffle=True, collate_fn=padded, drop_last=True))
    assert 3 in found.samples


def test_what_is_said_of_samples() -> None:
    lengths = [10] * 7 + [100]
    found = worst_batch(DataLoader(Augmented(lengths), batch_size=4, collate_fn=padded, shuffle=False))
    assert str(found) == (
        "8 samples of 10 to 100 elements, 10.0 × the median; the largest batch has 4 rows; 61 % of a batch is padding: "
        "group samples of like length (group_by_length=True in a Trainer, or a batch sampler by length), or use --pack, and fewer elements are computed"
    )
    alike = DataLoader(TensorDataset(torch.zeros(6, 3), torch.zeros(6)), batch_size=4, shuffle=True)
    assert str(worst_batch(alike)) == "6 samples all of 4 elements; the largest batch that can come has 4 rows"


def test_samples_of_every_kind_have_a_size() -> None:
    kinds: list[Any] = [
        {"ids": [1, 2, 3], "label": 4},
        (torch.zeros(2, 3), 1.0),
        "words",
        np.zeros((2, 2)),
        [[1, 2], [3]],
    ]
    assert worst_batch(DataLoader(kinds, batch_size=1, collate_fn=list)).sizes == (3, 4, 4, 5, 7)


class Stream(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Uncopied(ByLength):
    """A sampler that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it holds a lock")


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda: DataLoader(Stream()), "a stream of samples (IterableDataset) cannot be looked at without being used up; name a batch with --batch"),
        (
            lambda: DataLoader(Augmented([1, 2]), batch_size=4, drop_last=True),
            "the loader gives no batch: its dataset is empty, or smaller than a batch with drop_last=True",
        ),
        (
            lambda: DataLoader(Augmented([1, 2]), batch_sampler=Uncopied([1, 2], 1)),
            "Uncopied cannot be copied (it holds a lock), and is not looked at: name a batch with --batch",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_looked_at_is_refused(loader: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=f"^{re.escape(said)}$"):
        worst_batch(loader())
