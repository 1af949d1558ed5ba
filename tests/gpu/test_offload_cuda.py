"""Offload beside a GPU: copies that run beside the computation, equal numbers, and where state is updated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memlab import Workload, fit, measure
from memlab.measuring.runs import training_step
from memlab.session.snapshot import Snapshot
from memlab.techniques.offload import link as _link
from memlab.techniques.offload.activations import OffloadActivations
from memlab.techniques.offload.link import Link
from tests.bench import workloads
from tests.driving import applied
from tests.techniques.models import distance, gpt2, gradients, ragged_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STREAMED = Link(down=1e12, up=1e12, both=1e12, updated=1e9)
ON_HOST = Link(down=1e10, up=1e10, both=1e10, updated=1e12)


@pytest.fixture
def load() -> Workload:
    model = gpt2(vocabulary=4_000, layers=4, width=256).cuda()
    batch = {key: value.cuda() for key, value in ragged_batch(vocabulary=4_000, length=64).items()}
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


@pytest.fixture(params=[STREAMED, ON_HOST], ids=["streamed", "on the host"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(_link, "measured", lambda _device: request.param)
    return request.param


def weights_after(load: Workload, flags: str, steps: int, **settings: bool) -> list[torch.Tensor]:
    before = Snapshot(load)
    load.optimizers[0].state.clear()
    with fit(load, flags, **settings):
        for _ in range(steps):
            training_step(load)
    found = [p.detach().clone() for p in load.model.parameters()]
    before.restore()
    return found


@pytest.mark.parametrize("most_bytes", [0, 2**20])
def test_a_system_that_pins_little_memory_computes_the_same(
    load: Workload, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    flags = "--offload optimizer,activations,params"
    expected = weights_after(load, flags, 2)
    empty = torch.empty

    def pins_little(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and size[0] > most_bytes:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, pin_memory=pin_memory, **options)

    monkeypatch.setattr(torch, "empty", pins_little)
    found = weights_after(load, flags, 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_pinned_memory_goes_with_the_plan(load: Workload) -> None:
    training_step(load)
    torch._C._host_emptyCache()
    before_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    with fit(load, "--offload optimizer,activations,params"):
        for _ in range(2):
            training_step(load)
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] > before_bytes
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before_bytes


# -- activations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "--accumulate 2", "--checkpoint"])
@pytest.mark.parametrize("where", ["activations", "activations:disk"])
def test_gradients_are_the_same_under_dropout(flags: str, where: str) -> None:
    model = gpt2(vocabulary=512, layers=4, width=256, dropout=0.1).cuda()
    load = Workload(model, torch.optim.AdamW(model.parameters()))
    batch = {key: value.cuda() for key, value in ragged_batch(vocabulary=512).items()}
    found = []
    for plan in (flags, f"{flags} --offload {where}"):
        with fit(load, plan):
            for _ in range(5):  # memory off the device is used again from the second on
                model.zero_grad(set_to_none=True)
                torch.manual_seed(3)
                model(**batch).loss.backward()
        found.append(gradients(model))
    # the embedding's gradient is summed by atomics, in another order every time
    assert distance(*found) < 5e-6


def test_graphs_interleave_are_kept_and_are_forgotten(load: Workload) -> None:
    model, batch = load.model, load.batch

    def trained() -> list[torch.Tensor]:
        first, second, third = (model(**batch).loss for _ in range(3))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        del third
        return gradients(model)

    expected = trained()
    with fit(load, "--offload activations") as session:
        (technique,) = session.techniques
        found = [trained() for _ in range(3)]
        gc.collect()
        assert isinstance(technique, OffloadActivations)
        assert technique.spill is not None
        assert technique.spill.stored_bytes == 0
        assert technique.spill.held_bytes <= 2 * technique.spill.peak_bytes + 2**21
    assert max(distance(each, expected) for each in found) < 5e-6


@pytest.mark.memory
def test_memory_comes_back(load: Workload) -> None:
    with fit(load, "--offload activations"):
        for _ in range(3):
            training_step(load)
    gc.collect()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated()
    with fit(load, "--offload activations"):
        for _ in range(3):
            training_step(load)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == left


@pytest.mark.memory
def test_the_peak_is_at_most_four_tensors_above_what_is_needed(load: Workload) -> None:
    as_written, offloaded = (measure(load, flags, steps=2) for flags in ("", "--offload activations"))
    assert offloaded.peak_allocated_bytes < as_written.peak_allocated_bytes


# -- copies beside the computation -----------------------------------------------------------------


def overlapped_share(run: object) -> float:
    """The share of the time of copies to and from the host during which kernels run."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()  # type: ignore[operator]
        torch.cuda.synchronize()
    events = list(profiled.events())  # once: they are not to be had again
    names = sorted({event.name[:60] for event in events})
    on_device = [event for event in events if event.device_type is torch.autograd.DeviceType.CUDA]
    copies = [e.time_range for e in on_device if "HtoD" in e.name or "DtoH" in e.name]
    kernels = [e.time_range for e in on_device if not e.name.startswith(("Mem", "mem"))]
    assert copies, names
    assert kernels
    total = sum(copy.end - copy.start for copy in copies)
    shared = sum(max(0, min(c.end, k.end) - max(c.start, k.start)) for c in copies for k in kernels)
    return shared / total


