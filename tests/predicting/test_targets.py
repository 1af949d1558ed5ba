"""What a prediction is made for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memlab import Workload, predict
from memlab.allocator import Settings
from memlab.allocator.settings import VARIABLES
from memlab.errors import MemlabError, RefusalError, WorkloadError
from memlab.hardware.gpus import gpu, gpus
from memlab.predicting.targets import interval_seconds, target_for
from memlab.units import GIB
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
        assert target.choices.inside is None


@pytest.mark.parametrize("name", [listed.name for listed in gpus()])
def test_every_gpu_of_the_catalogue_can_be_named(workload: Workload, name: str) -> None:
    target = target_for(workload, name.lower())
    assert target.name == name
    listed = gpu(name)
    assert target.device.type == listed.device_type
    assert (target.settings is not None) == (listed.device_type != "mps")
    assert (sum(target.workspaces) > 0) == listed.is_of_nvidia
    assert target.compute_capability == (listed.compute_capability if listed.is_of_nvidia else None)
    assert bool(target.notes) != listed.is_of_nvidia
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


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Any]:
    """A workload's stand-in, on a GPU of this machine that says so of itself."""

    def made(name: str, memory_bytes: int) -> Any:
        properties = SimpleNamespace(name=name, total_memory=memory_bytes, major=8, minor=6, multi_processor_count=64)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return SimpleNamespace(device=torch.device("cuda", 0))

    return made


def test_the_gpu_of_this_machine_has_the_allocator_settings_of_this_process(
    on_a_gpu: Callable[[str, int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = on_a_gpu("NVIDIA A10G", 23_689_691_136)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert target_for(workload, None).settings == Settings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:99")
    assert target_for(workload, None).settings == Settings.parse("expandable_segments:True,max_split_size_mb:99")
    assert target_for(workload, "A10G").settings == Settings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "invented:1")
    assert target_for(workload, None).settings == Settings()


@pytest.mark.parametrize(
    ("said", "memory_bytes", "name"),
    [
        ("Tesla T4", 15_828_320_256, "T4"),
        ("NVIDIA A100-SXM4-40GB", 42_481_549_312, "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", 85_094_825_984, "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", 85_028_765_696, "H100 SXM"),
        ("NVIDIA H100 PCIe", 85_028_765_696, "H100 PCIe"),
        ("NVIDIA GeForce RTX 4090", 25_386_352_640, "RTX 4090"),
        ("Tesla V100-SXM2-16GB", 16_935_682_048, "V100 16GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17_171_480_576, "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("NVIDIA GeForce GTX 1080 Ti", 11_721_506_816, "NVIDIA GeForce GTX 1080 Ti"),
        ("NVIDIA RTX A6000", 48 * GIB, "NVIDIA RTX A6000"),
    ],
)
def test_the_gpu_of_this_machine_is_recognised(
    on_a_gpu: Callable[[str, int], Any], said: str, memory_bytes: int, name: str
) -> None:
    assert target_for(on_a_gpu(said, memory_bytes), None).name == name


def test_a_gpu_of_this_machine_that_the_catalogue_lacks_has_memory_and_no_times(
    workload: Workload, on_a_gpu: Callable[[str, int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = target_for(on_a_gpu("NVIDIA RTX A6000", 48 * GIB), None)
    monkeypatch.undo()  # optimizers of torch's CUDA build would ask the driver
    assert (found.name, found.compute_capability) == ("NVIDIA RTX A6000", (8, 6))
    assert found.rates.notes == (
        "no times: NVIDIA RTX A6000 is not in the catalogue of GPUs, so its rates are not known; name one that is like it",
    )
    unknown = replace(gpu("A10G"), name="NVIDIA RTX A6000", bandwidth_bytes_per_second=math.nan)
    known, without_times = (predict(workload, "--accumulate 2", device=each) for each in ("A10G", unknown))
    assert without_times.peak_reserved_bytes == known.peak_reserved_bytes
    assert math.isnan(without_times.step_seconds)
    assert "NVIDIA RTX A6000" in str(without_times)


def test_intervals_hold_the_prediction(workload: Workload) -> None:
    for device in ("cpu", "T4"):
        low, high = target_for(workload, device).interval_bytes(10**9)
        assert low < 10**9 < high
    for calibrated in (False, True):
        shortest, longest = interval_seconds(1.0, calibrated=calibrated)
        assert 0 < shortest < 1.0 < longest
    assert interval_seconds(1.0, calibrated=True)[0] > interval_seconds(1.0, calibrated=False)[0]


def test_tf32_is_predicted_at_its_own_rate() -> None:
    model = nn.Linear(1024, 1024)
    wide = Workload(model, torch.optim.SGD(model.parameters()), (torch.zeros(8192, 1024),), name="wide")
    fp32, tf32 = (predict(wide, f"--precision {each}", "A100 80GB").step_seconds for each in ("fp32", "tf32"))
    assert tf32 < 0.5 * fp32
    assert predict(wide, "", "A100 80GB").step_seconds == fp32
    torch.set_float32_matmul_precision("high")  # as the loop has set it
    try:
        assert predict(wide, "", "A100 80GB").step_seconds == tf32
        assert predict(wide, "--precision fp32", "A100 80GB").step_seconds == fp32
    finally:
        torch.set_float32_matmul_precision("highest")


_TF32 = "precision: tf32 needs a CUDA GPU of the Ampere generation or newer; use --bf16 here"


@pytest.mark.parametrize(
    ("device", "refused"),
    [
        ("T4", {"--precision tf32": _TF32}),
        ("A100 80GB", {}),
        ("MI300X", {"--precision tf32": _TF32}),
        (
            "Arc B580",
            {
                "--precision tf32": _TF32,
                "--optim paged-adam8bit": "optimizer: paged-adam8bit needs a CUDA GPU with unified memory, and the model is on xpu; "
                "nearest: --adam8bit",
            },
        ),
        (
            "M2",
            {
                "--precision tf32": _TF32,
                "--adam8bit": "optimizer: bitsandbytes has no 8-bit kernels for MPS; use --offload optimizer, or --optim adafactor",
                "--offload optimizer:host": "offload: optimizer to host: the model is on MPS, whose memory is the host's; "
                "use --offload optimizer:disk (the default there)",
                "--offload activations:host": "offload: activations to host: the model is on MPS, whose memory is the host's; "
                "use --offload activations:disk (the default there)",
            },
        ),
    ],
)
def test_a_prediction_refuses_what_the_device_refuses(workload: Workload, device: str, refused: dict[str, str]) -> None:
    plans = {"--precision tf32", "--offload optimizer:host", "--offload activations:host", "--adam8bit", *refused}
    # bitsandbytes has its operators of four bits on every backend, in torch's where it has no kernels
    plans.add("--lora r=2 --base nf4")
    said = {}
    for plan in plans:
        try:
            predict(workload, plan, device)
        except RefusalError as refusal:
            said[plan] = str(refusal)
    assert said == refused
