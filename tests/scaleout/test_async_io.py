"""DeepSpeed's file operators: built in sight, in a folder of memlab's own, whatever earlier builds have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from memlab.errors import RefusalError, ScaleError
from memlab.plan import Plan
from memlab.runtime.interrupts import deferred_interrupts
from memlab.scaleout import async_io
from memlab.scaleout.engines import live_engine
from tests.helpers.needs import needs
from tests.scaleout.runs import gpt2

CPU = torch.device("cpu")
# stands in for DeepSpeed: says what ninja says, and leaves what torch leaves
BUILD = """
import os, pathlib, time
folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "async_io"
folder.mkdir()
(folder / "lock").touch()
print("[1/3] c++ one.cpp", flush=True)
time.sleep({seconds})
(folder / "one.o").touch()
(folder / "async_io.so").touch()
print("[3/3] c++ async_io.so")
(folder / "lock").unlink()
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a build that takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(async_io, "_BUILD", BUILD.format(seconds=0))
    return tmp_path / "memlab"


def built(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)).split("/", 1)[1] for path in cache.rglob("*") if path.is_file())


def test_it_is_built_once_and_said(cache: Path) -> None:
    said: list[str] = []
    async_io.ensure_built(CPU, said.append)
    assert built(cache) == ["async_io/async_io.so"]
    assert said[0].startswith(
        "building DeepSpeed's file operators, once for these versions, which takes a few minutes: 0 s"
    )
    assert said[-1].startswith("built DeepSpeed's file operators in ")
    async_io.ensure_built(CPU, said.append)
    assert len(said) == 2


def test_how_far_it_is_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_io, "_BUILD", BUILD.format(seconds=1))
    monkeypatch.setattr(async_io, "_SAY_SECONDS", 0.1)
    said: list[str] = []
    async_io.ensure_built(CPU, said.append)
    assert any(line.endswith(" s, file 1 of 3") for line in said), said


@pytest.mark.parametrize("held_back", [False, True])
def test_ctrl_c_ends_it_and_the_next_run_builds(cache: Path, monkeypatch: pytest.MonkeyPatch, held_back: bool) -> None:
    monkeypatch.setattr(async_io, "_BUILD", BUILD.format(seconds=60))
    press = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        if held_back:
            with deferred_interrupts():
                async_io.ensure_built(CPU, lambda _: None)
        else:
            async_io.ensure_built(CPU, lambda _: None)
    press.join()
    assert time.monotonic() - began < 30
    assert built(cache) == []
    monkeypatch.setattr(async_io, "_BUILD", BUILD.format(seconds=0))
    async_io.ensure_built(CPU, lambda _: None)
    assert built(cache) == ["async_io/async_io.so"]


@pytest.mark.full
def test_what_a_killed_build_left_is_not_waited_for(cache: Path) -> None:
    code = (
        "import torch; from memlab.scaleout import async_io\n"
        f"async_io._BUILD = {BUILD.format(seconds=5)!r}\n"
        "async_io.ensure_built(torch.device('cpu'), lambda line: print(line, flush=True))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout is not None
    run.stdout.readline()
    while not list(cache.rglob("lock")):
        time.sleep(0.05)
    run.kill()
    run.wait()
    run.stdout.close()
    (left,) = cache.iterdir()
    async_io.ensure_built(CPU, lambda _: None)
    assert left.exists()  # it could be under way
    long_ago = time.time() - 48 * 3600
    os.utime(left, (long_ago, long_ago))
    (whole,) = set(cache.iterdir()) - {left}
    whole.rename(cache / "of other versions")
    async_io.ensure_built(CPU, lambda _: None)
    assert not left.exists()


def test_two_builds_at_a_time_leave_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_io, "_BUILD", BUILD.format(seconds=0.5))
    others = [threading.Thread(target=async_io.ensure_built, args=(CPU, lambda _: None)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert built(cache) == ["async_io/async_io.so"]


def test_a_build_that_fails_names_the_first_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        async_io,
        "_BUILD",
        "print('[1/3] c++ one.cpp\\none.cpp:1: fatal error: none.h: No such file\\nninja: stopped'); exit(1)",
    )
    said = r"^DeepSpeed's file operators could not be built \(one\.cpp:1: fatal error: none\.h: No such file\)"
    with pytest.raises(ScaleError, match=said) as caught:
        async_io.ensure_built(CPU, lambda _: None)
    assert caught.value.__notes__[0].endswith("ninja: stopped")
    assert built(cache) == []


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ScaleError, match=r"cannot be built in .*memlab \(.*\): set XDG_CACHE_HOME to a folder"):
        async_io.ensure_built(CPU, lambda _: None)


@needs(extra="deepspeed")
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("none-such", r"there is no C\+\+ compiler \(none-such\)"),
        ("false", r"a program that uses libaio could not be built"),
    ],
)
def test_what_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    engine = live_engine(Plan.parse("--scale zero3 --offload optimizer:disk,params"), gpt2())
    with pytest.raises(RefusalError, match=rf"libaio, and {reason}.*; apt-get install g\+\+ libaio-dev"):
        engine.check()


def test_nothing_is_missing_where_it_is_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async_io.ensure_built(CPU, lambda _: None)
    monkeypatch.setenv("CXX", "none-such")
    assert async_io.missing(CPU) == ""
