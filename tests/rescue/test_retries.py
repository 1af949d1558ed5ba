"""Retries of the allocator: told apart by their cause, and said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memlab.allocator import Allocator, Settings
from memlab.allocator.blocks import Block
from memlab.plan import Plan
from memlab.rescue.retries import AllocatorSample, RetryWatch, advice

MIB = 2**20
EXPANDABLE = Settings.parse("expandable_segments:True")
Step = Sequence[Sequence[int]]  # sizes in MiB of what lives together, one group after the other
# activations of batches that get longer: what is cached of one is too small for the next
MIXED_LENGTHS: tuple[Step, ...] = ([[12] * 6], [[14] * 6], [[16] * 6])
# activations nearly fill the device, and are gone when the small tensors of the update come
FULL: tuple[Step, ...] = ([[120], [1] * 20],) * 4
HALF_FULL: tuple[Step, ...] = ([[60], [60], [1] * 20],) * 4


class Gpu:
    """A simulated device of some size that runs steps and counts as torch does."""

    def __init__(self, settings: Settings | None = None, capacity_mib: int = 150) -> None:
        self._allocator, self._capacity_bytes, self._retries = Allocator(settings), capacity_mib * MIB, 0
        self._peaks: Counter[str] = Counter()  # of the step
        self._weights = self._malloc(20)

    def _malloc(self, size_mib: int) -> Block:
        block = self._allocator.malloc(size_mib * MIB)
        if self._allocator.reserved_bytes > self._capacity_bytes:
            self._allocator.free(block)
            self._allocator.empty_cache()
            self._retries += 1
            block = self._allocator.malloc(size_mib * MIB)
        assert self._allocator.reserved_bytes <= self._capacity_bytes
        now = {"allocated_bytes": self._allocator.allocated_bytes, "reserved_bytes": self._allocator.reserved_bytes}
        self._peaks |= Counter({f"{name}.all.peak": size_bytes for name, size_bytes in now.items()})
        return block

    def step(self, groups: Step) -> AllocatorSample:
        self._peaks.clear()
        for sizes_mib in groups:
            for block in [self._malloc(size) for size in sizes_mib]:
                self._allocator.free(block)
        return AllocatorSample.of(self.counters())

    def counters(self) -> Mapping[str, int]:
        return {"num_alloc_retries": self._retries, **self._peaks}


def samples(steps: Sequence[Step], settings: Settings | None = None) -> list[AllocatorSample]:
    gpu = Gpu(settings)
    return [gpu.step(step) for step in steps]


def test_pieces_of_the_wrong_sizes() -> None:
    before, after = samples(MIXED_LENGTHS)[1:]
    assert after.retries > before.retries, "the example is to make the allocator retry"

    assert advice(before, after, Settings()) == (
        "the allocator found no room once in a step and gave its cache back to the driver, which takes time: at the peak it "
        "held 136.0 MiB for 116.0 MiB of tensors; free memory is in pieces: start Python with "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def test_the_cure_for_pieces_works() -> None:
    assert samples(MIXED_LENGTHS)[-1].retries > 0
    assert samples(MIXED_LENGTHS, EXPANDABLE)[-1].retries == 0


def test_other_settings_of_the_allocator_are_kept() -> None:
    before, after = samples(MIXED_LENGTHS)[1:]

    text = advice(before, after, Settings.parse("roundup_power2_divisions:4"))

    assert text is not None
    assert text.endswith("PYTORCH_ALLOC_CONF=roundup_power2_divisions:4,expandable_segments:True")


@pytest.mark.parametrize("settings", [Settings(), EXPANDABLE])
def test_too_little_memory(settings: Settings) -> None:
    before, after = samples(FULL, settings)[2:]
    assert after.retries > before.retries, "the example is to make the allocator retry"

    text = advice(before, after, settings)

    assert text is not None
    assert text.endswith("MiB of tensors; tensors fill it: use smaller micro-batches, with --accumulate 2")


def test_the_cure_for_too_little_memory_works() -> None:
    assert samples(FULL)[-1].retries > 0
    assert samples(HALF_FULL)[-1].retries == 0


def test_the_flag_goes_on_from_the_plan_in_force() -> None:
    text = advice(AllocatorSample(1, 99, 100), AllocatorSample(4, 99, 100), Settings(), Plan(accumulation=4))

    assert text is not None
    assert "found no room 3 times in a step" in text
    assert text.endswith("with --accumulate 8 instead of 4")


def test_segments_that_are_expandable_already() -> None:
    text = advice(AllocatorSample(0, 0, 0), AllocatorSample(1, 50, 100), EXPANDABLE)

    assert text is not None
    assert text.endswith("segments are expandable already: use smaller micro-batches, with --accumulate 2")


def test_segments_that_were_made_expandable_there_and_then() -> None:
    before, after = samples(MIXED_LENGTHS)[1:]
    text = advice(before, after, Settings(), expand=lambda _settings: "expandable_segments:True")

    assert text is not None
    assert text.endswith(
        "free memory is in pieces: segments grow in place from here on, as with PYTORCH_ALLOC_CONF=expandable_segments:True, "
        "which processes that are started now get too"
    )


def _not_asked(_settings: Settings) -> str | None:
    pytest.fail("segments are not what is wrong")


def test_nothing_is_made_expandable_where_tensors_fill_memory() -> None:
    text = advice(AllocatorSample(0, 0, 0), AllocatorSample(1, 99, 100), Settings(), expand=_not_asked)

    assert text is not None
    assert text.endswith("tensors fill it: use smaller micro-batches, with --accumulate 2")


def test_windows_has_no_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    text = advice(AllocatorSample(0, 0, 0), AllocatorSample(1, 50, 100), Settings())

    assert text is not None
    assert text.endswith(
        "start Python with PYTORCH_ALLOC_CONF=max_split_size_mb:256, as Windows has no expandable segments"
    )


def test_nothing_to_say_without_retries() -> None:
    sample = AllocatorSample(5, 50, 100)

    assert advice(sample, sample, Settings()) is None
    assert advice(sample, replace(sample, retries=0), Settings()) is None  # counters were reset


def test_counters_of_a_device_that_was_never_used() -> None:
    assert AllocatorSample.of({}) == AllocatorSample(0, 0, 0)


# -- watching


@pytest.fixture
def said() -> list[str]:
    return []


def watched(said: list[str], gpu: Gpu) -> tuple[RetryWatch, Callable[[Step], None]]:
    watch = RetryWatch(said.append, read=gpu.counters, settings=Settings())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def step(groups: Step) -> None:
        gpu.step(groups)
        watch.step_ended(optimizer, skipped=False)

    return watch, step


def test_two_steps_in_a_row_are_said_once(said: list[str]) -> None:
    _, step = watched(said, Gpu())
    for groups in MIXED_LENGTHS[:2]:
        step(groups)
    assert said == []
    step(MIXED_LENGTHS[2])
    assert len(said) == 1
    assert "free memory is in pieces" in said[0]

    for groups in FULL:
        step(groups)
    assert len(said) == 1


def test_a_single_step_is_not_told(said: list[str]) -> None:
    _, step = watched(said, Gpu())
    first, second, third = MIXED_LENGTHS
    for groups in (first, second, second, third):
        step(groups)

    assert said == []


def test_another_plan_is_another_matter(said: list[str]) -> None:
    watch, step = watched(said, Gpu())
    first, second = Plan(accumulation=2), Plan(accumulation=4)
    for plan in (first, second, first):
        watch.plan_changed(plan)
        for groups in FULL:
            step(groups)

    assert [text.rsplit("--", 1)[1] for text in said] == ["accumulate 4 instead of 2", "accumulate 8 instead of 4"]


def test_a_step_that_ran_out_of_memory_does_not_count(said: list[str]) -> None:
    watch, step = watched(said, Gpu())
    for groups in MIXED_LENGTHS:
        watch.interrupted()
        step(groups)

    assert said == []


def test_without_cuda_nothing_is_read(said: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    watch = RetryWatch(said.append)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(3):
        watch.step_ended(optimizer, skipped=False)

    assert said == []
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # unannotated in torch


@pytest.mark.parametrize(
    ("variable", "cure"),
    [
        ("", "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("expandable_segments:True", "--accumulate 2"),
        ("something_new:1", "PYTORCH_ALLOC_CONF=something_new:1,expandable_segments:True"),
    ],
)
def test_settings_in_the_environment(
    said: list[str], monkeypatch: pytest.MonkeyPatch, variable: str, cure: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", variable)
    gpu = Gpu()
    watch = RetryWatch(said.append, read=gpu.counters)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for groups in MIXED_LENGTHS:
        gpu.step(groups)
        watch.step_ended(optimizer, skipped=False)

    assert len(said) == 1
    assert cure in said[0]


def test_windows_goes_on_in_the_hosts_memory(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=24 * 2**30))
    counters = {"num_alloc_retries": 0, "allocated_bytes.all.peak": 2**30, "reserved_bytes.all.peak": 21 * 2**30}
    watch = RetryWatch(said.append, read=lambda: counters)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    watch.step_ended(optimizer, skipped=False)
    assert said == []
    counters["reserved_bytes.all.peak"] = 23 * 2**30
    for _ in range(2):
        watch.step_ended(optimizer, skipped=False)
    assert said == [
        "23.00 GiB are held of a GPU of 24.00 GiB: beyond that Windows gives memory of the host and reports nothing, and steps "
        "take many times as long; --capacity 22118MiB makes such a cell run out of memory, and memlab rescue it"
    ]


def test_the_counters_it_asks_torch_for(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """As `memory_stats_as_nested_dict` returns them."""
    counters = {"num_alloc_retries": 0, "num_ooms": 0, "segment": {"all": {"peak": 3}}}
    peaks = {"allocated_bytes": 95, "reserved_bytes": 100}
    nested = counters | {name: {"all": {"peak": peak}, "small_pool": {"peak": 1}} for name, peak in peaks.items()}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _device: nested)
    watch = RetryWatch(said.append, settings=Settings())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for retries in (0, 1, 2):
        nested["num_alloc_retries"] = retries
        watch.step_ended(optimizer, skipped=False)

    assert len(said) == 1
    assert "held 100 B for 95 B of tensors; tensors fill it" in said[0]
