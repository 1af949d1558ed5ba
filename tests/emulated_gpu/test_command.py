"""What the command refuses, and the guard it runs commands under. None of it needs CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memlab.hardware.gpus import gpu
from memlab.units import GIB, MIB
from tests.emulated_gpu import __main__ as command
from tests.emulated_gpu import build
from tests.emulated_gpu.errors import EmulationError
from tests.emulated_gpu.gpus import GPUS, properties
from tests.emulated_gpu.guard import ENDED, guarded

SITE = Path("site-packages")


def refusal(*arguments: str) -> str:
    with pytest.raises(EmulationError) as caught:
        command.run([*arguments, "--", "true"])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_gpu_that_is_not_emulated() -> None:
    assert refusal("--gpu", "T5") == (
        "--gpu T5: not a GPU that is emulated; choose one of T4, A10G, L4, RTX 4090, A100 40GB, A100 80GB, H100 SXM, B200"
    )


def test_every_gpu_says_what_the_catalogue_knows() -> None:
    for name, found in GPUS.items():
        listed = gpu(name)
        assert found.capability == listed.compute_capability
        assert 0.9 < found.total_bytes / listed.memory_bytes <= 1.01
        said = dict(field.split("=") for field in properties(name.lower()).split(";"))
        assert int(said["total"]) == found.total_bytes
    assert "total=104857600;context=13107200" in properties("T4", 100 * MIB)


@pytest.mark.parametrize(
    ("torch", "text"),
    [
        (
            build.Torch("2.14.1+cpu", None, SITE),
            "torch 2.14.1+cpu is a CPU build, which has no CUDA code to run; pip install torch==2.14.1 in an environment of its own "
            "(a CUDA build, several GB)",
        ),
        (
            build.Torch("2.12.0+cu126", "12.6", SITE),
            "torch 2.12.0+cu126 with CUDA 12.6: the emulated GPU is written for torch 2.14.1 with CUDA 13; pip install torch==2.14.1",
        ),
    ],
)
def test_a_torch_it_is_not_written_for(monkeypatch: pytest.MonkeyPatch, torch: build.Torch, text: str) -> None:
    monkeypatch.setattr(build, "installed_torch", lambda: torch)
    assert refusal() == text


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of packages with a CUDA build of torch in it, and nothing built so far."""
    monkeypatch.setattr(build, "installed_torch", lambda: build.Torch("2.14.1+cu130", "13.0", tmp_path))
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return tmp_path


def test_no_compiler(cuda_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cuda_build))
    assert refusal() == "no g++ and no readelf and no nm on the PATH; apt-get install g++"


def test_no_headers(cuda_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(build, "_toolkits", list)
    assert refusal() == (
        "headers of CUDA are missing; pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl nvidia-cublas nvidia-cudnn-cu13 "
        "nvidia-nccl-cu13 nvidia-cuda-nvrtc"
    )


def test_too_little_disk(cuda_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(build, "_HEADERS", {})
    usage = type("usage", (), {"free": 256 * MIB})
    monkeypatch.setattr(build.shutil, "disk_usage", lambda folder: usage)
    assert refusal() == f"0.25 GiB are free at {cuda_build / 'built'}, building takes 0.50 GiB; make room there"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--devices", "0"), "--devices 0: from 1 to 16 GPUs are emulated"),
        (("--gib", "0"), "--gib 0.0: must be more than zero"),
        (("--minutes", "nan"), "--minutes nan: must be more than zero"),
    ],
)
def test_sizes_and_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    (tmp_path / build.ORDER).write_text("")
    monkeypatch.setattr(command, "built", lambda say: tmp_path)
    assert refusal(*arguments) == text


def test_the_command_line_prints_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.emulated_gpu", "--gpu", "T5"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("emulated GPU: --gpu T5: ")
    assert done.stderr.count("\n") == 1


# --- the guard ------------------------------------------------------------------------------------


def run(program: str, limit_bytes: int = 200 * MIB, seconds: float = 30) -> tuple[int, str]:
    return guarded([sys.executable, "-c", program], os.environ, limit_bytes, seconds)


def test_a_status_is_handed_on() -> None:
    assert run("raise SystemExit(7)") == (7, "")
    assert run("import os; os.kill(os.getpid(), 15)") == (128 + 15, "")


def test_what_ran_before_is_not_the_commands() -> None:
    other = subprocess.Popen([sys.executable, "-c", "b = bytearray(300 * 2**20); print('made', flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline() == b"made\n"
    assert run("import time; time.sleep(0.5)") == (0, "")
    assert other.poll() is None
    other.communicate(b"\n", timeout=10)
    assert other.returncode == 0


def test_memory_ends_a_command_and_what_it_started() -> None:
    hog = "b = bytearray(120 * 2**20)\nimport time\ntime.sleep(30)"
    status, why = run(
        f"import subprocess, sys\n[subprocess.Popen([sys.executable, '-c', {hog!r}], start_new_session=True) for _ in '12']\nimport time\ntime.sleep(30)"
    )
    assert status == ENDED
    assert why.startswith("took ")
    assert why.endswith(" GiB of memory, allowed are 0.20 GiB (--host-gib)")


def test_a_size_from_garbage_is_refused_before_it_is_written_to() -> None:
    assert run("try: bytearray(2**40)\nexcept MemoryError: raise SystemExit(3)") == (3, "")


def test_time_ends_a_command() -> None:
    assert run("import time; time.sleep(30)", seconds=0.3) == (ENDED, "took longer than 0.005 minutes (--minutes)")


def test_an_absent_command() -> None:
    with pytest.raises(FileNotFoundError):
        guarded(["no-such-command"], os.environ, GIB, 1)
