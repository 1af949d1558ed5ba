"""What backends have, asked of stand-ins for their modules; `tests/accelerators` has one that computes."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memlab
from memlab import Workload, measure, predict
from memlab.errors import RefusalError, ScaleError
from memlab.hardware.gpus import gpu, gpu_for
from memlab.measuring.device import CountedDevice, Device, device_for
from memlab.plan import Tier
from memlab.runtime import accelerator
from memlab.scaleout import launching
from memlab.techniques.offload.spill import resolve_tier
from memlab.units import GIB, MIB

MPS, XPU = torch.device("mps"), torch.device("xpu", 0)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of MPS as on a Mac of 16 GiB."""
    asked = {
        "current_allocated_memory": lambda: 3 * GIB,
        "driver_allocated_memory": lambda: 4 * GIB,
        "recommended_max_memory": lambda: 12 * GIB,
    }
    for name, function in asked.items():
        monkeypatch.setattr(torch.mps, name, function)
    # an allocator that torch.accelerator cannot ask
    monkeypatch.setattr(torch.accelerator, "memory_stats", _refuses, raising=False)


def _refuses(*_: Any) -> None:
    raise RuntimeError("Allocator for mps is not a DeviceAllocator.")


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module of XPU with a GPU of 16 GiB."""
    state = SimpleNamespace(share=1.0, resets=0)
    nested = {
        name: {"all": {"current": size, "peak": 2 * size}}
        for name, size in {"allocated_bytes": GIB, "reserved_bytes": 2 * GIB, "active_bytes": GIB}.items()
    }
    asked = {
        "memory_stats_as_nested_dict": lambda _device: nested,
        "reset_peak_memory_stats": lambda _device: setattr(state, "resets", state.resets + 1),
        "mem_get_info": lambda _device: (10 * GIB, 16 * GIB),
        "get_device_properties": lambda _device: SimpleNamespace(total_memory=16 * GIB),
        "get_device_name": lambda _device: "Intel(R) Arc(TM) A770 Graphics",
        "get_per_process_memory_fraction": lambda _device: state.share,
        "set_per_process_memory_fraction": lambda share, _device: setattr(state, "share", share),
    }
    for name, function in asked.items():
        monkeypatch.setattr(torch.xpu, name, function, raising=False)
    return state


def test_without_an_accelerator_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert accelerator.device_type() is None
    assert not accelerator.is_in_use()
    assert accelerator.every() == []
    assert accelerator.random_states() == ()
    accelerator.empty_cache()
    accelerator.empty_host_cache()


@pytest.mark.usefixtures("mps")
def test_mps_counts_no_peaks_and_is_counted_by_the_ledger() -> None:
    assert accelerator.counters(MPS) == accelerator.Counters(3 * GIB, 4 * GIB, None, None, 3 * GIB, 3 * GIB)
    assert accelerator.peak_bytes(MPS) == 4 * GIB  # no less than the peak, where nothing was given back
    assert accelerator.free_and_total(MPS) == (8 * GIB, 12 * GIB)
    assert accelerator.most_bytes(MPS) == 12 * GIB
    device = device_for(MPS, GIB)
    assert type(device) is Device
    assert device.name == "MPS ledger (capacity 1.00 GiB)"
    assert device.ledger().device_type == "mps"
    assert device.observes_every_step


@pytest.mark.usefixtures("mps")
def test_mps_has_counters_where_torch_counts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As since torch 2.13: sizes as asked for are 0, and so may be active ones."""
    counted = {"allocated_bytes.all.current": 2 * GIB, "allocated_bytes.all.peak": 3 * GIB}
    counted |= {"reserved_bytes.all.current": 4 * GIB, "reserved_bytes.all.peak": 5 * GIB}
    counted |= {"requested_bytes.all.current": 0, "active_bytes.all.current": 0, "num_alloc_retries": 0}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda _device: counted, raising=False)
    assert accelerator.counters(MPS) == accelerator.Counters(2 * GIB, 4 * GIB, 3 * GIB, 5 * GIB, 2 * GIB, 2 * GIB)
    device = device_for(torch.device("mps", 0))
    assert isinstance(device, CountedDevice)
    assert device.name == "MPS (12.00 GiB)"
    assert type(device_for(torch.device("mps", 0), GIB)) is Device  # its allocator has no limit of this kind
    counted["allocated_bytes.all.peak"] = 0
    assert not accelerator.has_peaks(MPS)


