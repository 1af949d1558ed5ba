"""`memlab doctor`: what it finds on a machine that is well, and on machines that are not."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from memlab.support import doctor, machine
from memlab.support.doctor import Finding, findings, main
from memlab.units import GIB


def _said(subject: str) -> list[Finding]:
    return [each for each in findings(run=False) if each.subject == subject]


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("memlab 0.")
    assert f"torch {metadata.version('torch')}" in printed
    assert "ok    training   --accumulate 2 --checkpoint --offload optimizer: same losses, peak " in printed
    assert printed.endswith("\nready\n")
    assert str(Path.home()) not in printed


def test_what_is_missing_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lowest = {
        "": {"torch": "99.0"},
        "lab": {"jupyterlab": "4.4", "nothing-of-this-name": "1.2"},
        "adapters": {"peft": "99"},
    }
    monkeypatch.setattr(doctor, "needed", lowest.__getitem__)
    assert main(["doctor", "--no-run"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if " packages " in line]
    assert lines == [
        "FAIL  packages   memlab needs torch ≥ 99.0; pip install 'memlab'",
        "FAIL  packages   memlab[lab] needs nothing-of-this-name ≥ 1.2; pip install 'memlab[lab]'",
        "note  packages   memlab[adapters] needs peft ≥ 99; pip install 'memlab[adapters]'",
    ]


def test_little_memory_and_a_folder_that_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "host_bytes", lambda: GIB)
    assert [str(each) for each in _said("memory")] == [
        "FAIL  memory     the host has 1.00 GiB; the course needs 2.00 GiB"
    ]
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.chdir(closed)
    closed.rmdir()
    (found,) = _said("folder")
    assert not found.is_well
    assert str(found).startswith("FAIL  folder     the working folder cannot be written to (No such file or directory)")


def test_a_gpu_that_is_there_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "T4")
    assert [str(each) for each in _said("GPU")] == [
        "note  GPU        T4: 2.00 GiB of 16.00 GiB free; other programs hold the rest; the driver's own program (nvidia-smi, rocm-smi, "
        "xpu-smi) names them"
    ]


def test_losses_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(100))
    monkeypatch.setattr(doctor, "_step", lambda _workload: 1.0 + next(steps))
    (found,) = [each for each in findings() if each.subject == "training"]
    assert found.is_well is False
    assert found.do == "please report it"


def test_a_check_that_fails_is_itself_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such device")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert "FAIL  device     OSError: no such device" in [str(each) for each in findings(run=False)]


def test_a_shell_finds_the_command(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "memlab", "doctor", "--no-run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(machine.__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("\nready\n")
