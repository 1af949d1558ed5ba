"""Saved activations off the device."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memlab import RefusalError, Workload, fit, measure
from memlab.records import Category, Phase
from memlab.techniques.offload.spill import spilled_storages
from tests.loops.cases import CASES
from tests.techniques.models import Masked, distance, gpt2, gradients, ragged_batch, workload


@pytest.mark.parametrize(
    "flags", ["--offload activations", "--offload activations --checkpoint", "--offload activations:disk"]
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_bit_for_bit_the_same(flags: str, dropout: float) -> None:
    model, batch = gpt2(dropout=dropout), ragged_batch()
    torch.manual_seed(3)
    model(**batch).loss.backward()
    expected = gradients(model)
    with fit(workload(model), flags):
        torch.manual_seed(3)
        model(**batch).loss.backward()
    assert distance(gradients(model), expected) == 0


def test_activations_leave_the_device() -> None:
    model = gpt2(layers=6, vocabulary=64, width=128)
    load = workload(model, **ragged_batch(vocabulary=64))
    as_written, offloaded = (measure(load, flags, steps=1) for flags in ("", "--offload activations"))
    moved = as_written.breakdown[Category.ACTIVATIONS] - offloaded.breakdown[Category.ACTIVATIONS]
    assert moved > 0.7 * as_written.breakdown[Category.ACTIVATIONS]
    assert offloaded.host_bytes > 0.7 * moved
    assert as_written.host_bytes == 0


def test_inputs_of_checkpointed_blocks_leave_the_device_in_the_first_call_already() -> None:
    model, there = gpt2(layers=6), []
    results: list[weakref.ref[torch.Tensor]] = []

    def ran(_block: nn.Module, _given: Any, result: Any) -> None:
        there.append(sum(each() is not None for each in results))
        results.append(weakref.ref(result[0] if isinstance(result, tuple) else result))

    for block in model.transformer.h:
        block.register_forward_hook(ran)
    with fit(workload(model), "--checkpoint --offload activations"):
        for _ in range(2):
            results.clear()
            model(**ragged_batch()).loss.backward()

    # what a block has been given, and what leaves beside it: two of the largest tensors at most
    assert max(there) <= 3, there


def test_tensors_that_share_a_storage_are_stored_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = inputs * self.scale  # [64, 64], saved by both products below
            return (hidden * hidden).sum() + (hidden.t() @ hidden).sum()

    model = Twice()
    with fit(workload(model), "--offload activations") as session:
        loss = model(torch.randn(64, 64))
        stored = session.host_bytes
        loss.backward()
    assert 64 * 64 * 4 <= stored <= 2 * 64 * 64 * 4  # the input and `hidden`


def test_a_large_storage_seen_through_a_small_window_is_not_stored_whole() -> None:
    class Window(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (inputs[:, ::2][:8] * self.scale).square().sum()

    model = Window()
    inputs = torch.randn(4096, 128)
    model(inputs).backward()
    expected = gradients(model)
    with fit(workload(model), "--offload activations") as session:
        model(inputs).backward()
        assert session.host_bytes < 16 * 8 * 64 * 4
    assert distance(gradients(model), expected) == 0


def test_parameters_stay_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with fit(workload(model), "--offload activations") as session:
        model(torch.randn(2, 256)).sum().backward()
        assert session.host_bytes < 256 * 256 * 4


def test_nothing_stays_off_the_device_after_the_backward() -> None:
    model, batch = gpt2(), ragged_batch()
    before = len(spilled_storages)
    with fit(workload(model), "--offload activations"):
        loss = model(**batch).loss
        assert len(spilled_storages) > before
        loss.backward()
        del loss
        gc.collect()
        assert len(spilled_storages) == before


@pytest.mark.parametrize(
    "flags", ["--offload activations", "--offload params", "--accumulate 2 --checkpoint --offload activations"]
)
def test_a_graph_that_the_loop_drops_is_gone(flags: str) -> None:
    """What an operator saves of its own output may be too small to be moved, and would hold the operator's node."""

    def with_graph() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.is_contiguous()]
        return sum(tensor.grad_fn is not None for tensor in tensors)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    before = with_graph()
    with fit(workload(model), flags):
        for _ in range(2):
            model(torch.randn(2, 64)).sum()
        assert with_graph() == before


class Convolutions(nn.Module):
    """A conv net with pooling, normalisation and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Dropout2d(0.2), nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16 * 36, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(images), labels)


def _convolutions(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 16, 16, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def _trained(name: str, flags: str, **settings: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights after training with dropout."""
    torch.manual_seed(0)
    case = CASES.get(name)
    model = Convolutions() if case is None else case.model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), []
    with fit(Workload(model, optimizer), flags, **settings):
        for step in range(30):
            torch.manual_seed(step)
            loss = model(*_convolutions(step)) if case is None else case.loss(model, case.batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "masked-bert", "vit", "t5", "convolutions"])