@pytest.mark.usefixtures("mps")
def test_what_leaves_mps_goes_to_disk_since_its_memory_is_the_hosts() -> None:
    assert resolve_tier(Tier.AUTO, MPS, "optimizer") is Tier.DISK
    with pytest.raises(RefusalError) as caught:
        resolve_tier(Tier.HOST, MPS, "optimizer")
    assert str(caught.value) == (
        "offload: optimizer to host: the model is on MPS, whose memory is the host's; use --offload optimizer:disk (the default there)"
    )


def test_xpu_has_the_counters_and_the_limit_of_cuda(xpu: SimpleNamespace) -> None:
    device = device_for(XPU)
    assert isinstance(device, CountedDevice)
    assert device.name == "Intel(R) Arc(TM) A770 Graphics (16.00 GiB)"
    assert device.peaks(None) == (2 * GIB, 4 * GIB)
    assert device.driver_bytes() == 6 * GIB
    device.reset_peaks()
    assert xpu.resets == 1
    assert device.elsewhere_bytes(GIB // 2) == GIB // 2  # no workspaces of cuBLAS
    limited = device_for(XPU, 4 * GIB)
    assert xpu.share == pytest.approx(0.25)
    limited.close()
    assert xpu.share == 1.0
    assert accelerator.allocates_like_cuda(XPU)


def test_a_capacity_that_no_allocator_enforces_is_the_ledgers(
    xpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of XPU before torch had its limit."""
    monkeypatch.delattr(torch.xpu, "set_per_process_memory_fraction")
    device = device_for(XPU, 4 * GIB)
    assert type(device) is Device
    assert device.ledger().capacity_bytes == 4 * GIB


def test_several_processes_on_another_backend_are_refused_by_its_name() -> None:
    model = nn.Linear(2, 2)
    workload = Workload(model, torch.optim.SGD(model.parameters()))
    workload.trained_on = MPS
    with pytest.raises(ScaleError) as caught:
        launching.check(workload, 2)
    assert str(caught.value) == (
        "nproc 2: the model is on MPS, and processes train together on CUDA and on the CPU: move it to one of them"
    )


# what is CUDA's alone: its expandable segments and snapshots, NVIDIA's program, the twin's operators, NCCL, code that is written out
_OF_CUDA_ALONE = (
    "rescue/retries.py",
    "rescue/machine.py",
    "predicting/snapshots.py",
    "predicting/targets.py",
    "trace/",
)
_OF_CUDA_ALONE += ("scaleout/", "workshop/")


def test_no_other_module_asks_cuda() -> None:
    root = Path(memlab.__file__).parent
    asking = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("cuda", "is_cuda")
        and ast.unparse(node.value) != "torch.backends"
    }
    reads_of_tensors = {"runtime/lazy.py", "building/gradual.py", "techniques/optimizer/state_formats.py"}
    others = {path for path in asking if not path.startswith(_OF_CUDA_ALONE)} - reads_of_tensors
    assert others - {"support/doctor.py", "support/machine.py"} == {
        "runtime/accelerator.py"
    }  # those name torch's version


# --- catalogue ----------------------------------------------------------------------------------------


def workload(*, foreach: bool | None = None) -> Workload:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
    model = nn.Sequential(*layers)
    batch = torch.randn(4096, 256), torch.randn(4096, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    return Workload(model, optimizer, batch=batch, loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("name", ["MI300X", "Arc B580", "M2"])
def test_other_gpus_are_predicted_and_what_is_assumed_is_said(name: str) -> None:
    subject, listed = workload(), gpu(name)
    predicted = predict(subject, device=name)
    assert f"operators as CUDA takes them, attention as its formula: not measured on {name}" in predicted.notes
    has_no_model = f"allocated bytes only: memlab has no model of the allocator of {name}, which reserves more"
    assert (has_no_model in predicted.notes) == (listed.device_type == "mps") == (predicted.peak_reserved_bytes is None)
    measured = measure(workload(foreach=listed.device_type != "mps"), steps=1)  # as torch chooses there
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.05)
    half = predict(subject, "--bf16", device=name)
    assert half.peak_allocated_bytes < 0.8 * predicted.peak_allocated_bytes


def test_advice_names_gpus_of_nvidia() -> None:
    """What runs as it is there."""
    assert gpu_for(20 * GIB + 100 * MIB) == "use a GPU with the memory of a L4 (24.00 GiB)"