@pytest.mark.hardware("whether copies run beside kernels")
@pytest.mark.parametrize("flags", ["--offload activations", "--offload optimizer"])
def test_copies_run_beside_kernels(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "measured", lambda _device: STREAMED)
    load = workloads.gpt2(torch.device("cuda"), batch=8, tokens=512)
    with fit(load, flags):
        for _ in range(3):
            training_step(load)
        share = overlapped_share(lambda: training_step(load))
    assert share > 0.1, share


def test_a_step_never_waits_for_the_device(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "measured", lambda _device: STREAMED)
    with fit(load, "--offload activations,optimizer"):
        for _ in range(3):
            training_step(load)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            load.model(**load.batch).loss.backward()
            load.optimizers[0].step()
            load.optimizers[0].zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode(before)


# -- optimizer state -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"amsgrad": True, "foreach": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_trained_weights_are_those_of_the_untouched_run(load: Workload, kind: type, settings: dict, link: Link) -> None:
    # eps: gradients that are nothing but rounding (biases of attention's keys) must not become whole updates
    load.optimizers[0] = kind(load.model.parameters(), lr=1e-4, eps=1e-5, weight_decay=0.01, **settings)
    expected, found = (weights_after(load, flags, 20) for flags in ("", "--offload optimizer"))
    for one, other in zip(found, expected, strict=True):
        # the embedding's gradient is summed by atomics, in another order every time
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_streamed_way_is_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "measured", lambda _device: STREAMED)
    runs = []
    for flags in ("", "--offload optimizer"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 1)
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with applied(optimizer, flags, bucket_bytes=2**18):
            for step in range(100):
                inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_the_choice_is_noted_and_measured_once(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    _link._known.clear()
    before = torch.cuda.get_rng_state()
    with fit(load, "--offload optimizer") as session:
        (note,) = session.notes
        (measured,) = _link._known.values()
        assert note == measured.verdict
        assert min(measured.down, measured.up, measured.both, measured.updated) > 0
    assert torch.equal(before, torch.cuda.get_rng_state())
    monkeypatch.setattr(_link, "_measured", None)  # not asked again
    with fit(load, "--offload optimizer") as session:
        assert session.notes == (note,)


def test_checkpoints_and_undo_give_the_user_s_own_format(load: Workload, link: Link) -> None:
    optimizer = load.optimizers[0]
    with fit(load, "--offload optimizer"):
        for _ in range(3):
            training_step(load)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        training_step(load)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].device == parameter.device
        assert float(state["step"]) == 4
    training_step(load)


def test_a_rescued_loop_trains_the_same(load: Workload, link: Link) -> None:
    for group in load.optimizers[0].param_groups:
        group["eps"] = 1e-5  # see above
    expected, found = (
        weights_after(load, flags, 5, rescue=True) for flags in ("", "--offload activations,optimizer --accumulate 2")
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.memory
def test_peak_of_a_step_is_three_buckets_above_the_state_it_no_longer_holds(load: Workload, link: Link) -> None:
    as_written, offloaded = (measure(load, flags, steps=2) for flags in ("", "--offload optimizer"))
    assert offloaded.peak_allocated_bytes < as_written.peak_allocated_bytes
