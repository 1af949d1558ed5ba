"""The CUDA device on a real GPU: counters, events, capacity and categories."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from memlab import Workload, measure, predict
from memlab.measuring.device import device_for
from memlab.measuring.steps import Meter
from memlab.plan import Plan
from memlab.predicting.plan_predictor import PlanPredictor
from memlab.predicting.segments import by_name
from memlab.records import Category
from memlab.runtime.batch import Batch
from memlab.runtime.cublas import workspaces
from memlab.units import GIB, MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def loop():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    return model, torch.optim.AdamW(model.parameters()), torch.randn(512, 1024, device="cuda")


def squares(model, batch):
    return model(batch).pow(2).mean()


def run_steps(meter, model, optimizer, batch, count, loss_of=squares):
    for _ in range(count):
        meter.forward_begins(Batch((batch,), {}))
        loss = loss_of(model, batch)
        meter.forward_ended(loss)
        loss.backward()
        meter.step_begins(optimizer)
        optimizer.step()
        meter.step_ended(optimizer, skipped=False)
        optimizer.zero_grad()


@pytest.mark.memory
def test_counters_agree_with_torch_and_the_ledger_explains_them(loop):
    model, optimizer, batch = loop
    meter = Meter(model, [optimizer], device_for(torch.device("cuda")))
    run_steps(meter, model, optimizer, batch, 6)
    measured = meter.measurement(Plan())
    meter.close()
    count = sum(p.numel() for p in model.parameters())
    assert measured.breakdown[Category.PARAMETERS] == 4 * count
    assert measured.breakdown[Category.OPTIMIZER_STATE] >= 8 * count
    assert measured.peak_allocated_bytes >= torch.cuda.max_memory_allocated()
    seen = sum(size for name, size in measured.breakdown.items() if name not in (Category.WORKSPACES, Category.UNUSED))
    # on a large GPU those of cuBLAS take as much as such a model
    least = 0.8 * (measured.peak_allocated_bytes - sum(workspaces(torch.cuda.get_device_capability())))
    assert least <= seen <= measured.peak_allocated_bytes
    assert measured.peak_reserved_bytes is not None
    assert measured.peak_reserved_bytes >= measured.peak_allocated_bytes


@pytest.mark.hardware("how long kernels take")
def test_events_time_the_work_and_not_the_queueing(loop):
    model, optimizer, batch = loop
    meter = Meter(model, [optimizer], device_for(torch.device("cuda")))
    run_steps(meter, model, optimizer, batch, 3)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run_steps(meter, model, optimizer, batch, 20)
    end.record()
    torch.cuda.synchronize()
    seconds = sum(record.seconds for record in meter.steps[-20:])
    meter.close()
    assert seconds == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.2)


def test_losses_are_read_right(loop):
    model, optimizer, batch = loop
    meter = Meter(model, [optimizer], device_for(torch.device("cuda")))
    with torch.no_grad():
        expected = float(model(batch).pow(2).mean())
    run_steps(meter, model, optimizer, batch, 1)
    assert meter.measurement(Plan()).losses[0] == pytest.approx(expected, rel=1e-5)
    meter.close()


@pytest.mark.memory
def test_a_capacity_makes_the_gpu_small_and_is_lifted_again():
    # the fraction counts what the process holds already, so leave room for other tests' leftovers
    torch.cuda.empty_cache()
    capacity = torch.cuda.memory_reserved() + 512 * MIB
    device = device_for(torch.device("cuda"), capacity)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        device.close()
    assert torch.empty(2 * GIB, dtype=torch.uint8, device="cuda").numel() == 2 * GIB


@pytest.mark.memory
def test_what_was_reserved_fits_a_capacity_of_the_same_size():
    torch.cuda.empty_cache()
    total, held = torch.cuda.get_device_properties(0).total_memory, torch.cuda.memory_reserved()
    # a size whose share of the device, times the device, is just below it
    sizes = (held + number * 2 * MIB for number in range(10, total // (2 * MIB)))
    capacity = next((size for size in sizes if int(size / total * total) < size), held + 20 * MIB)
    device = device_for(torch.device("cuda"), capacity)
    try:
        torch.empty(capacity - held, dtype=torch.uint8, device="cuda")
        assert torch.cuda.max_memory_reserved() >= capacity
    finally:
        device.close()


@pytest.mark.memory
def test_a_capacity_holds_after_training_without_one():
    torch.cuda.empty_cache()
    held_bytes = torch.cuda.memory_reserved()
    torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")  # cached from here on
    device = device_for(torch.device("cuda"), held_bytes + 128 * MIB)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() <= held_bytes + 128 * MIB
    finally:
        device.close()


@pytest.mark.memory
def test_a_chunked_loss_takes_one_tile_and_what_was_predicted():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32768)).cuda()
    batch = torch.zeros(1024, 64, device="cuda"), torch.zeros(1024, dtype=torch.long, device="cuda")
    workload = Workload(model, torch.optim.SGD(model.parameters()), batch=batch, loss_fn=F.cross_entropy)
    measured = measure(workload, "--chunk-loss", steps=2).peak_allocated_bytes
    assert predict(workload, "--chunk-loss").peak_allocated_bytes == pytest.approx(measured, abs=2 * MIB)


@pytest.mark.memory
def test_steps_that_are_watched_count_as_others_do():
    # autograd sums the three gradients of the one weight in place, but not while it is watched
    model = torch.nn.Linear(2048, 2048, bias=False).cuda()
    optimizer, batch = torch.optim.SGD(model.parameters()), torch.zeros(8, 2048, device="cuda")

    def loss_of(_model, _batch):
        return sum((batch @ model.weight * factor).sum() for factor in (1, 2, 3))

    peaks = []
    meter = Meter(model, [optimizer], device_for(torch.device("cuda")))
    for _ in range(4):
        run_steps(meter, model, optimizer, batch, 1, loss_of)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] >= peaks[3] + 15 * MIB  # what torch counts
    measured = meter.measurement(Plan())
    meter.close()
    assert measured.peak_allocated_bytes == pytest.approx(peaks[3], abs=1 * MIB)
    assert sum(size for name, size in measured.breakdown.items() if name != Category.UNUSED) == pytest.approx(
        measured.peak_allocated_bytes, abs=1 * MIB
    )


@pytest.mark.memory
def test_what_is_no_part_of_the_loop_is_measured_and_predicted_alike():
    gc.collect()
    left_bytes = device_for(torch.device("cuda")).elsewhere_bytes(0)  # by the tests before this one
    other, data = torch.nn.Linear(4096, 4096).cuda(), torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 4096)).cuda()
    batch = torch.zeros(4096, 1024, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
    workload = Workload(model, torch.optim.SGD(model.parameters()), batch=batch, loss_fn=F.cross_entropy)
    measured = measure(workload, "", steps=2)
    predicted = predict(workload)
    held = left_bytes + data.nbytes + sum(parameter.nbytes for parameter in other.parameters())
    for each in (measured, predicted):
        assert each.breakdown[Category.ELSEWHERE] == pytest.approx(held, abs=2 * MIB)
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, abs=4 * MIB)


@pytest.mark.memory
def test_a_model_of_an_earlier_cell_that_only_a_cycle_keeps_is_not_predicted():
    model = torch.nn.Linear(256, 256).cuda()
    workload = Workload(model, torch.optim.SGD(model.parameters()), batch=(torch.zeros(8, 256, device="cuda"),))
    alone = predict(workload).peak_allocated_bytes
    earlier = torch.nn.Linear(4096, 4096).cuda()
    earlier.itself = [earlier]
    del earlier
    assert predict(workload).peak_allocated_bytes == alone


@pytest.mark.memory
def test_an_output_that_the_loop_keeps_is_no_other_tensor():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8192)).cuda()
    batch = torch.zeros(4096, 256, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
    workload = Workload(model, torch.optim.SGD(model.parameters()), batch=batch, loss_fn=F.cross_entropy)
    measured = measure(workload, "", steps=2)
    kept = model(batch[0]).detach()  # by the loop's last step, as `out = model(…)` does
    predictor = PlanPredictor(workload)

    def elsewhere(flags: str) -> int:
        return by_name(predictor.parts(Plan.parse(flags)).base).get(Category.ELSEWHERE, 0)

    before = elsewhere("")
    assert before >= kept.nbytes
    predictor.learn(replace(measured, peak_allocated_bytes=measured.peak_allocated_bytes + kept.nbytes))
    for flags in ("", "--accumulate 4"):
        assert elsewhere(flags) == pytest.approx(before - kept.nbytes, abs=1 * MIB)
