"""Saved activations off the device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from memlab import RefusalError, fit, measure
from memlab.records import Category
from tests.techniques.models import distance, gpt2, gradients, ragged_batch, workload


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
    from memlab.techniques.spill import _spilled_storages

    model, batch = gpt2(), ragged_batch()
    before = len(_spilled_storages)
    with fit(workload(model), "--offload activations"):
        loss = model(**batch).loss
        assert len(_spilled_storages) > before
        loss.backward()
        del loss
        gc.collect()
        assert len(_spilled_storages) == before


def test_host_memory_is_refused_where_it_saves_nothing() -> None:
    with pytest.raises(RefusalError) as caught:
        fit(workload(gpt2()), "--offload activations:host")
    assert str(caught.value) == (
        "offload: activations to host: the model is on the CPU, whose memory is the host's; "
        "use --offload activations:disk (the default there)"
    )
