"""The CPU as a device, and the CUDA device against a stand-in for `torch.cuda`: what is asked of it and made of the answers.

The same on a real GPU is in `tests/gpu/test_measure.py`.
"""

from types import SimpleNamespace

import pytest
import torch

from memlab.errors import WorkloadError
from memlab.measuring.device import CountedDevice, Device, device_for
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.records import Category, Phase, TimelinePoint
from memlab.runtime.batch import Batch
from memlab.units import GIB, MIB


class FakeEvent:
    """An event that is reached when the test says so."""

    clock = 0.0
    reached_until = 0.0
    waits = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        FakeEvent.clock += 250.0
        self.at = FakeEvent.clock

    def query(self):
        return self.at <= FakeEvent.reached_until

    def synchronize(self):
        if not self.query():
            FakeEvent.waits += 1
        FakeEvent.reached_until = max(FakeEvent.reached_until, self.at)

    def elapsed_time(self, later):
        return later.at - self.at


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB whose counters the test sets."""
    FakeEvent.clock = FakeEvent.reached_until = 0.0
    FakeEvent.waits = 0
    state = SimpleNamespace(fraction=1.0, resets=0, allocated=3 * GIB, reserved=4 * GIB, counters=True, current=0)

    def counters(device):
        if not state.counters:
            return {}
        peaks = {"requested_bytes": 0, "allocated_bytes": state.allocated, "reserved_bytes": state.reserved}
        return {name: {"all": {"current": state.current, "peak": peak}} for name, peak in peaks.items()}

    replacements = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "current_stream": lambda device: None,
        "get_device_name": lambda device: "NVIDIA Test",
        "get_device_capability": lambda device: (8, 0),
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
        "get_per_process_memory_fraction": lambda device: state.fraction,
        "set_per_process_memory_fraction": lambda fraction, device: setattr(state, "fraction", fraction),
        "reset_peak_memory_stats": lambda device: setattr(state, "resets", state.resets + 1),
        "memory_stats_as_nested_dict": counters,
        "mem_get_info": lambda device: (70 * GIB, 80 * GIB),
        "Event": FakeEvent,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return state


def test_a_capacity_is_a_share_of_the_device_and_is_given_back(gpu):
    gpu.fraction = 0.9
    device = CountedDevice(torch.device("cuda"), 16 * GIB)
    assert device.device == torch.device("cuda", 1)
    assert device.name == "NVIDIA Test (capacity 16.00 GiB)"
    assert gpu.fraction == pytest.approx(0.2)
    device.close()
    assert gpu.fraction == 0.9
    gpu.fraction = 0.5
    device.close()
    assert gpu.fraction == 0.5


def test_a_capacity_beyond_the_device_is_the_whole_device(gpu):
    device = CountedDevice(torch.device("cuda", 0), 100 * GIB)
    assert gpu.fraction == 1.0
    device.close()


def test_without_a_capacity_the_limit_is_left_alone(gpu):
    gpu.fraction = 0.7
    CountedDevice(torch.device("cuda", 0)).close()
    assert gpu.fraction == 0.7


def test_peaks_come_from_the_allocator(gpu):
    device = device_for(torch.device("cuda", 0))
    assert device.peaks(None) == device.peaks(123) == (3 * GIB, 4 * GIB)
    assert device.driver_bytes() == 10 * GIB
    gpu.counters = False
    assert device.peaks(None) == (0, 0)


def test_the_breakdown_adds_what_the_ledger_cannot_see(gpu):
    device = CountedDevice(torch.device("cuda", 0))
    timeline = [TimelinePoint(0.0, Phase.STEP, {Category.PARAMETERS: GIB, Category.GRADIENTS: GIB})]
    assert device.breakdown(timeline, 3 * GIB, 4 * GIB) == {
        Category.PARAMETERS: GIB,
        Category.GRADIENTS: GIB,
        Category.WORKSPACES: GIB,
        Category.UNUSED: GIB,
    }


def test_what_lived_before_and_is_no_part_of_the_loop_is_no_workspace(gpu):
    device = CountedDevice(torch.device("cuda", 0))
    workspaces_bytes = 2 * 8_519_680
    gpu.current = GIB + workspaces_bytes + MIB
    assert device.elsewhere_bytes(GIB) == 0  # what rounding may add
    gpu.current += GIB // 2
    assert device.elsewhere_bytes(GIB) == GIB // 2 + MIB
    timeline = [TimelinePoint(0.0, Phase.STEP, {Category.PARAMETERS: GIB})]
    parts = device.breakdown(timeline, 3 * GIB, 3 * GIB, elsewhere_bytes=GIB // 2)
    assert parts == {Category.PARAMETERS: GIB, Category.ELSEWHERE: GIB // 2, Category.WORKSPACES: 3 * GIB // 2}
    gpu.counters = False
    assert device.elsewhere_bytes(0) == 0
    assert Device().elsewhere_bytes(0) == 0


def test_a_gpu_is_named_with_its_size(gpu):
    assert CountedDevice(torch.device("cuda", 0)).name == "NVIDIA Test (80.00 GiB)"


def test_the_ledger_of_a_gpu_leaves_cpu_tensors_out_and_enforces_nothing(gpu):
    ledger = CountedDevice(torch.device("cuda", 0), GIB).ledger()
    assert ledger.capacity_bytes is None
    with ledger:
        _kept = torch.zeros(10)
    assert ledger.live_bytes == 0


def run_steps(meter, model, optimizer, count):
    for _ in range(count):
        batch = torch.randn(3, 4)
        meter.forward_begins(Batch((batch,), {}))
        loss = model(batch).sum()
        meter.forward_ended(loss)
        loss.backward()
        meter.step_begins(optimizer)
        optimizer.step()
        meter.step_ended(optimizer, skipped=False)


def test_a_loop_is_timed_by_events_and_never_waits_until_it_is_measured(gpu):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = Meter(model, [optimizer], device_for(torch.device("cuda", 0)))
    run_steps(meter, model, optimizer, 4)
    assert gpu.resets == 4
    assert meter.steps == []
    FakeEvent.reached_until = 750.0
    assert [r.seconds for r in meter.steps] == [0.25, 0.25]
    assert FakeEvent.waits == 0
    measured = meter.measurement(Plan())
    assert FakeEvent.waits == 2
    assert measured.step_seconds == (0.25, 0.25)
    assert measured.peak_allocated_bytes == 3 * GIB
    assert measured.peak_reserved_bytes == 4 * GIB
    assert measured.driver_bytes == 10 * GIB
    assert measured.breakdown == {Category.WORKSPACES: 3 * GIB, Category.UNUSED: GIB}
    assert all(r.loss is not None and r.peak_allocated_bytes == 3 * GIB for r in meter.steps)
    meter.close()


def test_the_cpu_says_what_it_is():
    assert Device().name == "CPU ledger"
    assert Device(2**32).name == "CPU ledger (capacity 4.00 GiB)"
    assert Device(2**32).ledger().capacity_bytes == 2**32
    assert Device().peaks(5) == (5, None)
    assert Device().driver_bytes() is None


def test_devices_by_kind():
    assert isinstance(device_for(torch.device("cpu")), Device)
    with pytest.raises(WorkloadError, match="device meta: memory is measured on the CPU and on accelerators"):
        device_for(torch.device("meta"))
