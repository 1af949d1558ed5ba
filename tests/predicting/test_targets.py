"""What a prediction is made for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab import Workload
from memlab.devices import gpu, gpus
from memlab.errors import MemlabError, WorkloadError
from memlab.predicting.targets import interval_seconds, target_for
from tests.predicting.families import family


@pytest.fixture
def workload() -> Workload:
    return family("mlp")


@pytest.mark.parametrize("device", [None, "cpu", " CPU "])
def test_the_cpu_is_counted_by_the_ledger(workload: Workload, device: str | None) -> None:
    target = target_for(workload, device)
    assert target.name == "CPU ledger"
    assert target.device == torch.device("cpu")
    assert target.settings is None
    assert target.workspaces == ()
    assert target.compute_capability is None
    with target.choices.entered():
        assert target.choices.hidden_bytes is None


@pytest.mark.parametrize("name", [listed.name for listed in gpus()])
def test_every_gpu_of_the_catalogue_can_be_named(workload: Workload, name: str) -> None:
    target = target_for(workload, name.lower())
    assert target.name == name
    assert target.device.type == "cuda"
    assert target.settings is not None
    assert sum(target.workspaces) > 0
    assert target.compute_capability == gpu(name).compute_capability
    assert target_for(workload, gpu(name)).name == name


@pytest.mark.parametrize(
    ("name", "nearest"), [("T5", "did you mean T4"), ("A100", "A100 40GB or A100 80GB"), ("toaster", "there are")]
)
def test_a_gpu_that_is_not_known(workload: Workload, name: str, nearest: str) -> None:
    with pytest.raises(MemlabError, match=nearest):
        target_for(workload, name)


def test_a_device_that_is_neither_says_what_is_allowed() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    workload = Workload(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(WorkloadError, match="device meta"):
        target_for(workload, None)
    assert target_for(workload, "L4").name == "L4"


def test_settings_of_this_process_are_not_those_of_a_gpu_elsewhere(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = target_for(workload, "T4").settings
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert target_for(workload, "T4").settings == before


def test_intervals_hold_the_prediction(workload: Workload) -> None:
    for device in ("cpu", "T4"):
        low, high = target_for(workload, device).interval_bytes(10**9)
        assert low < 10**9 < high
    for calibrated in (False, True):
        shortest, longest = interval_seconds(1.0, calibrated=calibrated)
        assert 0 < shortest < 1.0 < longest
    assert interval_seconds(1.0, calibrated=True)[0] > interval_seconds(1.0, calibrated=False)[0]