def test_thirty_steps_are_bit_for_bit_the_same(name: str) -> None:
    (losses, weights), (expected, expected_weights) = (
        _trained(name, flags) for flags in ("--offload activations,optimizer", "")
    )
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, expected_weights, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("flags", ["--accumulate 4", "--checkpoint", "--accumulate 2 --checkpoint"])
def test_beside_other_techniques_and_under_a_rescue_it_changes_nothing(flags: str) -> None:
    found = [
        _trained("gpt2", f"{flags} {offload}", rescue=True)
        for offload in ("", "--offload activations", "--offload activations,optimizer")
    ]
    assert found[0][0] == found[1][0] == found[2][0]


def test_memory_off_the_device_is_used_again() -> None:
    model, batch = gpt2(), ragged_batch()
    with fit(workload(model), "--offload activations") as session:
        (technique,) = session.techniques
        held = []
        for _ in range(4):
            model(**batch).loss.backward()
            held.append((technique.spill.held_bytes, technique.spill.peak_bytes))
        assert held == held[:1] * 4
        assert held[0][0] <= 2 * held[0][1] + 2**20


def test_backward_reads_in_place_and_needs_no_memory_for_it() -> None:
    model = gpt2(layers=6, vocabulary=64, width=128)
    load = workload(model, **ragged_batch(vocabulary=64))
    as_written, offloaded = (measure(load, flags, steps=1) for flags in ("", "--offload activations"))
    in_backward = [
        max(point.live_bytes.get(Category.ACTIVATIONS, 0) for point in one.timeline if point.phase is Phase.BACKWARD)
        for one in (as_written, offloaded)
    ]
    assert in_backward[1] < 0.3 * in_backward[0]


def test_graphs_may_interleave_be_kept_and_be_forgotten() -> None:
    model, batches = gpt2(dropout=0.1), [ragged_batch(rows=rows) for rows in (2, 4, 8)]

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(5)
        first, second, third = (model(**batch).loss for batch in batches)
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        del third
        return gradients(model)

    expected = trained()
    with fit(workload(model), "--offload activations") as session:
        found = trained()
        gc.collect()
        assert session.techniques[0].spill.stored_bytes == 0
    assert distance(found, expected) == 0


def test_gradients_of_gradients() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    inputs = torch.randn(64, 32, requires_grad=True)

    def penalty() -> list[torch.Tensor]:
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        slope.square().sum().backward()
        return gradients(model)

    expected = penalty()
    with fit(workload(model), "--offload activations"):
        assert distance(penalty(), expected) == 0


def test_a_graph_outlives_the_session() -> None:
    model, batch = gpt2(), ragged_batch()
    model(**batch).loss.backward()
    expected = gradients(model)
    with fit(workload(model), "--offload activations"):
        loss = model(**batch).loss
    loss.backward()
    assert distance(gradients(model), expected) == 0


def test_an_exception_in_the_middle_leaves_nothing_behind() -> None:
    model, batch = gpt2(), ragged_batch()
    before = len(spilled_storages)
    with fit(workload(model), "--offload activations"):
        handle = model.transformer.h[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch)
        handle.remove()
        gc.collect()
        assert len(spilled_storages) == before
        model(**batch).loss.backward()


def test_parts_of_a_storage_that_are_written_at_other_times_are_told_apart() -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(32, 64)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            gate, value = self.linear(inputs).unsafe_chunk(2, dim=1)  # each with a version of its own
            gate = gate.sigmoid_()
            value = value.tanh_()
            return (gate * value).sum()

    model, inputs = Gates(), torch.randn(64, 32)
    model(inputs).backward()
    expected = gradients(model)
    with fit(workload(model), "--offload activations"):
        model(inputs).backward()
    assert distance(gradients(model), expected) == 0


def test_after_an_undo_nothing_is_open() -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("counts open files as Linux tells them")
    model, batch = gpt2(), ragged_batch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with fit(workload(model), "--offload activations,optimizer"):
        model(**batch).loss.backward()
        assert len(list(Path("/proc/self/fd").iterdir())) > before
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_host_memory_is_refused_where_it_saves_nothing() -> None:
    with pytest.raises(RefusalError) as caught:
        fit(workload(gpt2()), "--offload activations:host")
    assert str(caught.value) == (
        "offload: activations to host: the model is on the CPU, whose memory is the host's; "
        "use --offload activations:disk (the default there)"
    )


def test_what_a_forward_pass_writes_through_data_is_what_backward_reads() -> None:
    found = []
    for flags in ("", "--offload activations"):
        torch.manual_seed(0)
        model = Masked(in_blocks=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with fit(Workload(model, optimizer), flags):
            for step in range(3):
                torch.manual_seed(step)
                inputs, mask = torch.randn(16, 32), torch.rand(16, 32) < 0.2 * step  # nothing in the first step
                optimizer.zero_grad()
                model(inputs, mask).square().mean().backward()
                optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_part_of_a_storage_comes_back_with_its_dimensions_in_the_order_they_lie_in() -> None:
    seen = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(part)
            return part * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(ctx.saved_tensors[0].stride())
            return gradient * 2

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 3 * 64)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return Saves.apply(self.layer(inputs).view(4, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)[0])  # type: ignore[no-untyped-call, no-any-return]

    model = Heads()
    with fit(workload(model), "--offload activations"):
        model(torch.randn(4, 16, 64)).sum().backward()
    assert seen == [
        (1024, 16, 64, 1)
    ]  # heads between columns and rows, as in the product that kernels sum in this order
