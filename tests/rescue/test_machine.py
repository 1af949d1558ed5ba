"""What else on a machine explains that a GPU is full, or has room."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memlab.rescue.machine import held_by_others, is_shared_with_windows, other_processes, room_elsewhere

CUDA = torch.device("cuda", 0)


def test_processes_that_torch_names() -> None:
    error = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.25 GiB is free. Process "
        "812 has 512.00 MiB memory in use. Process 4711 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has "
        "17.90 GiB memory in use. Of the allocated memory 15.00 GiB is allocated by PyTorch"
    )
    assert other_processes(error) == {4711: 60 * 2**30, 812: 2**29}
    assert held_by_others(error) == "process 4711 holds 60.00 GiB of this GPU, process 812 512.0 MiB"


def test_sizes_that_wsl_does_not_know() -> None:
    assert held_by_others("Process 812 has 17179869184.00 GiB memory in use.") == ""
    assert held_by_others("CUDA error: out of memory") == ""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with three GPUs, of which torch sees two in another order; returns NVIDIA's program."""
    uuids = ["cc", "aa"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def _answers(program: Path, text: str, status: int = 0) -> None:
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    program.chmod(0o755)


def test_an_idle_gpu_is_named_as_torch_numbers_it(machine: Path) -> None:
    _answers(machine, "GPU-aa, 300, 24576\nGPU-bb, 0, 81920\nGPU-cc, 24000, 24576")
    assert room_elsewhere(CUDA) == (
        "GPU 1 is idle (23.71 GiB free): model.to('cuda:1') before its optimizer is made trains there"
    )


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("GPU-aa, 12000, 24576\nGPU-cc, 24000, 24576", 0),  # in use
        ("GPU-aa, [N/A], [N/A]", 0),
        ("no devices were found", 6),
        ("Failed to initialize NVML: Driver/library version mismatch", 0),
    ],
)
def test_nothing_is_said_of_gpus_that_are_not_known_to_be_idle(machine: Path, text: str, status: int) -> None:
    _answers(machine, text, status)
    assert room_elsewhere(CUDA) == ""


@pytest.mark.usefixtures("machine")
def test_nothing_is_said_without_nvidias_program() -> None:
    assert room_elsewhere(CUDA) == ""
    assert room_elsewhere(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("release", "is_shared"),
    [("5.15.167.4-microsoft-standard-WSL2", True), ("4.4.0-19041-Microsoft", True), ("6.8.0-45-generic", False)],
)
def test_wsl_is_windows(monkeypatch: pytest.MonkeyPatch, release: str, *, is_shared: bool) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert is_shared_with_windows() is is_shared
