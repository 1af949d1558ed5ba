"""What predictions are made for where the model is on a GPU: which one it is, and how its allocator is set."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from memlab import Workload, predict
from memlab.allocator import Settings
from memlab.errors import WorkloadError
from memlab.hardware.gpus import gpus
from memlab.predicting.targets import target_for

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.memory]


@pytest.fixture
def workload() -> Workload:
    model = torch.nn.Linear(512, 512).cuda()
    batch = (torch.zeros(64, 512, device="cuda"), torch.zeros(64, 512, device="cuda"))
    return Workload(model, torch.optim.AdamW(model.parameters()), batch=batch, loss_fn=torch.nn.functional.mse_loss)


def test_the_allocators_own_settings_count(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert target_for(workload, None).settings == Settings.parse("expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "something_new:1")
    assert target_for(workload, None).settings == Settings()
    # of another GPU they are not asked
    assert target_for(workload, "A100 80GB").settings == Settings()


def test_of_a_gpu_that_the_catalogue_lacks_memory_is_predicted(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = predict(workload)
    real = torch.cuda.get_device_properties(0)
    names = ("name", "major", "minor", "multi_processor_count", "total_memory")
    unknown = SimpleNamespace(**{**{name: getattr(real, name) for name in names}, "name": "Accelerator 9000"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: unknown)
    assert all(listed.name != "Accelerator 9000" for listed in gpus())
    found = predict(workload)
    assert found.device == "Accelerator 9000"
    assert found.peak_allocated_bytes == known.peak_allocated_bytes
    assert found.peak_reserved_bytes == known.peak_reserved_bytes
    assert math.isnan(found.step_seconds)


def test_a_model_without_memory_has_no_target(workload: Workload) -> None:
    workload.model.to("meta")
    with pytest.raises(WorkloadError) as caught:
        target_for(workload, None)
    assert str(caught.value) == (
        "device meta: memory is measured on the CPU and on accelerators that torch has a module for (torch.cuda, torch.xpu, "
        "torch.mps); move the model to one of them"
    )


def test_a_prediction_for_the_cpu_of_a_model_on_a_gpu(workload: Workload) -> None:
    found = predict(workload, device="cpu")
    assert found.device == "CPU ledger"
    assert found.peak_reserved_bytes is None
