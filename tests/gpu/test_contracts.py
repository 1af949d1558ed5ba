"""The contracts of the techniques on CUDA: exact gradients, falling memory, exact undo, capacity."""

from __future__ import annotations

import gc

import pytest
import torch

from memlab import Workload, compare, fit, measure, predict
from memlab.measuring.device import device_for
from memlab.measuring.runs import training_step
from memlab.records import Category
from memlab.session.snapshot import Snapshot
from tests.helpers.snapshots import changed_between
from tests.techniques.models import distance, gpt2, gradients, ragged_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

EXACT = [
    "--accumulate 4",
    "--checkpoint",
    "--checkpoint selective",
    "--accumulate 4 --checkpoint",
    "--offload activations",
    "--offload params",
    "--offload params:disk",
    "--checkpoint --offload params",
    "--accumulate 4 --offload params,activations",
    "--chunk-loss",
    "--checkpoint budget:4MiB",
    "--accumulate 2 --checkpoint budget:2MiB",
    "--tile 4",
    "--tile 4 --checkpoint",
]
RELEASED = [
    "--release-grads",
    "--release-grads --checkpoint",
    "--release-grads --adam8bit",
    "--release-grads --offload params,optimizer",
]
CLOSE = {
    "--fp16": 1e-2,
    "--bf16": 5e-2,
    "--precision tf32": 1e-2,
    "--bf16 --tile 4": 5e-2,
    "--fp16 --accumulate 4": 1e-2,
    "--fp16 --accumulate 4 --offload params": 1e-2,
    "--bf16 --checkpoint --offload params": 5e-2,
}
LOWER = [
    *EXACT,
    "--bf16",
    "--bf16 --tile 4",
    "--precision pure-bf16",
    "--adam8bit",
    "--optim paged-adam8bit",
    "--optim adafactor",
    "--offload optimizer",
]


@pytest.fixture
def load() -> Workload:
    model = gpt2(vocabulary=4_000, layers=4, width=256).cuda()
    batch = {key: value.cuda() for key, value in ragged_batch(vocabulary=4_000, length=64).items()}
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


@pytest.mark.parametrize("flags", EXACT)
def test_gradients_are_the_same(load: Workload, flags: str) -> None:
    load.model(**load.batch).loss.backward()
    expected = gradients(load.model)
    with fit(load, flags):
        load.model(**load.batch).loss.backward()
    assert distance(gradients(load.model), expected) < 5e-6


@pytest.mark.parametrize("flags", RELEASED)
@pytest.mark.parametrize("optimizer", ["foreach", "fused"])
def test_updates_in_the_backward_pass_are_the_same(load: Workload, flags: str, optimizer: str) -> None:
    if "8bit" in flags:
        pytest.importorskip("bitsandbytes")
    before = Snapshot(load)
    runs = []
    for plan in (flags.replace("--release-grads", "").strip(), flags):
        before.restore()
        # eps: gradients that are nothing but rounding (biases of attention's keys) must not become whole updates
        own = torch.optim.AdamW(load.model.parameters(), lr=1e-4, eps=1e-5, **{optimizer: True})
        with fit(Workload(load.model, own), plan):
            for _ in range(5):
                load.model(**load.batch).loss.backward()
                own.step()
                own.zero_grad()
        runs.append([p.detach().clone() for p in load.model.parameters()])
    # the embedding's gradient is summed by atomics, in another order every time
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.memory
def test_released_gradients_leave_the_peak(load: Workload) -> None:
    gradients_bytes = sum(p.numel() * p.element_size() for p in load.model.parameters())
    # of all rows the logits would make the peak, before there are gradients
    few = Workload(load.model, load.optimizers, batch={name: tensor[:1] for name, tensor in load.batch.items()})
    kept, released = compare(
        few, ["--checkpoint --accumulate 1", "--checkpoint --release-grads"], steps=2
    ).measurements[-2:]
    assert kept.peak_allocated_bytes - released.peak_allocated_bytes > 0.3 * gradients_bytes


