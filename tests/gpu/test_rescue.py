"""Rescue on a real GPU: memory that the CUDA allocator refuses, in every place of a step.

The loops take a device, so that all but the allocator's own behaviour can be tried on the CPU with a ledger.
"""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, fit
from memlab.measuring.ledger import Ledger
from memlab.rescue.update import free_bytes, need_bytes
from memlab.units import GIB, MIB
from tests.techniques.models import gpt2

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda", 0)
LENGTHS = (8, 16, 12, 8, 64, 16, 8, 12)
_TOO_LARGE_BYTES = 2**44


@contextmanager
def capped(device: torch.device, capacity_bytes: int) -> Iterator[None]:
    """A device that is no larger, counted from what is in use now."""
    if device.type == "cpu":
        with Ledger("cpu", capacity_bytes):
            yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    wanted_bytes = torch.cuda.memory_reserved(device) + capacity_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, wanted_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def holes_bytes(device: torch.device) -> int:
    """What is free in segments that are in use, which updates may take as well."""
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allocated_bytes() -> int:
    gc.collect()
    return torch.cuda.memory_allocated(CUDA)


# --- text of mixed lengths ------------------------------------------------------------------------


def text(length: int, step: int, device: torch.device, rows: int, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def train_on_text(
    device: torch.device,
    lengths: Sequence[int],
    *,
    rescue: bool,
    rows: int = 64,
    vocabulary: int = 20_000,
    say: Callable[[Any], None] = lambda session: None,
) -> list[float]:
    """An unmodified loop over batches of several lengths; returns the losses."""
    model = gpt2(vocabulary=vocabulary, layers=2, width=128).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with fit(Workload(model, optimizer), rescue=rescue) as session:
        for step, length in enumerate(lengths):
            optimizer.zero_grad()
            loss = model(**text(length, step, device, rows, vocabulary)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        say(session)
    return losses


def reserved_by(work: Callable[[], object]) -> int:
    """Most bytes a piece of work reserves beyond what is reserved before it."""
    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    work()
    return torch.cuda.max_memory_reserved(CUDA) - before_bytes


def test_the_longest_batch_does_not_fit_and_the_loop_runs_to_the_end() -> None:
    short = [length for length in LENGTHS if length < max(LENGTHS)]
    train_on_text(CUDA, [8], rescue=False)  # cuBLAS takes its workspaces
    short_bytes = reserved_by(lambda: train_on_text(CUDA, short, rescue=False))
    whole_bytes = reserved_by(lambda: train_on_text(CUDA, LENGTHS, rescue=False))
    expected = train_on_text(CUDA, LENGTHS, rescue=False)
    capacity_bytes = (short_bytes + whole_bytes) // 2
    with capped(CUDA, capacity_bytes), pytest.raises(torch.OutOfMemoryError):
        train_on_text(CUDA, LENGTHS, rescue=False)
    sessions: list[Any] = []
    with capped(CUDA, capacity_bytes):
        losses = train_on_text(CUDA, LENGTHS, rescue=True, say=sessions.append)
    rescues = sessions[0].rescuer.rescues
    assert rescues
    assert rescues[0].step == LENGTHS.index(max(LENGTHS)) + 1
    assert losses == pytest.approx(expected, rel=1e-3)


# --- every place of a step ------------------------------------------------------------------------


class _Greedy(torch.autograd.Function):
    """Passes a tensor on, and wants more than there is on the way back."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _spring("backward", gradient.device)
        return gradient


class Trap(nn.Module):
    """A layer that changes nothing, and runs out of memory in the forward or the backward pass once it is set."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        _spring("forward", inputs.device)
        return _Greedy.apply(inputs)


# places that are set, each for once, and the threads in which it sprang: queues, as all that a repeated call reaches
# and that can be copied is put back for it
_SET: dict[str, SimpleQueue[None]] = {"forward": SimpleQueue(), "backward": SimpleQueue()}
_SPRUNG: SimpleQueue[int] = SimpleQueue()


def _spring(place: str, device: torch.device) -> None:
    if not _SET[place].empty():
        _SET[place].get()
        _SPRUNG.put(threading.get_ident())
        torch.empty(_TOO_LARGE_BYTES, dtype=torch.uint8, device=device)


def trapped(device: torch.device, width: int = 512) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.GELU(), Trap(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)]
    model = nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def steps(
    device: torch.device, places: Sequence[str | None], *, rescue: bool, after: Callable[[Any], None] = lambda _: None
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Steps in each of which memory runs out in a place, or does not."""
    model, optimizer = trapped(device)
    losses = []
    with fit(Workload(model, optimizer), rescue=rescue) as session:
        for step, place in enumerate(places):
            inputs = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to(device)
            if place is not None:
                _SET[place].put(None)
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            after(session)
        rescuer = session.rescuer
    return losses, [parameter.detach().cpu() for parameter in model.parameters()], rescuer


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_memory_runs_out_in_a_pass(place: str) -> None:
    losses, weights, rescuer = steps(CUDA, [None, place, None], rescue=True)
    expected_losses, expected, _ = steps(CUDA, [None] * 3, rescue=False)
    assert [rescue.step for rescue in rescuer.rescues] == [2]
    assert "out of memory" in rescuer.rescues[0].error
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    # autograd runs the backward pass of a GPU in a thread of its own
    *_, thread = (_SPRUNG.get_nowait() for _ in range(_SPRUNG.qsize()))
    assert (thread != threading.get_ident()) == (place == "backward")


def test_without_rescue_the_traps_are_real() -> None:
    for place in ("forward", "backward"):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            steps(CUDA, [place], rescue=False)


def updated(
    device: torch.device, free_share: float | None, seen: int, *, rescue: bool = True, layers: int = 32, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    """One update of many parameters, with so much memory left as a share of what the moments take."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(layers)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    with fit(Workload(model, optimizer), rescue=rescue) as session:
        for step in range(seen + 1):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            if step == seen and free_share is not None:
                moments_bytes = 8 * sum(parameter.numel() for parameter in model.parameters())
                with capped(device, int(free_share * moments_bytes) - holes_bytes(device)):
                    optimizer.step()
            else:
                optimizer.step()
        rescuer = session.rescuer
    return [parameter.detach().cpu() for parameter in model.parameters()], rescuer


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_memory_runs_out_in_the_first_update(options: dict[str, bool]) -> None:
    # the moments take 256 MiB, and do not fit; a bucket of them does once the others are off the device
    expected, _ = updated(CUDA, None, 0, rescue=False, **options)
    found, rescuer = updated(CUDA, 0.8, 0, **options)
    assert rescuer.rescues
    assert rescuer.rescues[0].step == 1
    for one, other in zip(found, expected, strict=True):  # on a busy machine the host may update
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_a_later_update_goes_on_in_little_memory(options: dict[str, bool]) -> None:
    expected, _ = updated(CUDA, None, 2, rescue=False, **options)
    found, _ = updated(CUDA, 0.35, 2, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- what is left ---------------------------------------------------------------------------------


@pytest.mark.memory
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_memory_is_back_after_a_rescue(place: str) -> None:
    found: dict[bool, list[int]] = {True: [], False: []}
    for is_trapped, seen in found.items():
        places = [None, place if is_trapped else None, None]

        def back(session: Any, seen: list[int] = seen) -> None:
            session.switch("", now=True)
            seen.append(allocated_bytes())

        steps(CUDA, places, rescue=True, after=back)
    assert found[True][-1] <= 1.01 * found[False][-1]


@pytest.mark.memory
def test_fifty_rescues_leave_nothing() -> None:
    seen: list[int] = []

    def back(session: Any) -> None:
        session.switch("", now=True)
        seen.append(allocated_bytes())

    _, _, rescuer = steps(CUDA, ["forward", "backward"] * 25, rescue=True, after=back)
    assert len(rescuer.rescues) == 50
    assert max(seen[10:]) <= 1.001 * min(seen[10:])


# --- when nothing goes wrong ----------------------------------------------------------------------


class Both:
    """The same loop with rescue and without, step by step."""

    def __init__(self, device: torch.device, rows: int = 32, vocabulary: int = 20_000, width: int = 512) -> None:
        self.model = gpt2(vocabulary=vocabulary, layers=6, width=width).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._session = fit(Workload(self.model, self.optimizer), rescue=True)
        self._rescuer = self._session.rescuer
        self._batch = text(64, 0, device, rows, vocabulary)

    def step(self, *, is_rescued: bool) -> None:
        self._session.rescuer = self._rescuer if is_rescued else None
        self.model(**self._batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        assert self._rescuer is not None
        assert self._rescuer.rescues == []
        self._session.rescuer = self._rescuer
        self._session.undo()


@pytest.fixture
def both() -> Iterator[Both]:
    loop = Both(CUDA)
    for is_rescued in (True, False) * 3:
        loop.step(is_rescued=is_rescued)
    yield loop
    loop.close()


def _milliseconds(work: Callable[[], object], repeats: int = 4) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


@pytest.mark.hardware("what a step costs")
def test_rescue_costs_a_hundredth_of_a_step_at_most() -> None:
    # a loop that is short of memory has the GPU busy, so what the guard computes on the host is done meanwhile
    both = Both(CUDA, rows=128, width=1024)
    for is_rescued in (True, False) * 3:
        both.step(is_rescued=is_rescued)
    ratios = []
    for index in range(30):
        times = {}
        for is_rescued in (True, False) if index % 2 else (False, True):
            times[is_rescued] = _milliseconds(lambda on=is_rescued: both.step(is_rescued=on))
        ratios.append(times[True] / times[False])
    both.close()
    assert statistics.median(ratios) <= 1.01


@pytest.mark.memory
def test_rescue_takes_no_memory(both: Both) -> None:
    peaks = []
    for is_rescued in (True, False):
        torch.cuda.reset_peak_memory_stats(CUDA)
        both.step(is_rescued=is_rescued)
        peaks.append(torch.cuda.max_memory_allocated(CUDA))
    assert peaks[0] <= 1.001 * peaks[1]


@pytest.mark.hardware("which kernels the profiler sees")
def test_with_room_the_update_launches_what_the_plain_one_does(both: Both) -> None:
    counts = []
    for is_rescued in (True, False):
        both.step(is_rescued=is_rescued)
        both.model(**both._batch).loss.backward()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            both.optimizer.step()
            torch.cuda.synchronize()
        both.optimizer.zero_grad()
        counts.append(sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key))
    assert counts[1] > 0
    assert counts[0] == counts[1]


# --- free memory ----------------------------------------------------------------------------------


@pytest.mark.memory
@pytest.mark.parametrize("capacity_bytes", [None, 2 * GIB])
def test_free_bytes_can_be_had_and_no_more(capacity_bytes: int | None) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    everything = torch.cuda.get_device_properties(CUDA).total_memory
    with capped(CUDA, capacity_bytes or everything):
        free = free_bytes(CUDA, everything)
        assert free is not None
        wanted = int(free) - 64 * MIB
        held = torch.empty(wanted, dtype=torch.uint8, device=CUDA)
        assert held.numel() == wanted
        left = free_bytes(CUDA, everything)
        assert left is not None
        assert left <= 128 * MIB
        del held
        # what is cached whole counts as free
        again = free_bytes(CUDA, everything)
        assert again is not None
        assert again >= wanted
    torch.cuda.empty_cache()


@pytest.mark.memory
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_an_update_keeps_within_its_estimate(options: dict[str, bool]) -> None:
    parameters = [nn.Parameter(torch.randn(1024, 1024, device=CUDA)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, amsgrad=True, maximize=True, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        estimated_bytes = need_bytes(optimizer, parameters)[CUDA]
        before_bytes = allocated_bytes()
        torch.cuda.reset_peak_memory_stats(CUDA)
        optimizer.step()
        assert torch.cuda.max_memory_allocated(CUDA) - before_bytes <= estimated_bytes + MIB