@pytest.mark.parametrize("flags", CLOSE)
def test_gradients_are_close(load: Workload, flags: str) -> None:
    load.model(**load.batch).loss.backward()
    expected = gradients(load.model)
    with fit(load, flags):
        load.model(**load.batch).loss.backward()
    assert distance(gradients(load.model), expected) < CLOSE[flags]


@pytest.mark.memory
@pytest.mark.parametrize("flags", LOWER)
def test_the_peak_falls(load: Workload, flags: str) -> None:
    training_step(load)
    as_written, planned = (measure(load, plan, steps=2) for plan in ("", flags))
    assert planned.peak_allocated_bytes < as_written.peak_allocated_bytes


@pytest.mark.parametrize(
    "flags",
    [
        *EXACT,
        "--offload optimizer",
        "--fp16 --accumulate 2 --offload optimizer,activations",
        "--checkpoint --offload params,optimizer",
    ],
)
def test_comparing_leaves_no_difference(load: Workload, flags: str) -> None:
    training_step(load)
    before = Snapshot(load)
    compare(load, [flags], steps=1)
    assert changed_between(before, Snapshot(load)) == []


def test_undo_gives_the_memory_back(load: Workload) -> None:
    training_step(load)
    before = _requested_bytes()
    with fit(load, "--accumulate 4 --checkpoint --fp16 --offload optimizer,activations"):
        training_step(load)
    assert _requested_bytes() == before


def _requested_bytes() -> int:
    """What tensors have asked for: blocks that serve them may be larger than they were before."""
    gc.collect()
    torch.cuda.empty_cache()  # what other streams have used is free once the allocator looks at their events
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_8bit_state_takes_its_arithmetic(load: Workload) -> None:
    training_step(load)
    parameters = sum(p.numel() for p in load.model.parameters())
    with fit(load, "--adam8bit"):
        state = measure(load, "--adam8bit", steps=1).breakdown[Category.OPTIMIZER_STATE]
    assert state < 2.1 * parameters


@pytest.mark.memory
def test_a_capacity_is_kept_and_given_back(load: Workload) -> None:
    needed = measure(load, steps=1)
    device = device_for(torch.device("cuda"), int(0.7 * needed.peak_reserved_bytes))
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        measure(load, steps=1, device=device)
    device.close()
    gc.collect()
    assert measure(load, steps=1).fits


def test_replay_restores_the_random_state_of_the_gpu(load: Workload) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Dropout(0.5), torch.nn.Linear(512, 1)).cuda()
    inputs = torch.randn(8, 8, device="cuda")
    with fit(Workload(model, torch.optim.SGD(model.parameters(), 0.1)), "--accumulate 4"):
        model(inputs)
        torch.manual_seed(5)
        output = model(inputs)
        output.square().mean().backward()
        found = gradients(model)
    torch.manual_seed(5)
    torch.cat([model(inputs[start : start + 2]) for start in range(0, 8, 2)]).square().mean().backward()
    assert distance(found, gradients(model)) < 1e-6


def test_the_budget_chooses_as_predicted(load: Workload) -> None:
    """The choice is made of operations and bytes, which are the same on every device."""
    plan = "--checkpoint budget:6MiB"
    measured, predicted = measure(load, plan, steps=1), predict(load, plan)
    (choice,) = (note for note in measured.notes if "blocks recomputed" in note)
    assert choice in predicted.notes


@pytest.mark.memory
def test_casts_of_large_layers_are_not_kept(load: Workload) -> None:
    """Beside feed-forward parts: what large layers are spared under autocast is their weights in 16 bits."""
    whole, tiled = (measure(load, flags, steps=2).peak_allocated_bytes for flags in ("--bf16", "--bf16 --tile 4"))
    casts = sum(p.numel() for p in load.model.parameters() if p.dim() == 2) * 2
    assert whole - tiled > 0.3 * casts
